"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number."""

import json
from enum import Enum, auto

from router.front.parsers.json_text import NAME, Head, ObjectScan, member
from router.front.parsers.pieces import Piece, PieceKind, undecided

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BEFORE = [r"\s*", r"\{", r"\s*", *member("name"), NAME, r"\s*", ",", r"\s*"]
HEAD = Head([*_BEFORE, *member("arguments")], [*_BEFORE, *member("parameters")])


class _Place(Enum):
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    WHOLE = auto()
    """The call is written in another order, or is none: it is read when it is all there."""


class HermesParser:
    # Mutable state: where it is, what is not decided yet, how many calls there were, and the arguments under way.

    is_reasoning = False

    def __init__(self) -> None:
        self._place = _Place.TEXT
        self._held = ""
        self._calls = 0
        self._is_behind_call = False
        self._scan = ObjectScan()

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        moves = {
            _Place.TEXT: self._text,
            _Place.HEAD: self._head,
            _Place.ARGUMENTS: self._arguments,
            _Place.TAIL: self._tail,
            _Place.WHOLE: self._whole,
        }
        place = None
        while place is not self._place:
            place = self._place
            pieces += moves[place]()
        return pieces

    def flush(self) -> list[Piece]:
        rest, self._held = self._held, ""
        if self._place in (_Place.HEAD, _Place.WHOLE):
            return self._read(rest) or _content(OPEN + rest)
        if self._place is _Place.ARGUMENTS:
            return [Piece(PieceKind.ARGUMENTS, rest, self._calls - 1)] if rest else []
        if self._place is _Place.TAIL or (self._is_behind_call and not rest.strip()):
            return []
        return _content(rest)

    def _text(self) -> list[Piece]:
        at = self._held.find(OPEN)
        if at >= 0:
            before, self._held = self._held[:at].rstrip(), self._held[at + len(OPEN) :]
            self._place = _Place.HEAD
        else:
            cut = len(self._held) - undecided(self._held, OPEN)
            before, self._held = self._held[:cut], self._held[cut:]
        if before:
            self._is_behind_call = False
        return _content(before)

    def _head(self) -> list[Piece]:
        found, closed = HEAD.match(self._held), self._held.find(CLOSE)
        if found is not None and not 0 <= closed < found[1]:
            name, self._held = _name(found[0]), self._held[found[1] :]
            if name:
                self._scan = ObjectScan()
                self._place = _Place.ARGUMENTS
                self._calls += 1
                return [Piece(PieceKind.CALL, name, self._calls - 1)]
        elif closed < 0 and HEAD.may_follow(self._held):
            return []
        self._place = _Place.WHOLE
        return []

    def _arguments(self) -> list[Piece]:
        end = self._scan.end(self._held)
        given = self._held if end is None else self._held[:end]
        self._held = self._held[len(given) :]
        if end is not None:
            self._place = _Place.TAIL
        return [Piece(PieceKind.ARGUMENTS, given, self._calls - 1)] if given else []

    def _tail(self) -> list[Piece]:
        rest = self._held.lstrip()
        if rest.startswith("}"):
            rest = rest[1:].lstrip()
        if rest.startswith(CLOSE):
            self._held = rest[len(CLOSE) :]
            self._is_behind_call = True
        elif CLOSE.startswith(rest):
            return []
        self._place = _Place.TEXT
        return []

    def _whole(self) -> list[Piece]:
        at = self._held.find(CLOSE)
        if at < 0:
            return []
        body, self._held = self._held[:at], self._held[at + len(CLOSE) :]
        self._place = _Place.TEXT
        pieces = self._read(body)
        self._is_behind_call = bool(pieces)
        return pieces or _content(OPEN + body + CLOSE)

    def _read(self, body: str) -> list[Piece]:
        """Return the call that a whole text is; nothing where it is none."""
        call = read_call(body)
        if call is None:
            return []
        self._calls += 1
        number = self._calls - 1
        return [Piece(PieceKind.CALL, call[0], number), Piece(PieceKind.ARGUMENTS, call[1], number)]


def read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call that is one JSON object, whatever the order of its members."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return value["name"], arguments
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments or {}, ensure_ascii=False)


def _name(written: str) -> str:
    """Return the function's name, empty where it is no JSON string."""
    try:
        name = json.loads(written)
    except ValueError:
        return ""
    return str(name)


def _content(text: str) -> list[Piece]:
    return [Piece(PieceKind.CONTENT, text)] if text else []

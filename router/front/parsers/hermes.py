"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number."""

import json
from enum import Enum, auto

from router.front.parsers.calls import CallParser, content, name_of
from router.front.parsers.json_text import MAX_HEAD_CHARS, NAME, Head, member
from router.front.parsers.pieces import Piece

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


class HermesParser(CallParser):
    # Mutable state: whether a call is all that stands before what comes.

    def __init__(self) -> None:
        super().__init__(_Place.TEXT)
        self._is_behind_call = False

    def flush(self) -> list[Piece]:
        rest = self._rest()
        if self._place in (_Place.HEAD, _Place.WHOLE):
            return self._read(rest) or content(OPEN + rest)
        if self._place is _Place.ARGUMENTS:
            return self._more(rest)
        if self._place is _Place.TAIL or (self._is_behind_call and not rest.strip()):
            return []
        return content(rest)

    def _text(self) -> list[Piece]:
        before, is_there = self._until(OPEN)
        if is_there:
            self._place = _Place.HEAD
        if before:
            self._is_behind_call = False
        return content(before)

    def _head(self) -> list[Piece]:
        found, closed = HEAD.match(self._held), self._held.find(CLOSE)
        if found is not None and not 0 <= closed < found[1]:
            name, self._held = name_of(found[0]), self._held[found[1] :]
            if name:
                self._place = _Place.ARGUMENTS
                return self._call(name)
        elif closed < 0 and HEAD.may_follow(self._held):
            return []
        self._place = _Place.WHOLE
        return []

    def _arguments(self) -> list[Piece]:
        pieces, is_whole = self._given()
        if is_whole:
            self._place = _Place.TAIL
        return pieces

    def _tail(self) -> list[Piece]:
        rest = self._held.lstrip()
        if rest.startswith("}"):
            rest = rest[1:].lstrip()
        before = len(self._held) - len(rest)
        if rest.startswith(CLOSE) and before <= MAX_HEAD_CHARS:
            self._held = rest[len(CLOSE) :]
            self._is_behind_call = True
        elif CLOSE.startswith(rest) and before <= MAX_HEAD_CHARS:
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
        return pieces or content(OPEN + body + CLOSE)

    def _read(self, body: str) -> list[Piece]:
        """Return the call that a whole text is; nothing where it is none."""
        call = read_call(body)
        if call is None:
            return []
        return [*self._call(call[0]), *self._more(call[1])]

    def _pause(self) -> None:
        if self._place is _Place.WHOLE:
            self._aside.wait(self._held, CLOSE)
        else:
            super()._pause()

    PAUSES = frozenset({_Place.TEXT})
    MOVES = {  # noqa: RUF012
        _Place.TEXT: _text,
        _Place.HEAD: _head,
        _Place.ARGUMENTS: _arguments,
        _Place.TAIL: _tail,
        _Place.WHOLE: _whole,
    }


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

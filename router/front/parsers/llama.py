"""Calls as Llama 3 models write them: the answer is `{"name": …, "parameters": {…}}`, perhaps behind `<|python_tag|>`,
and several stand side by side with `;` between them. Behind other text only the tag begins a call."""

import json
from enum import Enum, auto

from router.front.parsers.json_text import NAME, Head, ObjectScan, letters, member
from router.front.parsers.pieces import Piece, PieceKind, undecided

TAG = "<|python_tag|>"
_TYPED = [r"\{", r"\s*", *member("type"), *letters('"function"'), r"\s*", ",", r"\s*"]
_PLAIN = [r"\{", r"\s*"]
_NAMED = [*member("name"), NAME, r"\s*", ",", r"\s*"]
HEAD = Head(
    *([*first, *_NAMED, *member(key)] for first in (_PLAIN, _TYPED) for key in ("parameters", "arguments"))
)


class _Place(Enum):
    START = auto()
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    BETWEEN = auto()


class LlamaParser:
    # Mutable state: where it is, what is not decided yet, what stood before it and is to be shown if it is no call,
    # how many calls there were, and the arguments under way.

    is_reasoning = False

    def __init__(self) -> None:
        self._place = _Place.START
        self._held = ""
        self._before = ""
        self._calls = 0
        self._scan = ObjectScan()

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        moves = {
            _Place.START: self._start,
            _Place.TEXT: self._text,
            _Place.HEAD: self._head,
            _Place.ARGUMENTS: self._arguments,
            _Place.TAIL: self._tail,
            _Place.BETWEEN: self._between,
        }
        place = None
        while place is not self._place:
            place = self._place
            pieces += moves[place]()
        return pieces

    def flush(self) -> list[Piece]:
        rest, self._held = self._before + self._held, ""
        if self._place is _Place.ARGUMENTS:
            return [Piece(PieceKind.ARGUMENTS, rest, self._calls - 1)] if rest else []
        if self._place is _Place.TAIL or (self._place is _Place.BETWEEN and rest.strip() in ("", ";")):
            return []
        return _content(rest)

    def _start(self) -> list[Piece]:
        """See whether the answer begins with a call."""
        shown = self._held.lstrip()
        if shown.startswith("{"):
            self._before, self._held = self._held[: -len(shown)], shown
            self._place = _Place.HEAD
        elif shown and not TAG.startswith(shown):
            self._place = _Place.TEXT
        return []

    def _text(self) -> list[Piece]:
        at = self._held.find(TAG)
        if at >= 0:
            before, self._held = self._held[:at].rstrip(), self._held[at + len(TAG) :].lstrip()
            self._before = TAG
            self._place = _Place.HEAD
        else:
            cut = len(self._held) - undecided(self._held, TAG)
            before, self._held = self._held[:cut], self._held[cut:]
        return _content(before)

    def _head(self) -> list[Piece]:
        if self._before == TAG:
            self._held = self._held.lstrip()
        found = HEAD.match(self._held)
        if found is None and HEAD.may_follow(self._held):
            return []
        name = _name(found[0]) if found is not None else ""
        if found is None or not name:
            # No call: it is content, with what stood before it. Only a tag can begin one behind it.
            shown, self._before = self._before, ""
            self._place = _Place.TEXT
            return _content(shown)
        self._held, self._before = self._held[found[1] :], ""
        self._scan = ObjectScan()
        self._place = _Place.ARGUMENTS
        self._calls += 1
        return [Piece(PieceKind.CALL, name, self._calls - 1)]

    def _arguments(self) -> list[Piece]:
        end = self._scan.end(self._held)
        given = self._held if end is None else self._held[:end]
        self._held = self._held[len(given) :]
        if end is not None:
            self._place = _Place.TAIL
        return [Piece(PieceKind.ARGUMENTS, given, self._calls - 1)] if given else []

    def _tail(self) -> list[Piece]:
        rest = self._held.lstrip()
        if not rest:
            return []
        if rest.startswith("}"):
            self._held = rest[1:]
            self._place = _Place.BETWEEN
        else:
            self._place = _Place.TEXT
        return []

    def _between(self) -> list[Piece]:
        """See whether another call follows."""
        rest = self._held.lstrip()
        if rest.startswith(";"):
            rest = rest[1:].lstrip()
        if rest.startswith("{"):
            self._before, self._held = self._held[: -len(rest)], rest
            self._place = _Place.HEAD
        elif rest.startswith(TAG):
            self._held = rest
            self._place = _Place.TEXT
        elif rest and not TAG.startswith(rest):
            self._place = _Place.TEXT
        return []


def _name(written: str) -> str:
    try:
        return str(json.loads(written))
    except ValueError:
        return ""


def _content(text: str) -> list[Piece]:
    return [Piece(PieceKind.CONTENT, text)] if text else []

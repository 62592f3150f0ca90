"""Calls as Llama 3 models write them: the answer is `{"name": …, "parameters": {…}}`, perhaps behind `<|python_tag|>`,
and several stand side by side with `;` between them. Behind other text only the tag begins a call."""

from enum import Enum, auto

from router.front.parsers.calls import CallParser, content, name_of
from router.front.parsers.json_text import NAME, Head, letters, member
from router.front.parsers.pieces import Piece

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


class LlamaParser(CallParser):
    # Mutable state: what stood before what is not decided yet, and is to be shown if that is no call.

    def __init__(self) -> None:
        super().__init__(_Place.START)
        self._before = ""

    def flush(self) -> list[Piece]:
        rest = self._before + self._rest()
        if self._place is _Place.ARGUMENTS:
            return self._more(rest)
        if self._place is _Place.TAIL or (self._place is _Place.BETWEEN and rest.strip() in ("", ";")):
            return []
        return content(rest)

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
        before, is_there = self._until(TAG)
        if is_there:
            self._held, self._before = self._held.lstrip(), TAG
            self._place = _Place.HEAD
        return content(before)

    def _head(self) -> list[Piece]:
        if self._before == TAG:
            self._held = self._held.lstrip()
        found = HEAD.match(self._held)
        if found is None and HEAD.may_follow(self._held):
            return []
        name = name_of(found[0]) if found is not None else ""
        if found is None or not name:
            # No call: it is content, with what stood before it. Only a tag can begin one behind it.
            shown, self._before = self._before, ""
            self._place = _Place.TEXT
            return content(shown)
        self._held, self._before = self._held[found[1] :], ""
        self._place = _Place.ARGUMENTS
        return self._call(name)

    def _arguments(self) -> list[Piece]:
        pieces, is_whole = self._given()
        if is_whole:
            self._place = _Place.TAIL
        return pieces

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

    def _pause(self) -> None:
        if self._place is _Place.BETWEEN:
            self._aside.wait(self._held.lstrip().removeprefix(";"))
        else:
            super()._pause()

    PAUSES = frozenset({_Place.START, _Place.TEXT, _Place.TAIL})
    MOVES = {  # noqa: RUF012
        _Place.START: _start,
        _Place.TEXT: _text,
        _Place.HEAD: _head,
        _Place.ARGUMENTS: _arguments,
        _Place.TAIL: _tail,
        _Place.BETWEEN: _between,
    }

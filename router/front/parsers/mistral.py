"""Calls as Mistral models write them behind `[TOOL_CALLS]`: a list `[{"name": …, "arguments": {…}}, …]`, or, in newer
ones, the name followed by its arguments, `name{…}` or `name[ARGS]{…}`, each behind a mark of its own."""

import re
from enum import Enum, auto

from router.front.parsers.calls import CallParser, content, name_of
from router.front.parsers.json_text import MAX_HEAD_CHARS, NAME, Head, member
from router.front.parsers.pieces import Piece

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ITEM = [r"\{", r"\s*", *member("name"), NAME, r"\s*", ",", r"\s*", *member("arguments")]
ITEM = Head(_ITEM)
_PLAIN = re.compile(r"([A-Za-z_][\w.-]*)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_PLAIN_BEGUN = re.compile(r"[A-Za-z_][\w.-]*+(?:\[[A-Z_]*+\]?+\w*+){0,2}+\s*+")
"""Gives nothing back: tried in every way, a page of capital letters would hold up all streams for hours."""
_TAIL = re.compile(r"""\s*(?:,\s*"id"\s*:\s*"\w*"\s*)?\}""")
_TAIL_BEGUN = re.compile(r"""\s*(?:,\s*(?:"(?:i(?:d(?:"\s*(?::\s*(?:"\w*(?:"\s*)?)?)?)?)?)?)?)?""")


class _Place(Enum):
    TEXT = auto()
    FIRST = auto()
    ITEM = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    NEXT = auto()


class MistralParser(CallParser):
    # Mutable state: what to show before what is not decided yet if that is no call, whether the calls stand in a list,
    # and whether a call is all that stands before what comes.

    def __init__(self) -> None:
        super().__init__(_Place.TEXT)
        self._before = ""
        self._in_list = False
        self._is_behind_call = False

    def flush(self) -> list[Piece]:
        rest = self._before + self._rest()
        if self._place is _Place.ARGUMENTS:
            return self._more(rest)
        is_framing = self._place in (_Place.TAIL, _Place.NEXT)
        if is_framing or (self._place is _Place.TEXT and self._is_behind_call and not rest.strip()):
            return []
        return content(rest)

    def _text(self) -> list[Piece]:
        before, is_there = self._until(MARK)
        if is_there:
            self._before = MARK
            self._place = _Place.FIRST
        if before:
            self._is_behind_call = False
        return content(before)

    def _first(self) -> list[Piece]:
        """See in which of the two ways the calls are written."""
        rest = self._held.lstrip()
        found = _PLAIN.match(rest)
        if rest.startswith("["):
            self._before += self._held[: len(self._held) - len(rest) + 1]
            self._held = rest[1:]
            self._in_list = True
            self._place = _Place.ITEM
        elif found is not None and found.end() <= MAX_HEAD_CHARS:
            self._held, self._in_list = rest[found.end() :], False
            return self._begin(found[1])
        elif rest and (len(rest) > MAX_HEAD_CHARS or _PLAIN_BEGUN.fullmatch(rest) is None):
            return self._no_call()
        return []

    def _item(self) -> list[Piece]:
        rest = self._held.lstrip()
        found = ITEM.match(rest)
        name = name_of(found[0]) if found is not None else ""
        if found is not None and name:
            self._held = rest[found[1] :]
            return self._begin(name)
        if found is not None or not ITEM.may_follow(rest):
            return self._no_call()
        return []

    def _begin(self, name: str) -> list[Piece]:
        self._before = ""
        self._place = _Place.ARGUMENTS
        return self._call(name)

    def _no_call(self) -> list[Piece]:
        shown, self._before = self._before, ""
        self._place = _Place.TEXT
        self._is_behind_call = False
        return content(shown)

    def _arguments(self) -> list[Piece]:
        pieces, is_whole = self._given()
        if is_whole:
            self._place = _Place.TAIL if self._in_list else _Place.TEXT
            self._is_behind_call = True
        return pieces

    def _tail(self) -> list[Piece]:
        found = _TAIL.match(self._held[:MAX_HEAD_CHARS])
        if found is not None:
            self._held = self._held[found.end() :]
            self._place = _Place.NEXT
        elif len(self._held) >= MAX_HEAD_CHARS or _TAIL_BEGUN.fullmatch(self._held) is None:
            self._place = _Place.TEXT
        return []

    def _next(self) -> list[Piece]:
        rest = self._held.lstrip()
        if rest.startswith(","):
            self._before, self._held = self._held[: len(self._held) - len(rest) + 1], rest[1:]
            self._place = _Place.ITEM
        elif rest.startswith("]"):
            self._held = rest[1:]
            self._place = _Place.TEXT
        elif rest:
            self._place = _Place.TEXT
        return []

    PAUSES = frozenset({_Place.TEXT, _Place.FIRST, _Place.ITEM, _Place.NEXT})
    MOVES = {  # noqa: RUF012
        _Place.TEXT: _text,
        _Place.FIRST: _first,
        _Place.ITEM: _item,
        _Place.ARGUMENTS: _arguments,
        _Place.TAIL: _tail,
        _Place.NEXT: _next,
    }

"""Calls as Mistral models write them behind `[TOOL_CALLS]`: a list `[{"name": …, "arguments": {…}}, …]`, or, in newer
ones, the name followed by its arguments, `name{…}` or `name[ARGS]{…}`, each behind a mark of its own."""

import json
import re
from enum import Enum, auto

from router.front.parsers.json_text import MAX_HEAD_CHARS, NAME, Head, ObjectScan, member
from router.front.parsers.pieces import Piece, PieceKind, undecided

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


class MistralParser:
    # Mutable state: where it is, what is not decided yet, what to show before it if it is no call, whether the calls
    # stand in a list, how many there were, and the arguments under way.

    is_reasoning = False

    def __init__(self) -> None:
        self._place = _Place.TEXT
        self._held = ""
        self._before = ""
        self._in_list = False
        self._is_behind_call = False
        self._calls = 0
        self._scan = ObjectScan()

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        moves = {
            _Place.TEXT: self._text,
            _Place.FIRST: self._first,
            _Place.ITEM: self._item,
            _Place.ARGUMENTS: self._arguments,
            _Place.TAIL: self._tail,
            _Place.NEXT: self._next,
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
        is_framing = self._place in (_Place.TAIL, _Place.NEXT)
        if is_framing or (self._place is _Place.TEXT and self._is_behind_call and not rest.strip()):
            return []
        return _content(rest)

    def _text(self) -> list[Piece]:
        at = self._held.find(MARK)
        if at >= 0:
            before, self._held = self._held[:at].rstrip(), self._held[at + len(MARK) :]
            self._before = MARK
            self._place = _Place.FIRST
        else:
            cut = len(self._held) - undecided(self._held, MARK)
            before, self._held = self._held[:cut], self._held[cut:]
        if before:
            self._is_behind_call = False
        return _content(before)

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
        name = _name(found[0]) if found is not None else ""
        if found is not None and name:
            self._held = rest[found[1] :]
            return self._begin(name)
        if found is not None or not ITEM.may_follow(rest):
            return self._no_call()
        return []

    def _begin(self, name: str) -> list[Piece]:
        self._before = ""
        self._scan = ObjectScan()
        self._place = _Place.ARGUMENTS
        self._calls += 1
        return [Piece(PieceKind.CALL, name, self._calls - 1)]

    def _no_call(self) -> list[Piece]:
        shown, self._before = self._before, ""
        self._place = _Place.TEXT
        self._is_behind_call = False
        return _content(shown)

    def _arguments(self) -> list[Piece]:
        end = self._scan.end(self._held)
        given = self._held if end is None else self._held[:end]
        self._held = self._held[len(given) :]
        if end is not None:
            self._place = _Place.TAIL if self._in_list else _Place.TEXT
            self._is_behind_call = True
        return [Piece(PieceKind.ARGUMENTS, given, self._calls - 1)] if given else []

    def _tail(self) -> list[Piece]:
        found = _TAIL.match(self._held)
        if found is not None:
            self._held = self._held[found.end() :]
            self._place = _Place.NEXT
        elif _TAIL_BEGUN.fullmatch(self._held) is None:
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


def _name(written: str) -> str:
    try:
        return str(json.loads(written))
    except ValueError:
        return ""


def _content(text: str) -> list[Piece]:
    return [Piece(PieceKind.CONTENT, text)] if text else []

"""What the parsers of calls share, whatever they are written like: each is a machine that moves from place to place in
the answer's text as far as what it has of it is decided.
"""

import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, ClassVar

from router.front.parsers.json_text import ObjectScan
from router.front.parsers.pieces import Aside, Piece, PieceKind, undecided

Moves = Mapping[Enum, Callable[[Any], list[Piece]]]


class CallParser:
    """A parser that finds calls. `MOVES` says what it does at each place; it goes on until it stays where it is. At
    those of `PAUSES` white space decides nothing where there is only such."""

    # Mutable state: where it is, what is not decided yet, what came behind that and decides nothing, how many calls
    # there were, and the arguments under way.

    MOVES: ClassVar[Moves]
    PAUSES: ClassVar[frozenset[Enum]]
    is_reasoning = False

    def __init__(self, place: Enum) -> None:
        self._place = place
        self._held = ""
        self._aside = Aside()
        self._calls = 0
        self._scan = ObjectScan()

    def push(self, text: str) -> list[Piece]:
        if self._aside.takes(text):
            return []
        self._held += self._aside.release() + text
        pieces: list[Piece] = []
        place = None
        while place is not self._place:
            place = self._place
            pieces += self.MOVES[place](self)
        self._pause()
        return pieces

    def _pause(self) -> None:
        """See what would decide nothing if it came next."""
        if self._place in self.PAUSES:
            self._aside.wait(self._held)

    def _rest(self) -> str:
        """Take all that is not decided, at the end of the answer."""
        rest, self._held = self._held + self._aside.release(), ""
        return rest

    def _until(self, mark: str) -> tuple[str, bool]:
        """Take what stands before `mark`, and the mark; where it is not there, what cannot belong to it any more."""
        at = self._held.find(mark)
        if at >= 0:
            before, self._held = self._held[:at].rstrip(), self._held[at + len(mark) :]
            return before, True
        cut = len(self._held) - undecided(self._held, mark)
        before, self._held = self._held[:cut], self._held[cut:]
        return before, False

    def _call(self, name: str) -> list[Piece]:
        """A call begins, and its arguments come next."""
        self._scan = ObjectScan()
        self._calls += 1
        return [Piece(PieceKind.CALL, name, self._calls - 1)]

    def _given(self) -> tuple[list[Piece], bool]:
        """Take what there is of the call's arguments; with it, whether that is all of them."""
        end = self._scan.end(self._held)
        given = self._held if end is None else self._held[:end]
        self._held = self._held[len(given) :]
        return self._more(given), end is not None

    def _more(self, arguments: str) -> list[Piece]:
        return [Piece(PieceKind.ARGUMENTS, arguments, self._calls - 1)] if arguments else []


def name_of(written: str) -> str:
    """Return the function's name, empty where it is no JSON string."""
    try:
        return str(json.loads(written))
    except ValueError:
        return ""


def content(text: str) -> list[Piece]:
    return [Piece(PieceKind.CONTENT, text)] if text else []

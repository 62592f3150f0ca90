"""The states that an exploration has visited, each with the move that first led to it, in some two hundred bytes."""

from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterator

FIRST = -1


class Visited:
    """The states that were visited, told apart exactly: a key's parts are numbered as they come, and its numbers are
    what is kept.

    Mutable state: the numbers of parts and of moves, and of each state its key, the state before it, and the move."""

    def __init__(self) -> None:
        self._parts: defaultdict[int, dict[Hashable, int]] = defaultdict(dict)
        self._at: dict[bytes, int] = {}
        self._before = array("i")
        self._by = array("i")
        self._moves: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._at)

    def add(self, key: tuple[Hashable, ...], before: int, move: str) -> int | None:
        """Return the number of a state that is new; None if it is known."""
        numbers = array("i")
        for place, part in enumerate(key):
            known = self._parts[place]
            numbers.append(known.setdefault(part, len(known)))
        packed = numbers.tobytes()
        if packed in self._at:
            return None
        self._before.append(before)
        self._by.append(self._moves.setdefault(move, len(self._moves)))
        self._at[packed] = number = len(self._at)
        return number

    def path(self, number: int) -> list[str]:
        """Return the moves that led to a state, in order."""
        return list(self._back(number))[::-1]

    def _back(self, number: int) -> Iterator[str]:
        names = list(self._moves)
        while self._before[number] != FIRST:
            yield names[self._by[number]]
            number = self._before[number]

"""Rows of shadow memory as a tensor-parallel rank sees them. A row has two quarters for each head, so a rank has some
bits of every row: a block that lacks the heads of one rank is a block of wrong rows, and is noticed as it is read."""

from collections.abc import Iterator
from typing import Any


def shared(ours: range, theirs: range) -> range:
    """Return the heads that two ranks have in common."""
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))


class HeadRows:
    """The blocks of a memory, whose rows have these bits."""

    def __init__(self, memory: Any, mask: int) -> None:
        self._memory = memory
        self._mask = mask

    def __getitem__(self, block: int) -> "HeadRow":
        return HeadRow(self._memory.rows[block], self._mask)


class HeadRow:
    """The rows of one block. Whoever writes changes these bits and no others."""

    def __init__(self, rows: list[int], mask: int) -> None:
        self._rows = rows
        self._mask = mask

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return (row & self._mask for row in self._rows)

    def __getitem__(self, at: Any) -> Any:
        found = self._rows[at]
        return [row & self._mask for row in found] if isinstance(at, slice) else found & self._mask

    def __setitem__(self, at: Any, told: Any) -> None:
        places, values = (range(len(self._rows))[at], told) if isinstance(at, slice) else ([at], [told])
        for place, value in zip(places, values, strict=True):
            self._rows[place] = self._rows[place] & ~self._mask | value & self._mask

"""Byte strings in order, so that the one with the longest common beginning stands next to where a key belongs.

Kept in pieces of a bounded length: adding or removing moves one piece's references, however many keys there are.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

PIECE_KEYS = 256
"""A piece is split when it holds twice as many."""


class SortedKeys:
    """A set of byte strings. Mutable state: `_pieces`, none empty, and `_lasts`, each piece's greatest key."""

    __slots__ = ("_lasts", "_pieces")

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._pieces: list[list[bytes]] = []
        self._lasts: list[bytes] = []
        for key in keys:
            self.add(key)

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            yield from piece

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def add(self, key: bytes) -> None:
        """`key` is not there yet."""
        if not self._pieces:
            self._pieces.append([key])
            self._lasts.append(key)
            return
        at = min(bisect_left(self._lasts, key), len(self._lasts) - 1)
        piece = self._pieces[at]
        insort(piece, key)
        if len(piece) >= 2 * PIECE_KEYS:
            self._pieces[at : at + 1] = piece[:PIECE_KEYS], piece[PIECE_KEYS:]
            self._lasts.insert(at, piece[PIECE_KEYS - 1])
            at += 1
        self._lasts[at] = self._pieces[at][-1]

    def remove(self, key: bytes) -> None:
        """`key` is there."""
        at = bisect_left(self._lasts, key)
        piece = self._pieces[at]
        del piece[bisect_left(piece, key)]
        if piece:
            self._lasts[at] = piece[-1]
        else:
            del self._pieces[at], self._lasts[at]

    def around(self, key: bytes) -> list[bytes]:
        """The greatest key below `key` and the least from it on, as far as there are any. Of all keys these two share
        the most of their beginning with `key`."""
        at = bisect_left(self._lasts, key)
        if at == len(self._lasts):
            return self._lasts[-1:]
        place = bisect_left(self._pieces[at], key)
        if place:
            return self._pieces[at][place - 1 : place + 1]
        return [*self._lasts[at - 1 : at], self._pieces[at][0]]

"""A list that tells how much of it was read."""

from collections.abc import Iterator
from typing import Any


class WatchedList(list[int]):
    """`read`: tokens that were copied, compared or gone over since it was last set to 0."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        self.read += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        self.read += len(self)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        self.read += len(self)
        return super().__ne__(other)

    __hash__ = None  # type: ignore[assignment]

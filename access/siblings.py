"""What the other routers of a cluster say of tenants in numbered words: sums, and what goes on there. Pure.

Sums are told as they stand since a router's life, or an epoch of it, began: a word that is lost, or comes twice or
late, changes nothing. Of a life that had told before it was first heard here, the first sum of each tenant is where one
counts from. Whoever has the cluster's secret can say anything: lives, tenants and sums are bounded.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from access.tenants import MAX_NAME_CHARS

MOST_NAMED = 512
"""Tenants that one word names, at most, and a router says one at each tick. Whoever has no room comes with the next."""
MAX_LIVES = 64
"""Lives of routers remembered; beyond it the one that was heard longest ago is forgotten."""
MAX_NAMES = 4096
"""Tenants remembered of each, at most."""
MOST_TOKENS = 1e15
"""Who says more, or what is no number, is not believed: a million tokens a second, for thirty years."""

T = TypeVar("T")


@dataclass(slots=True)
class SiblingLife(Generic[T]):
    """One life of a router: its latest word, and by tenant the latest sums and what goes on there."""

    number: int
    epoch: int
    is_known_from_its_beginning: bool
    heard_s: float
    is_over: bool = False
    """A later life of its router has been heard: what it said last may still come, and counts, but nothing goes on."""
    sums: dict[str, float] = field(default_factory=dict)
    going_on: dict[str, T] = field(default_factory=dict)

    def counts(self, name: str) -> bool:
        """Return True if a tenant's next sum tells what it has grown by."""
        return self.is_known_from_its_beginning or name in self.sums

    def grown(self, name: str, total: float, goes_on: T | None) -> float | None:
        """Take in a tenant's sum and what goes on there, None for nothing. Return what the sum has grown by since it
        was last heard, 0.0 where that is not known; None, and nothing is taken in, where there is no room for the name,
        or the sum is not to be believed."""
        is_known = name in self.sums or name in self.going_on
        is_full = not is_known and max(len(self.sums), len(self.going_on)) >= MAX_NAMES
        if is_full or len(name) > MAX_NAME_CHARS or not 0.0 <= total <= MOST_TOKENS:
            return None
        before = self.sums.get(name, 0.0) if self.counts(name) else total
        self.sums[name] = total
        self.going_on.pop(name, None)
        if goes_on is not None and not self.is_over:
            self.going_on[name] = goes_on
        return total - before


class SiblingLives(dict[tuple[str, int], SiblingLife[T]]):
    """The lives of other routers, by router and incarnation, the last heard at the end."""

    def heard(
        self, key: tuple[str, int], number: int, epoch: int, names: Collection[str], now: float
    ) -> SiblingLife[T] | None:
        """Return whose word it is, to take in what it says of these tenants; None for what was heard before, or comes
        late. With a router's new life nothing goes on any more in those before it."""
        life = self.pop(key, None)
        if life is None:
            for earlier in self:
                if earlier[0] == key[0]:
                    self[earlier].is_over = True
                    self[earlier].going_on.clear()
            life = SiblingLife(number - 1, epoch, number == 1, now)
        self[key] = life
        if len(self) > MAX_LIVES:
            del self[next(iter(self))]
        if number <= life.number:
            return None
        life.number, life.heard_s = number, now
        if life.epoch != epoch:
            life.epoch, life.sums, life.is_known_from_its_beginning = epoch, {}, True
        if len(life.sums) + sum(name not in life.sums for name in names) > MAX_NAMES:
            life.sums = {name: total for name, total in life.sums.items() if name in life.going_on}
            life.is_known_from_its_beginning = False
        return life

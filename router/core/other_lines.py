"""Which tenants wait at the other routers of a cluster, and what they were charged there, as these tell it many times a
second. Pure: time is an argument.

A router names a tenant as long as requests of it stand in a line there, and says whether its turn has come by what is
known there. For one that is held back for others (`router/core/fair_share.py`) it has not, so that no two routers wait
for each other. What was said last counts for HEARD_S: a router that is killed, or frozen, holds up nobody for longer.
For GONE_S it is remembered that a tenant waited there, so that one that is named again has waited all along.

Charges are told as sums since that router's accounts began anew, its epoch: a word that is lost, or comes twice or
late, changes nothing. Of a life that had told before it was first heard here, the first sum of each tenant is where one
counts from.
"""

from dataclasses import dataclass, field

from engine.messages import TenantsTold
from engine.types import Incarnation

HEARD_S = 1.5
"""A tenant is named twenty times a second while it waits, but a worker passes words on between steps."""
GONE_S = 3.0
MAX_LIVES = 64
"""Lives of routers remembered; beyond it the one that was heard longest ago is forgotten."""
MAX_NAMES = 4096
"""Tenants remembered of each, at most."""
MAX_NAME_CHARS = 128
MOST_CHARGED = 1e12
"""Tokens / weight. Who says more, or less than nothing, or what is no number, is not believed."""


@dataclass(slots=True)
class _Life:
    number: int
    epoch: int
    is_known_from_its_beginning: bool
    sums: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """When it was last said of a tenant that it waits there, and whether its turn had come."""


class OtherLines:
    """The line's fair share owns it. `waiting`: who waits elsewhere; `due`: those of them whose turn has come there."""

    # Mutable state: the latest words of every life of another router, the last heard at the end, and those two sets,
    # which are replaced and never changed.

    def __init__(self) -> None:
        self._lives: dict[tuple[str, Incarnation], _Life] = {}
        self.waiting: frozenset[str] = frozenset()
        self.due: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(router for router, _ in self._lives))
        return f"OtherLines({len(self.waiting)} tenants wait at {names or 'none'})"

    def knows(self, told: TenantsTold) -> bool:
        """Return True if this life of its router has been heard before."""
        return (told.router, told.incarnation) in self._lives

    def heard(self, told: TenantsTold, now: float) -> dict[str, float] | None:
        """Take in who waits at a router, and return what each tenant that it names was charged there since it was last
        heard, in tokens / weight; None for what was heard before, or comes late."""
        key = told.router, told.incarnation
        known = self._lives.pop(key, None)
        if known is None:
            for (router, _), life in self._lives.items():
                if router == told.router:
                    life.waiting.clear()
            known = _Life(told.number - 1, told.epoch, told.number == 1)
        self._lives[key] = known
        if len(self._lives) > MAX_LIVES:
            del self._lives[next(iter(self._lives))]
        if told.number <= known.number:
            return None
        known.number = told.number
        if known.epoch != told.epoch:
            known.epoch, known.sums, known.is_known_from_its_beginning = told.epoch, {}, True
        if len(known.sums) + len(told.lines) > MAX_NAMES:
            known.sums = {name: known.sums[name] for name in known.waiting}
            known.is_known_from_its_beginning = False
        charges: dict[str, float] = {}
        for name, (charged, waits, is_due) in told.lines.items():
            is_full = len(known.sums) >= MAX_NAMES and name not in known.sums
            if is_full or len(name) > MAX_NAME_CHARS or not 0.0 <= charged <= MOST_CHARGED:
                continue
            charges[name] = charged - known.sums.get(name, 0.0 if known.is_known_from_its_beginning else charged)
            known.sums[name] = charged
            if waits:
                known.waiting[name] = now, is_due
            else:
                known.waiting.pop(name, None)
        self._look(now)
        return charges

    def tick(self, now: float) -> None:
        """Forget what has not been said again."""
        if self.waiting:
            for life in self._lives.values():
                life.waiting = {name: said for name, said in life.waiting.items() if now - said[0] < GONE_S}
            self._look(now)

    def _look(self, now: float) -> None:
        said = [item for life in self._lives.values() for item in life.waiting.items()]
        self.waiting = frozenset(name for name, _ in said)
        self.due = frozenset(name for name, (at_s, is_due) in said if is_due and now - at_s < HEARD_S)

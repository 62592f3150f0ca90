"""Which tenants wait at the other routers of a cluster, and what they were charged there, as these tell it many times a
second. Pure: time is an argument.

A router names a tenant as long as requests of it stand in a line there, and says whether its turn has come by what is
known there. For one that is held back for others (`router/core/fair_share.py`) it has not, so that no two routers wait
for each other. What was said last counts for HEARD_S: a router that is killed, or frozen, holds up nobody for longer.
For GONE_S it is remembered that a tenant waited there, so that one that is named again has waited all along.

Charges are told as sums since that router's accounts began anew, its epoch (`access/siblings.py`).
"""

from collections.abc import Iterable
from math import inf

from access.siblings import SiblingLives
from engine.messages import TenantsTold

HEARD_S = 1.5
"""A tenant is named twenty times a second while it waits, but a worker passes words on between steps."""
GONE_S = 3.0


class OtherLines:
    """The line's fair share owns it. `waiting`: who waits elsewhere; `due`: those of them whose turn has come there."""

    # Mutable state: the latest words of every life of another router, with when it was last said of a tenant that it
    # waits there, and whether its turn had come; those two sets; and before when no word in them is too old.

    def __init__(self) -> None:
        self._lives: SiblingLives[tuple[float, bool]] = SiblingLives()
        self.waiting: set[str] = set()
        self.due: set[str] = set()
        self._expires_s = inf

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(router for router, _ in self._lives))
        return f"OtherLines({len(self.waiting)} tenants wait at {names or 'none'})"

    def knows(self, told: TenantsTold) -> bool:
        """Return True if this life of its router has been heard before."""
        return (told.router, told.incarnation) in self._lives

    def heard(self, told: TenantsTold, now: float) -> dict[str, float] | None:
        """Take in who waits at a router, and return what each tenant that it names was charged there since it was last
        heard, in tokens / weight; None for what was heard before, or comes late."""
        is_new = not self.knows(told)
        life = self._lives.heard((told.router, told.incarnation), told.number, told.epoch, told.lines, now)
        if life is None:
            return None
        charges: dict[str, float] = {}
        changed: list[str] = []
        for name, (charged, waits, is_due) in told.lines.items():
            grown = life.grown(name, charged, (now, is_due) if waits else None)
            if grown is not None:
                charges[name] = grown
                if waits or name in self.waiting:
                    changed.append(name)
        self._expires_s = min(self._expires_s, now + HEARD_S)
        if is_new:
            self._look(now)  # with it, what was said of others may be over
        else:
            self._look_at(changed, now)
        return charges

    def tick(self, now: float) -> None:
        """Forget what has not been said again."""
        if now >= self._expires_s:
            for life in self._lives.values():
                life.going_on = {name: said for name, said in life.going_on.items() if now - said[0] < GONE_S}
            self._look(now)

    def _look(self, now: float) -> None:
        """Look at all that was said."""
        said = [item for life in self._lives.values() for item in life.going_on.items()]
        self.waiting = {name for name, _ in said}
        self.due = {name for name, (at_s, is_due) in said if is_due and now - at_s < HEARD_S}
        ends = (at_s + (HEARD_S if is_due and now - at_s < HEARD_S else GONE_S) for _, (at_s, is_due) in said)
        self._expires_s = min(ends, default=inf)

    def _look_at(self, names: Iterable[str], now: float) -> None:
        """Look at what was said of these tenants alone: a word of a few costs no look at thousands."""
        lives = list(self._lives.values())
        for name in names:
            said = [life.going_on[name] for life in lives if name in life.going_on]
            (self.waiting.add if said else self.waiting.discard)(name)
            is_due = any(is_due and now - at_s < HEARD_S for at_s, is_due in said)
            (self.due.add if is_due else self.due.discard)(name)

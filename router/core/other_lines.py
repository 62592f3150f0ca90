"""Which tenants wait at the other routers of a cluster, and what they were charged there, as these tell it many times a
second. Pure: time is an argument.

A router names a tenant as long as requests of it stand in a line there, and says whether its turn has come by what is
known there. For one that is held back for others (`router/core/fair_share.py`) it has not, so that no two routers wait
for each other. What was said last counts for HEARD_S: a router that is killed, or frozen, holds up nobody for longer.
For GONE_S it is remembered that a tenant waited there, so that one that is named again has waited all along.

Charges are told as sums since that router's accounts began anew, its epoch (`access/siblings.py`).
"""

from access.siblings import SiblingLives
from engine.messages import TenantsTold

HEARD_S = 1.5
"""A tenant is named twenty times a second while it waits, but a worker passes words on between steps."""
GONE_S = 3.0


class OtherLines:
    """The line's fair share owns it. `waiting`: who waits elsewhere; `due`: those of them whose turn has come there."""

    # Mutable state: the latest words of every life of another router, with when it was last said of a tenant that it
    # waits there, and whether its turn had come; and those two sets, which are replaced and never changed.

    def __init__(self) -> None:
        self._lives: SiblingLives[tuple[float, bool]] = SiblingLives()
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
        life = self._lives.heard((told.router, told.incarnation), told.number, told.epoch, told.lines, now)
        if life is None:
            return None
        charges: dict[str, float] = {}
        for name, (charged, waits, is_due) in told.lines.items():
            grown = life.grown(name, charged, (now, is_due) if waits else None)
            if grown is not None:
                charges[name] = grown
        self._look(now)
        return charges

    def tick(self, now: float) -> None:
        """Forget what has not been said again."""
        if self.waiting:
            for life in self._lives.values():
                life.going_on = {name: said for name, said in life.going_on.items() if now - said[0] < GONE_S}
            self._look(now)

    def _look(self, now: float) -> None:
        said = [item for life in self._lives.values() for item in life.going_on.items()]
        self.waiting = frozenset(name for name, _ in said)
        self.due = frozenset(name for name, (at_s, is_due) in said if is_due and now - at_s < HEARD_S)

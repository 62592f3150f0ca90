"""Which tenants wait at the other routers of a cluster, as these tell it many times a second. Pure: time is an
argument.

A router names a tenant as long as requests of it stand in a line there, and says whether its turn has come by what is
known there. For one that is held back for others (`router/core/fair_share.py`) it has not, so that no two routers wait
for each other. What was said last counts for HEARD_S: a router that is killed, or frozen, holds up nobody for longer.
"""

from dataclasses import dataclass, field

from engine.messages import TenantsTold

HEARD_S = 0.25
"""A tenant is named twenty times a second while it waits."""


@dataclass(slots=True)
class _Sibling:
    life: int
    number: int
    waiting: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """Until when each tenant counts as waiting there, and whether its turn has come."""


class OtherLines:
    """The line's fair share owns it."""

    # Mutable state: the latest word of every other router, by name.

    def __init__(self) -> None:
        self._siblings: dict[str, _Sibling] = {}

    def __repr__(self) -> str:
        return f"OtherLines({len(self.waiting)} tenants wait at {', '.join(self._siblings) or 'none'})"

    @property
    def waiting(self) -> set[str]:
        return {tenant for sibling in self._siblings.values() for tenant in sibling.waiting}

    @property
    def due(self) -> set[str]:
        """Those that wait where their turn has come."""
        each = self._siblings.values()
        return {tenant for sibling in each for tenant, (_, is_due) in sibling.waiting.items() if is_due}

    def heard(self, told: TenantsTold, now: float) -> bool:
        """Take in who waits at a router; False for a report that was heard before, by another way."""
        known = self._siblings.get(told.router)
        if known is None or known.life != told.incarnation:
            known = self._siblings[told.router] = _Sibling(told.incarnation, told.number)
        elif told.number <= known.number:
            return False
        known.number = told.number
        for tenant, (_, waits, is_due) in told.lines.items():
            if waits:
                known.waiting[tenant] = now + HEARD_S, is_due
            else:
                known.waiting.pop(tenant, None)
        return True

    def tick(self, now: float) -> None:
        """Forget what has not been said again."""
        for sibling in self._siblings.values():
            if sibling.waiting:
                sibling.waiting = {tenant: said for tenant, said in sibling.waiting.items() if now < said[0]}

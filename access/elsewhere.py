"""What tenants use at the other routers of a cluster, as these tell it many times a second. Pure: time is an argument.

Each tells, by tenant, the tokens used since it began, less those given back: a report that is lost, or comes twice,
changes nothing. Most reports name some tenants only. Of one that had told before it was first heard here, the first
word on each tenant is believed about what is left of its burst alone: the tokens are those of a whole life. One that is
silent is gone, with all that ran there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Use = tuple[int, int, float]
"""Tokens used since the router began, running samples, and what is left of the tenant's burst."""
NOTHING: Use = (0, 0, 0.0)
GONE_S = 3.0
"""A router that has told nothing for so long runs nothing; each tells all once a second."""

Spent = Callable[[str, int, float, float], None]
"""Takes a tenant, tokens that it has used elsewhere or, below 0, was given back there, the most that it has left, and
the time."""


@dataclass(slots=True)
class _Sibling:
    life: int
    number: int
    heard_s: float
    is_known_from_its_beginning: bool
    uses: dict[str, Use] = field(default_factory=dict)


class UsageElsewhere:
    """Mutable state: the latest word of every other router, by name."""

    def __init__(self, spent: Spent) -> None:
        self._spent = spent
        self._siblings: dict[str, _Sibling] = {}

    def __repr__(self) -> str:
        return f"UsageElsewhere({', '.join(self._siblings) or 'nobody'})"

    def heard(self, router: str, life: int, number: int, uses: Mapping[str, Use], now: float) -> None:
        """Take in a report of a life of a router, by the number that it has there."""
        known = self._siblings.get(router)
        if known is None or known.life != life:
            known = self._siblings[router] = _Sibling(life, number, now, number == 1)
        elif number <= known.number:
            return
        known.number, known.heard_s = number, now
        for name, use in uses.items():
            tokens, _, left = use
            if name not in known.uses and not known.is_known_from_its_beginning:
                self._spent(name, 0, left, now)
            elif tokens != (before := known.uses.get(name, NOTHING)[0]):
                self._spent(name, tokens - before, float("inf"), now)
            known.uses[name] = use

    def running(self, name: str) -> int:
        """Return how many samples of a tenant run at the other routers."""
        return sum(sibling.uses.get(name, NOTHING)[1] for sibling in self._siblings.values())

    def tick(self, now: float) -> None:
        """Forget who is gone."""
        for name in [name for name, sibling in self._siblings.items() if now - sibling.heard_s >= GONE_S]:
            del self._siblings[name]

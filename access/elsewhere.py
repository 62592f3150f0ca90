"""What tenants use at the other routers of a cluster, as these tell it many times a second. Pure: time is an argument.

Each tells, by tenant, the tokens used since it began, less those given back (`access/siblings.py`). Most reports name
some tenants only. Of a router that had told before it was first heard here, the first word on each tenant is believed
about what is left of its burst alone: the tokens are those of a whole life. One that is silent is gone, with all that
ran there.
"""

from collections.abc import Callable, Mapping

from access.siblings import MOST_TOKENS, SiblingLives

Use = tuple[int, int, float]
"""Tokens used since the router began, running samples, and what is left of the tenant's burst."""
GONE_S = 3.0
"""A router that has told nothing for so long runs nothing; each tells all once a second."""

Spent = Callable[[str, float, float, float], None]
"""Takes a tenant, tokens that it has used elsewhere or, below 0, was given back there, the most that it has left, and
the time."""


class UsageElsewhere:
    """Mutable state: the latest words of every other router, and how many samples run there."""

    def __init__(self, spent: Spent) -> None:
        self._spent = spent
        self._lives: SiblingLives[int] = SiblingLives()

    def __repr__(self) -> str:
        return f"UsageElsewhere({', '.join(dict.fromkeys(router for router, _ in self._lives)) or 'nobody'})"

    def heard(self, router: str, life: int, number: int, uses: Mapping[str, Use], now: float) -> None:
        """Take in a report of a life of a router, by the number that it has there."""
        known = self._lives.heard((router, life), number, 0, uses, now)
        if known is None:
            return
        for name, (tokens, running, left) in uses.items():
            is_counted = known.counts(name)
            if not (0 <= running <= MOST_TOKENS and left >= -MOST_TOKENS):
                continue
            grown = known.grown(name, tokens, running or None)
            if grown or (grown is not None and not is_counted):
                self._spent(name, grown, float("inf") if is_counted else left, now)

    def running(self, name: str) -> int:
        """Return how many samples of a tenant run at the other routers."""
        return sum(life.going_on.get(name, 0) for life in self._lives.values())

    def tick(self, now: float) -> None:
        """Forget who is gone."""
        for key in [key for key, life in self._lives.items() if now - life.heard_s >= GONE_S]:
            del self._lives[key]

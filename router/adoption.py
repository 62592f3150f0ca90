"""Requests of a router that is gone, as decode workers report them to the one that comes after it. Pure.

Two workers may report the same request: an older placement whose cancel was lost with the router, and the one that its
client has read. Until the router has settled the higher placement wins, and nothing is handed out; afterwards what was
adopted goes on, since a client may have read it.
"""

import sys
from collections import OrderedDict
from collections.abc import Collection

from engine.messages import Orphan
from engine.types import RequestId

NEVER = sys.maxsize
"""A placement that no report is above."""
MAX_KNOWN = 16_384
"""Adopted requests whose placement is known, the newest ones."""


class Adoptions:
    # Mutable state: since when it waits, who has told all, whether all have, and the placement adopted by request.

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._began_s: float | None = None
        self._named: frozenset[str] | None = None
        self._told: set[str] = set()
        self._is_settled = False
        self._placements: OrderedDict[RequestId, int] = OrderedDict()

    def __repr__(self) -> str:
        state = "settled" if self._is_settled else "waiting"
        return f"Adoptions({state}, {len(self._placements)} adopted)"

    def named(self, decode: Collection[str]) -> None:
        """These are all decode workers."""
        self._named = frozenset(decode)

    def told(self, worker: str) -> None:
        """It has reported everything that it kept."""
        self._told.add(worker)

    def is_settled(self, now: float) -> bool:
        """Whether every decode worker has told all, or the time for it is over. Counts from the first question."""
        if self._began_s is None:
            self._began_s = now
        if not self._is_settled:
            all_told = self._named is not None and self._named <= self._told
            self._is_settled = all_told or now - self._began_s >= self._settle_s
        return self._is_settled

    def knows(self, request: RequestId) -> bool:
        """Whether it was adopted, and not long ago."""
        return request in self._placements

    def close(self, request: RequestId) -> None:
        """Nobody wants it any more: no report of it is taken."""
        if request in self._placements:
            self._placements[request] = NEVER

    def takes(self, orphan: Orphan, now: float) -> bool:
        """Whether this report is the one to go on with; if so it is, from now on."""
        name = orphan.record.request
        best = self._placements.get(name)
        if best is not None and (orphan.placement <= best or self.is_settled(now)):
            return False
        self._placements[name] = orphan.placement
        if len(self._placements) > MAX_KNOWN:
            self._placements.popitem(last=False)
        return True

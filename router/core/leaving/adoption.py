"""Takes over the requests of a router that is gone, as decode workers report them. Pure.

Two workers may report the same request: an older placement whose cancel was lost with the router, and the one that its
client has read. Until the router has settled the higher placement wins, and nothing is handed out; afterwards what was
adopted goes on, since a client may have read it.
"""

import sys
from collections import OrderedDict
from collections.abc import Collection

from engine.messages import Cancel, Orphan
from engine.types import FinishReason, RequestId
from router.core.call import State
from router.core.call_table import CallTable
from router.core.cluster_view import ClusterView
from router.core.events import Adopt, Command, Deliver, Ignored, TellWorker

NEVER = sys.maxsize
"""A placement that no report is above."""
MAX_KNOWN = 16_384
"""Adopted requests whose placement is known, the newest ones."""


class Adoptions:
    """Goes on with what decode workers kept, or lets them drop it. No placement of a router before is above `life`."""

    # Mutable state: since when it waits, who has told all, whether all have, and the placement adopted by request.

    def __init__(self, settle_s: float, table: CallTable, view: ClusterView, life: int) -> None:
        self._settle_s = settle_s
        self._table = table
        self._view = view
        self._life = life
        self._waits_since_s: float | None = None
        self._named: frozenset[str] | None = None
        self._told: set[str] = set()
        self._is_settled = False
        self._placements: OrderedDict[RequestId, int] = OrderedDict()

    def __repr__(self) -> str:
        state = "settled" if self._is_settled else "waiting"
        return f"Adoptions({state}, {len(self._placements)} adopted)"

    def named(self, decode: Collection[str]) -> None:
        """Note the names of all decode workers."""
        self._named = frozenset(decode)

    def told(self, worker: str) -> None:
        """Note that `worker` has reported everything that it kept."""
        self._told.add(worker)

    def is_settled(self, now: float) -> bool:
        """Return True once every decode worker has told all, or the time for it is over. Counts from the first
        question."""
        if self._waits_since_s is None:
            self._waits_since_s = now
        if not self._is_settled:
            all_told = self._named is not None and self._named <= self._told
            self._is_settled = all_told or now - self._waits_since_s >= self._settle_s
        return self._is_settled

    def knows(self, request: RequestId) -> bool:
        """Return True if it was adopted, and not long ago."""
        return request in self._placements

    def is_unsure(self, request: RequestId, now: float) -> bool:
        """Return True while a worker may still report a higher placement: until then it stays with the worker that has
        it."""
        return self.knows(request) and not self.is_settled(now)

    def close(self, request: RequestId) -> None:
        """Take no report of a request any more: its client has been answered."""
        if request in self._placements:
            self._placements[request] = NEVER

    def adopt(self, worker: str, orphan: Orphan, now: float, out: list[Command]) -> None:
        """Decide about a request that a decode worker holds for a router that is gone."""
        request, home = orphan.record.request, self._view.registry.get(worker)
        known = self._table.calls.get(request)
        if known is not None:
            known.highest = max(known.highest, orphan.placement)
        # 1. The worker was condemned, and its stream is not severed yet: what it holds ends with it.
        if home is None:
            out.append(Ignored("stale", len(orphan.tokens)))
            return
        # 2. This router has placed the request itself, or goes on with another placement: the worker drops its own.
        is_mine = known is not None and not self.knows(request)
        if is_mine or not self.takes(orphan, now):
            out.append(TellWorker(worker, Cancel(request, orphan.placement, FinishReason.CANCELLED)))
            return
        # 3. It goes on here, instead of where a lower placement was adopted.
        highest = self._life
        if known is not None:
            highest = max(highest, known.highest, known.placement)
            if known.state is not State.WAITING:
                out.append(TellWorker(known.decode, Cancel(request, known.placement, FinishReason.CANCELLED)))
            self._table.forget(known, out)
        deadline_s = None if orphan.remaining_s is None else now + orphan.remaining_s
        call = self._table.open(orphan.record, deadline_s, State.RUNNING)
        call.losses, call.placement, call.highest = orphan.losses, orphan.placement, highest
        if len(orphan.record.tokens) > orphan.record.prompt_tokens:
            call.cached_tokens_bound = 0
        self._view.adopted(call, home, orphan.prefill)
        out.append(Adopt(orphan))
        call.emitted.extend(orphan.tokens)
        # One by one, as they came: a front that makes an event of each makes the same events again.
        out.extend(Deliver(request, [token]) for token in orphan.tokens)

    def takes(self, orphan: Orphan, now: float) -> bool:
        """Accept this report if it has the highest placement; return True if accepted."""
        request = orphan.record.request
        best = self._placements.get(request)
        if best is not None and (orphan.placement <= best or self.is_settled(now)):
            return False
        self._placements[request] = orphan.placement
        if len(self._placements) > MAX_KNOWN:
            self._placements.popitem(last=False)
        return True

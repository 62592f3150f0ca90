"""Takes over the requests of a router that is gone, as decode workers report them. Pure.

A router also claims requests that another one has, where their client has come to it, and adopts what decode workers
then give it.

Two workers may report the same request: an older placement whose cancel was lost with the router, and the one that its
client has read. Until the router has settled, or every worker has answered the claim, the higher placement wins, and
nothing is handed out; afterwards what was adopted goes on, since a client may have read it.
"""

import sys
from collections import OrderedDict
from collections.abc import Collection

from engine.messages import Cancel, Claim, Orphan
from engine.types import FinishReason, RequestId
from router.core.call import State
from router.core.call_table import CallTable
from router.core.cluster_view import ClusterView
from router.core.events import Adopt, Command, Ignored, TellWorker

NEVER = sys.maxsize
"""A placement that no report is above."""
MAX_KNOWN = 16_384
"""Adopted requests whose placement is known, the newest ones."""


class Adoptions:
    """Goes on with what decode workers kept, or lets them drop it. No placement of a router before is above `life`."""

    # Mutable state: since when it waits, who has told all, whether all have, the placement adopted by request, and by
    # key who is still to answer a claim.

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
        self._claims: dict[bytes, set[str]] = {}

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

    def claim(self, key: bytes, namespace: bytes | None, out: list[Command]) -> None:
        """Ask all decode workers for the requests of a key."""
        asked = [worker.name for worker in self._view.registry.role("decode")]
        self._claims[key] = set(asked)
        out += [TellWorker(name, Claim(key, namespace)) for name in asked]
        self._answered(key)

    def is_claiming(self, key: bytes) -> bool:
        """Return True while a worker has not answered the claim."""
        return key in self._claims

    def claim_told(self, worker: str, key: bytes) -> None:
        """Note that `worker` has given all that it had of a key."""
        if key in self._claims:
            self._claims[key].discard(worker)
            self._answered(key)

    def lost(self, worker: str) -> None:
        """Wait for no answer of a worker that is lost."""
        for key in list(self._claims):
            self.claim_told(worker, key)

    def _answered(self, key: bytes) -> None:
        if not self._claims[key]:
            del self._claims[key]

    def taken(self, request: RequestId) -> None:
        """Forget a request that another router has now: it may come back here."""
        self._placements.pop(request, None)

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
        # Above whatever a router before has placed, one that has begun after this one included.
        since_s = now if self._waits_since_s is None else self._waits_since_s
        highest = self._life + round((now - since_s) * 1e3)
        if known is not None:
            highest = max(highest, known.highest, known.placement)
            if known.state is not State.WAITING:
                out.append(TellWorker(known.decode, Cancel(request, known.placement, FinishReason.CANCELLED)))
            self._table.forget(known, out)
        deadline_s = None if orphan.remaining_s is None else now + orphan.remaining_s
        call = self._table.open(orphan.record, deadline_s, State.RUNNING)
        call.losses, call.placement, call.highest = orphan.losses, orphan.placement, highest
        call.is_prefilled = bool(orphan.tokens)
        if len(orphan.record.tokens) > orphan.record.prompt_tokens:
            call.cached_tokens_bound = 0
        self._view.adopted(call, home, orphan.prefill)
        call.emit(orphan.tokens, orphan.logprobs)
        out.append(Adopt(orphan))

    def takes(self, orphan: Orphan, now: float) -> bool:
        """Accept this report if it has the highest placement; return True if accepted."""
        request = orphan.record.request
        best = self._placements.get(request)
        is_final = self.is_settled(now) and not self.is_claiming(orphan.record.resume_key)
        if best is not None and (orphan.placement <= best or is_final):
            return False
        self._placements[request] = orphan.placement
        if len(self._placements) > MAX_KNOWN:
            self._placements.popitem(last=False)
        return True

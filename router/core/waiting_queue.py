"""The requests that wait for a worker, and their offers to workers, from the head of the queue.

A tenant's requests are served first come, first served, and tenants share by weight (`router/core/fair_share.py`): a
refused request keeps its place, and small ones do not overtake it. A worker that refused is not asked again before its
next report, so re-offers come at the rate of reports and never spin. A sample of a prompt is offered first to a worker
that has another one. `router/core/placement.py`, where the way goes on, finds the workers. Pure: time is an argument.
"""

import heapq

import msgspec

from engine.messages import Place
from engine.types import FinishReason, RequestId
from router.core.call import Call, State
from router.core.call_table import CallTable
from router.core.cluster_view import ClusterView
from router.core.events import Command, Fail, TellWorker
from router.core.fair_share import FairShare
from router.core.leaving.adoption import Adoptions
from router.core.placement import Placer
from router.core.policy import Choice


class WaitingQueue:
    """The router core owns it. A request of an earlier router whose place is not known yet is put aside meanwhile."""

    # Mutable state: (tag, turn, request) of those in the queue and of those put aside; stale entries are skipped. And
    # the tenants' shares.

    def __init__(self, table: CallTable, view: ClusterView, placer: Placer, adoptions: Adoptions) -> None:
        self._table = table
        self._view = view
        self._placer = placer
        self._adoptions = adoptions
        self._queue: list[tuple[float, int, RequestId]] = []
        self._aside: list[tuple[float, int, RequestId]] = []
        self._share = FairShare()

    def enter(self, call: Call, weight: float) -> None:
        """A new request waits from now on, behind all of its tenant that came before it."""
        if not self._queue and not self._aside:
            self._share.clear()
        record = call.record
        call.tag = self._share.tag(record.namespace, len(record.tokens) + record.max_tokens, weight)
        self._join(call)

    def rejoin(self, call: Call) -> None:
        """Put a call back into the queue at its old place."""
        self._table.move(call, State.WAITING)
        self._view.release(call)
        call.prefill = call.decode = ""
        call.prefill_life = call.decode_life = None
        call.yielding = False
        self._join(call)

    def advance(self, now: float, out: list[Command]) -> None:
        """Offer requests from the head of the queue while some worker may have room."""
        if self._aside and self._adoptions.is_settled(now):
            for entry in self._aside:
                heapq.heappush(self._queue, entry)
            self._aside.clear()
        while (call := self._head()) is not None:
            request = call.record.request
            if self._adoptions.is_unsure(request, now):
                self._aside.append(heapq.heappop(self._queue))
                continue
            if not self._offer(call, now, out):
                # It may have come while no worker was known; now that some are, it may be too large for each.
                fault = self._placer.impossible(call.record)
                if fault is None:
                    return
                self._table.forget(call, out, Fail(request, fault, FinishReason.REJECTED))
            heapq.heappop(self._queue)
            self._share.serve(call.tag)

    def check(self) -> None:
        """Raise AssertionError if a request waits outside of the queue."""
        queued = {request for *_, request in self._queue + self._aside}
        for request, call in self._table.calls.items():
            if call.state is State.WAITING:
                assert request in queued, f"{request} waits outside of the queue"
                assert not call.decode

    def _join(self, call: Call) -> None:
        heapq.heappush(self._queue, (call.tag, call.turn, call.record.request))

    def _head(self) -> Call | None:
        """Return the call at the head of the queue."""
        while self._queue:
            _, turn, request = self._queue[0]
            call = self._table.calls.get(request)
            if call is not None and call.turn == turn:
                return call
            heapq.heappop(self._queue)
        return None

    def _offer(self, call: Call, now: float, out: list[Command]) -> bool:
        """Offer `call` to a worker; False if none may have room for it."""
        host, choice = self._beside(call, now)
        choice = choice or self._placer.choose(call, now)
        if choice is None:
            return False
        self._table.move(call, State.OFFERED)
        call.placement = max(call.placement, call.highest) + 1
        prefill = self._view.offered(call, choice)
        record = call.record
        if call.deadline_s is not None:
            record = msgspec.structs.replace(record, remaining_s=max(call.deadline_s - now, 0.0))
        place = Place(record=record, placement=call.placement, prefill=prefill, losses=call.losses, fork_of=host)
        # It was bound to where its KV is, or the policy says why.
        bound = host is not None or call.source is not None
        out.append(TellWorker(call.decode, place, "pinned" if bound else choice.reason))
        return True

    def _beside(self, call: Call, now: float) -> tuple[RequestId | None, Choice | None]:
        """Another sample of its prompt to share blocks with, and the place there."""
        if call.source is None:
            for host in self._table.hosts(call):
                choice = self._placer.beside(call, host, now)
                if choice is not None:
                    return host.record.request, choice
        return None, None

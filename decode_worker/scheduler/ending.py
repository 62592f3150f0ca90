"""The end of a request: told at once; its blocks follow when nothing of ours can still write to them. Pure.

    any state --> ENDING until no copy of ours is under way --> gone: what it has computed is cached
"""

from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.scheduler.admission import Admission
from decode_worker.scheduler.events import Tell
from decode_worker.scheduler.filling import Filling
from decode_worker.scheduler.forks import Forks
from decode_worker.scheduler.handoffs import Handoffs
from decode_worker.scheduler.orphans import Orphans
from decode_worker.scheduler.outcomes import Result
from decode_worker.scheduler.request import Request, RequestState
from decode_worker.scheduler.room import Room
from engine.kv.manager import KVCacheManager
from engine.messages import Ended, Fault
from engine.types import Beam, FinishReason, RequestId


@dataclass(slots=True, eq=False, repr=False)
class Ending:
    """Keeps nothing: what it changes belongs to the parts that it is given."""

    name: str
    """This worker's."""
    block_bytes: int
    requests: dict[RequestId, Request]
    """All that there are; who ends is taken out."""
    kv: KVCacheManager
    handoffs: Handoffs
    forks: Forks
    """Who waited for the prompt of one that is gone, has an heir."""
    orphans: Orphans
    """Remember ends that a client may not have read."""
    admission: Admission
    """With how much room an heir begins."""
    room: Room
    filling: Filling

    def end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        fault: Fault | None,
        kept: int | None,
        beams: Sequence[Beam],
    ) -> list[Result]:
        """Tell the router, and let the blocks go as soon as nothing of ours can still write to them. A request that
        ended with its first token lets its blocks land first: they are worth caching."""
        del self.requests[request.record.request]
        ended = Ended(
            request=request.record.request,
            placement=request.placement,
            reason=reason,
            stats=request.stats(now, self.name, self.block_bytes, kept),
            fault=fault,
            beams=list(beams),
        )
        if request.record.context and reason is not FinishReason.CANCELLED:
            self.orphans.remember(request, ended, request.output[:kept], now)
        told: list[Result] = [Tell(request.link, ended)]
        state = request.state
        self.room.leave(request)
        under_way = state in (RequestState.CONNECTING, RequestState.HANDOFF, RequestState.FENCING)
        if under_way and not request.arrived:
            well = reason in (FinishReason.STOP, FinishReason.LENGTH) and fault is None
            if not (state is RequestState.HANDOFF and well and request.first is not None):
                told += self.handoffs.abandon(request, now)
            request.move(RequestState.ENDING)
            return told
        if state is RequestState.LOADING:
            request.move(RequestState.ENDING)
            return told
        if state is RequestState.FORKING:
            self.forks.leave(request)
        request.move(RequestState.ENDING)
        return told + self.let_go(request, now)

    def let_go(self, request: Request, now: float) -> list[Result]:
        """Keep what is worth keeping in the cache; the handoff, if it was still open, is over."""
        self.handoffs.done(request)
        self.filling.fork(request, now)
        if request.arrived:
            self.kv.commit(request.lease, request.tokens[: request.known], tail=True)
        return self.release(request, now)

    def release(self, request: Request, now: float) -> list[Result]:
        """Its blocks are nobody's. If others still wait for its prompt, the first of them takes its place, and room."""
        self.kv.release(request.lease)
        heir = self.forks.heir(request)
        if heir is None:
            return []
        self.kv.release(heir.lease)
        lease = self.admission.acquire(heir.record, heir.tokens)
        if lease is None:
            heir.lease = self.room.nothing(heir)
            self.room.preempt([heir, *self.forks.waiting(heir)], now)
            return []
        heir.lease, heir.have_blocks = lease, lease.cached_tokens // self.kv.block_size
        if heir.preempted_at is None:
            heir.decode_cached_tokens = min(lease.cached_tokens, heir.record.prompt_tokens)
        return self.filling.begin(heir, now)

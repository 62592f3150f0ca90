"""The end of a request: told at once; its blocks follow when nothing of ours can still write to them. Pure.

    any state --> ENDING until no copy of ours is under way --> gone: what it has computed is cached
"""

from collections.abc import Sequence

from decode_worker.admission import Admission
from decode_worker.batch import Batch
from decode_worker.beams import Beams
from decode_worker.events import Tell
from decode_worker.filling import Filling
from decode_worker.forks import Forks
from decode_worker.handoffs import Handoffs
from decode_worker.orphans import Orphans
from decode_worker.outcomes import Result
from decode_worker.request import Request, State
from decode_worker.room import Room
from engine.kv.manager import KVCacheManager
from engine.messages import Ended, Fault
from engine.types import Beam, FinishReason, RequestId


class Ending:
    """Takes requests out of `requests`; keeps nothing. `name` is this worker's."""

    def __init__(
        self,
        requests: dict[RequestId, Request],
        kv: KVCacheManager,
        batch: Batch,
        beams: Beams,
        handoffs: Handoffs,
        forks: Forks,
        orphans: Orphans,
        admission: Admission,
        room: Room,
        filling: Filling,
        name: str,
        block_bytes: int,
    ) -> None:
        self._requests = requests
        self._kv = kv
        self._batch = batch
        self._beams = beams
        self._handoffs = handoffs
        self._forks = forks
        self._orphans = orphans
        self._admission = admission
        self._room = room
        self._filling = filling
        self._name = name
        self._block_bytes = block_bytes

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
        del self._requests[request.record.request]
        ended = Ended(
            request=request.record.request,
            placement=request.placement,
            reason=reason,
            stats=request.stats(now, self._name, self._block_bytes, kept),
            fault=fault,
            beams=list(beams),
        )
        if request.record.context and reason is not FinishReason.CANCELLED:
            self._orphans.remember(request, ended, request.output[:kept], now)
        told: list[Result] = [Tell(request.link, ended)]
        state = request.state
        self._batch.remove(request)
        self._beams.drop(request)
        self._room.leave(request)
        under_way = state in (State.CONNECTING, State.HANDOFF, State.FENCING)
        if under_way and not request.arrived:
            well = reason in (FinishReason.STOP, FinishReason.LENGTH) and fault is None
            if not (state is State.HANDOFF and well and request.first is not None):
                told += self._handoffs.abandon(request, now)
            request.state = State.ENDING
            return told
        if state is State.LOADING:
            request.state = State.ENDING
            return told
        if state is State.FORKING:
            self._forks.leave(request)
        request.state = State.ENDING
        return told + self.let_go(request, now)

    def let_go(self, request: Request, now: float) -> list[Result]:
        """Keep what is worth keeping in the cache; the handoff, if it was still open, is over."""
        self._handoffs.done(request)
        self._filling.fork(request, now)
        if request.arrived:
            self._kv.commit(request.lease, request.tokens[: request.known], tail=True)
        return self.release(request, now)

    def release(self, request: Request, now: float) -> list[Result]:
        """Its blocks are nobody's. If others still wait for its prompt, the first of them takes its place, and room."""
        self._kv.release(request.lease)
        heir = self._forks.heir(request)
        if heir is None:
            return []
        self._kv.release(heir.lease)
        lease = self._admission.acquire(heir.record, heir.tokens)
        if lease is None:
            heir.lease = self._room.nothing(heir)
            self._room.preempt([heir, *self._forks.waiting(heir)], now)
            return []
        heir.lease, heir.have_blocks = lease, lease.cached_tokens // self._kv.block_size
        if heir.preempted_at is None:
            heir.decode_cached_tokens = min(lease.cached_tokens, heir.record.prompt_tokens)
        return self._filling.begin(heir, now)

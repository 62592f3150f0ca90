"""Room in the pool for those that run, taken from those that stand behind them, and given back. Pure.

Who gives way to whom is the business of `decode_worker.scheduler.preemption`; here it is done. Blocks that are copied
to host memory can be had when the copies have ended: who wants them waits for that, without a row in the step, and
nobody else gives way for it meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from decode_worker.config import DecodeConfig
from decode_worker.scheduler.admission import Admission
from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.beams import Beams
from decode_worker.scheduler.filling import Filling
from decode_worker.scheduler.forks import Forks
from decode_worker.scheduler.outcomes import Result
from decode_worker.scheduler.preemption import Preemption, order
from decode_worker.scheduler.request import FETCHING, Request, RequestState
from decode_worker.scheduler.swapping import Swapping
from engine.kv.manager import KVCacheManager, Lease
from engine.types import RequestId


@dataclass(slots=True, eq=False, repr=False)
class Room:
    """Keeps nothing: what it changes belongs to the parts that it is given."""

    config: DecodeConfig
    requests: Mapping[RequestId, Request]
    """All that there are."""
    kv: KVCacheManager
    batch: Batch
    """Who gives way leaves it; who runs wants room first."""
    beams: Beams
    """A search wants room for every hypothesis, and gives way with all of them."""
    forks: Forks
    """Samples give way, and come back, together."""
    admission: Admission
    """With how much room who comes back is taken."""
    preemption: Preemption
    swapping: Swapping
    filling: Filling
    """Gets the KV of who comes back."""

    # taken

    def make(self, now: float) -> bool:
        """A block for the next token of everybody in the step, as long as somebody can give way. Returns whether
        anybody has: others that are ready may take their rows."""
        before, awaited = self.preemption.preempted.total(), 0
        for request in sorted(self.batch.running, key=order):
            if request.state is not RequestState.RUNNING:
                continue  # it has given way to one before it
            wants = self.beams.wants(request)
            while (short := sum(more for _, more in wants)) > self.kv.available:
                if awaited + short <= self.kv.available + self.swapping.freeing:
                    awaited += short
                    break
                victims = self.preemption.victims(
                    request, self.requests.values(), self.forks.waiting
                )
                self.preempt(victims, now)
                if not victims or request in victims:
                    break
            else:
                for lease, more in wants:
                    self.kv.grow(lease, more)
        return self.preemption.preempted.total() > before

    def preempt(self, victims: list[Request], now: float) -> None:
        """They give their blocks away, and stand in line. What was computed stays in the cache until it is needed, and
        in host memory, where it is swapped."""
        for request in victims:
            if request.state is RequestState.FORKING:
                self.forks.leave(request)
            self._leave_batch(request)
            if request.arrived:
                self.kv.commit(request.lease, request.tokens[: request.known], tail=True)
                self.swapping.out(request)
            self.kv.release(request.lease)
            request.lease = self.nothing(request)
            self.preemption.add(request, now)

    def nothing(self, request: Request) -> Lease:
        """A lease of no blocks."""
        lease = self.kv.promise(request.record.namespace, 0)
        assert lease is not None
        return lease

    def leave(self, request: Request) -> None:
        """It is over: it has no row, and wants no room any more."""
        self._leave_batch(request)
        self.preemption.remove(request)
        self.swapping.drop(request)

    def _leave_batch(self, request: Request) -> None:
        self.batch.remove(request)
        self.beams.drop(request)

    # given back

    def resume(self, now: float) -> list[Result]:
        """Those that were preempted come back in their order, as far as there is room beside the running ones."""
        results: list[Result] = []
        for request in list(self.preemption.line):
            begun = self._seek(request, now)
            if begun is None:
                break
            results += begun
        return results

    def _seek(self, request: Request, now: float) -> list[Result] | None:
        """Get the KV of a preempted request back; None where there is no room for it yet."""
        record, tokens = request.record, request.tokens
        # Who runs wants its next block soon: to take it away would preempt this request again.
        spare = max(len(self.batch.running), self._shortage)
        mate = self._fetched_sample(request)
        if mate is not None and request.stash is not None:
            return None  # what they share is on its way: to fetch it twice would take room twice
        parent = None if mate is None else self.forks.parent(record, mate)
        if parent is not None:
            room_tokens = self.admission.room_tokens(record, len(tokens))
            lease = self.forks.promise(record, room_tokens, spare)
            if lease is None:
                return None
            self.preemption.remove(request)
            request.seek(lease, "shared", now)
            self.forks.wait(request, parent)
            return []
        missing = len(tokens) - self.kv.matched_tokens(record.namespace, tokens, len(tokens) - 1)
        # What was copied is copied back, unless all of it is here still.
        size, few = self.kv.block_size, self.config.local_chunk_tokens
        least = few if request.stash is None else size
        lifts = missing > least and self.swapping.looks_up(request)
        here = not request.prefill.name or missing <= max(few, least)
        if not here and self.filling.is_busy:
            return None
        lease = self.admission.acquire(record, tokens, migrating=lifts or not here, spare=spare)
        if lease is None:
            return None
        self.preemption.remove(request)
        request.seek(lease, "here" if here else "pool", now)
        request.have_blocks = lease.cached_tokens // size
        self.swapping.costs.resumed(len(tokens) - 1, request.lost_tokens)
        if lifts and self.filling.lift(request, here=here):
            request.way = "swap"
        self.swapping.drop(request)
        if request.state is RequestState.LOADING:
            return []
        if not here:
            return self.filling.begin(request, now)
        self.kv.landed(lease)
        request.known, request.arrived = lease.cached_tokens, True
        self.batch.add_local(request, now)
        return []

    @property
    def _shortage(self) -> int:
        """Blocks that those who run want now."""
        wants = [want for request in self.batch.running for want in self.beams.wants(request)]
        return sum(short for _, short in wants)

    def _fetched_sample(self, request: Request) -> Request | None:
        """Another sample of its prompt that is being fetched now."""
        group = request.record.group
        for other in self.requests.values():
            if group and other.record.group == group and other.state in FETCHING:
                return other
        return None

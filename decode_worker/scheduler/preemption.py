"""Who gives way when the pool is exhausted, and how it comes back. Pure.

    READY, RUNNING, LOCAL, FORKING --the pool is exhausted--> PREEMPTED: no blocks; what it had is evictable cache
    PREEMPTED --room--> handoff: its tokens so far are a new prompt for its prefill worker
                    --> LOCAL: little is missing, or there is no prefill worker
                    --> FORKING: a sample of the same prompt is being fetched: wait for it, and share
                    --> LOADING: its blocks were copied to host memory, and are copied back

All requests of a worker stand in one order: higher priority first, then older first, samples of one prompt together.
Room is made for each in that order and taken from the end, the samples of another prompt as a group. So the first of
all never gives way to anybody: it can go on whatever the others do, it ends, and another is the first. The last
blocks of a request are evicted first: what it had before them is found again, unless others need that as well.

Only blocks that no copy of ours can touch are taken: a request in a handoff, or one whose prefill worker is being
replaced, is passed over. Whom only such requests stand behind waits for them, without a row in the step and with its
blocks. They never want more blocks than they were taken with, so they land or end, and the wait is not circular.
New requests are refused as long as anybody stands in the line of the preempted, except above its priority.

Blocks that are copied to host memory can be had when the copies have ended: who wants them waits for that, without a
row in the step, and nobody else gives way for it meanwhile.
"""

from collections import Counter
from dataclasses import dataclass, field

from decode_worker.scheduler.admission import Admission
from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.events import Result
from decode_worker.scheduler.prefills import Prefills
from decode_worker.scheduler.request import FETCHING, Preempted, Request, RequestState
from decode_worker.scheduler.swapping import Swapping
from engine.kv.manager import KVCacheManager, Lease
from engine.types import RequestRecord
from worker.config import DecodeConfig

YIELDING = frozenset({RequestState.READY, RequestState.RUNNING, RequestState.LOCAL, RequestState.FORKING})
"""States in which nothing but a step of ours writes to a request's blocks."""


def order(request: Request) -> tuple[int, tuple[int, int]]:
    """The smaller, the longer it keeps its blocks."""
    return -request.record.priority, request.age


@dataclass(eq=False, repr=False)
class Preemption:
    """Mutable state: the line of the preempted, and how many there were; who gives way leaves the batch, who comes back
    begins in `prefills`. Owner: the scheduler."""

    config: DecodeConfig
    kv: KVCacheManager
    batch: Batch
    swapping: Swapping
    prefills: Prefills
    admission: Admission
    line: list[Request] = field(default_factory=list)
    preempted: Counter[str] = field(default_factory=Counter)
    """How many, by the state in which they were."""

    def bars(self, record: RequestRecord) -> bool:
        """Somebody waits whose turn comes before that of a new request."""
        return any(request.record.priority >= record.priority for request in self.line)

    # room is taken

    def make_room(self, now: float) -> bool:
        """A block for the next token of everybody in the step, as long as somebody can give way. Returns whether
        anybody has: others that are ready may take their rows."""
        before, awaited = self.preempted.total(), 0
        for request in sorted(self.batch.running, key=order):
            if request.state is not RequestState.RUNNING:
                continue  # it has given way to one before it
            wants = self.batch.beams.wants(request)
            while (short := sum(more for _, more in wants)) > self.kv.available:
                if awaited + short <= self.kv.available + self.swapping.freeing:
                    awaited += short
                    break
                victims = self.victims(request)
                self.preempt(victims, now)
                if not victims or request in victims:
                    break
            else:
                for lease, more in wants:
                    self.kv.grow(lease, more)
        return self.preempted.total() > before

    def victims(self, wants: Request) -> list[Request]:
        """Who gives way to `wants`: requests to be preempted together, perhaps `wants` itself; nobody where it is
        better to wait. Four cases:

        1. nobody stands behind `wants`, but others before it: it gives way itself
        2. those behind it are all in handoffs, or there are no others: it waits
        3. the last behind it is alone, or a sample of the same prompt: that one gives way
        4. the last behind it is a sample of another prompt: all of its samples do, that can

        Whoever waits for the prompt of one that gives way, gives way with it.
        """
        waiting = self.prefills.forks.waiting
        here = [r for r in self.admission.requests.values() if r.state is not RequestState.PREEMPTED]
        here.sort(key=order)
        behind = here[here.index(wants) + 1 :]
        last = next((r for r in reversed(behind) if r.state in YIELDING), None)
        if last is None:
            return [] if behind or len(here) == 1 else [wants, *waiting(wants)]
        group = last.record.group
        chosen = [last]
        if group and group != wants.record.group:
            chosen = [r for r in here if r.record.group == group and r.state in YIELDING]
        forks = [fork for request in chosen for fork in waiting(request)]
        return chosen + [fork for fork in forks if fork not in chosen]

    def preempt(self, victims: list[Request], now: float) -> None:
        """They give their blocks away, and stand in line. What was computed stays in the cache until it is needed, and
        in host memory, where it is swapped."""
        for request in victims:
            preempted = request.preempted or Preempted(now)
            if request.state is RequestState.FORKING:
                self.prefills.forks.leave(request)
            self.batch.remove(request)
            if request.arrived:
                self.kv.commit(request.lease, request.tokens[: request.known], tail=True)
                self.swapping.out(request, preempted)
            if not request.lease.released:
                self.kv.release(request.lease)
            request.lease = self._nothing(request)
            request.preempted = preempted
            self.preempted[request.state.value] += 1
            if request.clock.stage == "prefill":
                request.close_prefill(now)
            request.clock.enter("decode_queue", now)
            request.move(RequestState.PREEMPTED)
            request.arrived, request.known, request.have_blocks = False, 0, 0
            self.line.append(request)
            self.line.sort(key=order)

    def _nothing(self, request: Request) -> Lease:
        """A lease of no blocks."""
        lease = self.kv.promise(request.record.namespace, 0)
        assert lease is not None
        return lease

    def leave(self, request: Request) -> None:
        """It has ended: it has no row, and wants no room any more."""
        self.batch.remove(request)
        self._leave_line(request)
        self.swapping.drop(request)

    # room is given back

    def resume(self, now: float) -> list[Result]:
        """Those that were preempted come back in their order, as far as there is room beside the running ones."""
        results: list[Result] = []
        for request in list(self.line):
            begun = self._come_back(request, now)
            if begun is None:
                break
            results += begun
        return results

    def _come_back(self, request: Request, now: float) -> list[Result] | None:
        """Begin to get the KV of a preempted request back; None where there is no room for it yet. Five cases:

        1. another sample of its prompt is being fetched, and this one was swapped: it waits, for to fetch what they
           share twice would take room twice
        2. another sample of its prompt is being fetched: it waits for that prompt as a fork, and shares
        3. a lower tier has its next blocks, because it was swapped, or has them sooner: they are loaded
        4. little is missing, or no prefill worker is left for it: that is computed here
        5. else its tokens so far are a new prompt for its prefill worker
        """
        record, tokens, kv = request.record, request.tokens, self.kv
        # Who runs wants its next block soon: to take it away would preempt this request again.
        spare = max(len(self.batch.running), self.batch.shortage)
        sample = self._fetched_sample(request)
        if sample is not None and request.stash is not None:
            return None  # 1
        parent = None if sample is None else self.prefills.forks.parent(record, sample)
        if parent is not None:  # 2
            lease = self.admission.promise(record, len(tokens), spare)
            if lease is None:
                return None
            self._begin(request, lease, "shared", now)
            self.prefills.forks.wait(request, parent)
            return []
        missing = len(tokens) - kv.matched_tokens(record.namespace, tokens, len(tokens) - 1)
        few = self.config.local_chunk_tokens
        # What was copied is copied back, unless all of it is here still.
        least = few if request.stash is None else kv.block_size
        loads = missing > least and self.swapping.looks_up(request)
        here = not request.prefill.worker.name or missing <= max(few, least)
        if not here and self.prefills.is_busy:
            return None
        lease = self.admission.acquire(record, tokens, migrating=loads or not here, spare=spare)
        if lease is None:
            return None
        preempted = self._begin(request, lease, "here" if here else "pool", now)
        request.have_blocks = lease.cached_tokens // kv.block_size
        self.swapping.costs.resumed(len(tokens) - 1, preempted.lost_tokens)
        is_loaded = loads and self.prefills.load(request, here=here)
        self.swapping.drop(request)
        if is_loaded:  # 3
            preempted.way = "swap"
        elif here:  # 4
            self.prefills.compute_rest(request, lease.cached_tokens, now)
        else:  # 5
            return self.prefills.begin(request, now)
        return []

    def _begin(self, request: Request, lease: Lease, way: str, now: float) -> Preempted:
        """It leaves the line, and begins to get its KV back, into `lease`."""
        assert request.preempted is not None
        self._leave_line(request)
        request.lease = lease
        request.preempted.way = way
        request.preempted.lost_tokens = len(request.tokens) - 1 - lease.cached_tokens
        request.clock.enter("prefill", now)
        request.prefill = request.prefill.again(now)
        return request.preempted

    def _leave_line(self, request: Request) -> None:
        if request in self.line:
            self.line.remove(request)

    def _fetched_sample(self, request: Request) -> Request | None:
        """Another sample of its prompt that is being fetched now."""
        group = request.record.group
        for other in self.admission.requests.values():
            if group and other.record.group == group and other.state in FETCHING:
                return other
        return None

    def check(self) -> None:
        """Recompute the invariants."""
        preempted = [r for r in self.admission.requests.values() if r.state is RequestState.PREEMPTED]
        assert self.line == sorted(preempted, key=order)
        assert all(not r.lease.blocks and not r.lease.promised for r in self.line)

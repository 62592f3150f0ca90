"""Chooses which request is preempted when the pool is exhausted, and brings it back. Pure.

    READY, RUNNING, LOCAL, FORKING --the pool is exhausted--> PREEMPTED: no blocks; what it had is evictable cache
    PREEMPTED --room--> FORKING, LOADING, LOCAL or handoff

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

PREEMPTIBLE = frozenset({RequestState.READY, RequestState.RUNNING, RequestState.LOCAL, RequestState.FORKING})
"""States in which nothing but a step of ours writes to a request's blocks."""


def order(request: Request) -> tuple[int, tuple[int, int]]:
    """Return a request's rank: the smaller, the longer it keeps its blocks."""
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
    """Preemptions, by the state in which the requests were."""
    _refused: tuple[Request, int] | None = None
    """Who of the line there was no room for at last, and how many blocks there were then that it might have had."""
    _held_up: Request | None = None
    """Who of the line waits until another handoff may begin."""

    def bars(self, record: RequestRecord) -> bool:
        """Say if a preempted request comes before a new one."""
        return any(request.record.priority >= record.priority for request in self.line)

    # room is taken

    @property
    def has_room(self) -> bool:
        """True where there are the blocks that those who run want now: nobody need give way."""
        wants = [want for request in self.batch.running for want in self.batch.wants(request)]
        return sum(self.kv.cost(*want) for want in wants) <= self.kv.available

    def make_room(self, now: float) -> bool:
        """Have a block for the next token of every running request, as long as others can give way. Return True if any
        did: those that are ready may take their rows."""
        before, awaited, freeing = self.preempted.total(), 0, -1
        for request in sorted(self.batch.running, key=order):
            if request.state is not RequestState.RUNNING:
                continue  # it has given way to one before it
            wants = self.batch.wants(request)
            while (short := sum(self.kv.cost(*want) for want in wants)) > self.kv.available:
                freeing = self.swapping.freeing if freeing < 0 else freeing  # not for everybody anew: it takes long
                if awaited + short <= self.kv.available + freeing:
                    awaited += short
                    break
                victims = self.victims(request)
                self.preempt(victims, now)
                freeing = -1
                if not victims or request in victims:
                    break
            else:
                for lease, more in wants:
                    self.kv.grow(lease, more)
        return self.preempted.total() > before

    def victims(self, wants: Request) -> list[Request]:
        """Return who gives way to `wants`: requests to be preempted together, perhaps `wants` itself; nobody where it
        is better to wait. Whoever waits for the prompt of one that gives way, gives way with it."""
        waiting = self.prefills.forks.waiting
        here = [r for r in self.admission.requests.values() if r.state is not RequestState.PREEMPTED]
        here.sort(key=order)
        behind = here[here.index(wants) + 1 :]
        last = next((r for r in reversed(behind) if r.state in PREEMPTIBLE), None)
        if last is None:
            # 1. Nobody stands behind `wants`, but others before it: it gives way itself.
            # 2. Those behind it are all in handoffs, or there are no others: it waits.
            return [] if behind or len(here) == 1 else [wants, *waiting(wants)]
        # 3. The last behind it is alone, or a sample of the same prompt: that one gives way.
        chosen, group = [last], last.record.group
        if group and group != wants.record.group:
            # 4. The last behind it is a sample of another prompt: all of its samples do, that can.
            chosen = [r for r in here if r.record.group == group and r.state in PREEMPTIBLE]
        forks = [fork for request in chosen for fork in waiting(request)]
        return chosen + [fork for fork in forks if fork not in chosen]

    def preempt(self, victims: list[Request], now: float) -> None:
        """Take their blocks away, and let them stand in line. What was computed stays in the cache until the room is
        needed, and in host memory, where it is swapped."""
        for request in victims:
            preempted = request.preempted or Preempted(now)
            self.prefills.forks.leave(request)
            self.batch.remove(request)
            self.kv.commit(request.lease, request.tokens[: request.known], tail=True)
            self.swapping.out(request, preempted)
            if not request.lease.released:
                self.kv.release(request.lease)
            nothing = self.kv.promise(request.record.space, 0)
            assert nothing is not None
            request.lease = nothing
            request.preempted = preempted
            self.preempted[request.state.value] += 1
            if request.clock.stage == "prefill":
                request.close_prefill(now)
            request.clock.enter("decode_queue", now)
            request.move(RequestState.PREEMPTED)
            request.arrived, request.known, request.have_blocks = False, 0, 0
            self.line.append(request)
            self.line.sort(key=order)

    def leave(self, request: Request) -> None:
        """Forget a request that has ended: it has no row, and wants no room any more."""
        self.batch.remove(request)
        if request in self.line:
            self.line.remove(request)
        self.swapping.drop(request)

    # room is given back

    def resume(self, now: float) -> list[Result]:
        """Bring preempted requests back in their order, as far as there is room beside the running ones. Samples that
        cannot share what they waited for come back so, too."""
        self.preempt(self.prefills.forks.stranded(), now)
        results: list[Result] = []
        for request in list(self.line):
            begun = self._come_back(request, now)
            if begun is None:
                break
            results += begun
        return results

    def _come_back(self, request: Request, now: float) -> list[Result] | None:
        """Begin to get the KV of a preempted request back; None where there is no room for it yet."""
        record, tokens, kv, prefills = request.record, request.tokens, self.kv, self.prefills
        # Who runs wants its next block soon: to take it away would preempt this request again.
        spare = max(len(self.batch.running), self.batch.shortage)
        refused, self._refused = self._refused, None
        if self.batch.running and refused and refused[0] is request and kv.available - spare <= refused[1]:
            # What it shares with others takes as much from what it needs as from what there is.
            self._refused = refused
            return None
        sample = None if record.prompt_logprobs is not None else self._fetched_sample(request)
        # 1. Another sample of its prompt is being fetched, and this one was swapped: it waits, since fetching what they
        # share twice would take room twice.
        if sample is not None and request.stash is not None:
            return None
        # 2. Another sample of its prompt is being fetched: it waits for that prompt as a fork, and shares.
        parent = None if sample is None else prefills.forks.parent(record, sample)
        if parent is not None:
            lease = self.admission.promise(record, len(tokens), spare)
            if lease is None:
                return None
            self._begin(request, lease, "shared", now)
            prefills.forks.wait(request, parent)
            return []
        if self._held_up is request and prefills.is_busy(here=False):
            return None
        self._held_up = None
        # Else it needs blocks for all of its tokens, to be filled by a tier, here, or by its prefill worker. What was
        # copied is copied back, unless all of it is here still.
        limit = request.match_limit
        missing = len(tokens) - kv.matched_tokens(record.space, tokens, limit)
        few = self.config.local_chunk_tokens
        least = few if request.stash is None else kv.block_size
        loads = missing > least and self.swapping.looks_up(request)
        here = not request.prefill.worker.name or missing <= max(few, least)
        if not here and prefills.is_busy(here=False):
            self._held_up = request
            return None
        lease = self.admission.acquire(record, tokens, migrating=loads or not here, spare=spare, match_limit=limit)
        if lease is None:
            self._refused = request, kv.available - spare
            return None
        preempted = self._begin(request, lease, "here" if here else "pool", now)
        request.have_blocks = lease.cached_tokens // kv.block_size
        self.swapping.costs.resumed(len(tokens) - 1, preempted.lost_tokens)
        is_loaded = loads and prefills.load(request, here=here)
        self.swapping.drop(request)
        # 3. A lower tier has its next blocks, because it was swapped, or has them sooner: they are loaded.
        if is_loaded:
            preempted.way = "swap"
            return []
        # 4. Little is missing, or no prefill worker is left for it: that is computed here.
        if here:
            prefills.compute_rest(request, request.lease.cached_tokens)  # which may be another than above
            return []
        # 5. Its tokens so far are a new prompt for its prefill worker.
        return prefills.begin(request, now)

    def _begin(self, request: Request, lease: Lease, way: str, now: float) -> Preempted:
        """Take a request out of the line: its KV comes back into `lease`."""
        preempted = request.preempted
        assert preempted is not None
        self.line.remove(request)
        request.lease = lease
        preempted.way, preempted.lost_tokens = way, len(request.tokens) - 1 - lease.cached_tokens
        request.clock.enter("prefill", now)
        request.prefill = request.prefill.again(now)
        return preempted

    def _fetched_sample(self, request: Request) -> Request | None:
        """Return another sample of its prompt that is being fetched now."""
        group = request.record.group
        for other in self.admission.requests.values():
            if group and other.record.group == group and other.state in FETCHING:
                return other
        return None

    def check(self) -> None:
        preempted = [r for r in self.admission.requests.values() if r.state is RequestState.PREEMPTED]
        assert self.line == sorted(preempted, key=order)
        assert all(not r.lease.blocks and not r.lease.promised for r in self.line)

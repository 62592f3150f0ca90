"""How the KV of a request is filled in, by its prefill worker or here, in chunks, until it can decode. Pure.

    LOADING --what a tier has is here--> handoff, or LOCAL
    handoff --every block and the first token are here--> READY
    handoff --no use in trying again--> ASKING --another worker is named--> handoff
    none is left --> LOCAL --last chunk--> READY

From then on others may share its blocks, and those that waited for them begin (`decode_worker.scheduler.forks`).
"""

from dataclasses import dataclass

from decode_worker.config import DecodeConfig
from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.beams import Beams
from decode_worker.scheduler.events import Tell
from decode_worker.scheduler.forks import Forks
from decode_worker.scheduler.handoffs import MAX_ATTEMPTS, Handoffs
from decode_worker.scheduler.loading import Loading
from decode_worker.scheduler.orphans import NOBODY
from decode_worker.scheduler.outcomes import Lifted, Result
from decode_worker.scheduler.preemption import Preemption
from decode_worker.scheduler.request import NO_PREFILL, Request, RequestState
from decode_worker.scheduler.swapping import Swapping
from engine.kv.manager import KVCacheManager
from engine.messages import NeedPrefill, PeerAddress


@dataclass(slots=True, eq=False, repr=False)
class Filling:
    """Keeps nothing: what it changes belongs to the parts that it is given."""

    name: str
    """This worker's."""
    config: DecodeConfig
    kv: KVCacheManager
    batch: Batch
    """Who is ready, or is computed here, joins it."""
    beams: Beams
    """A search begins with its prompt."""
    handoffs: Handoffs
    forks: Forks
    loading: Loading
    preemption: Preemption
    """Is told who is back."""
    swapping: Swapping
    """Measures what having KV costs, by each way."""

    def begin(self, request: Request, now: float) -> list[Result]:
        """Have the prompt filled in, by its prefill worker or here."""
        if not request.prefill.name:
            self.here(request, now)
            return []
        request.asked = now
        request.asked_tokens = len(request.tokens) - request.have_blocks * self.kv.block_size
        return self.handoffs.begin(request, now)

    @property
    def is_busy(self) -> bool:
        """As much is being fetched as may be at one time."""
        return len(self.handoffs) + len(self.loading) >= self.config.max_handoffs

    def lift(self, request: Request, *, here: bool) -> bool:
        """Begin to load what a tier has of its next blocks, if that is sooner than having them computed, `here` or not;
        what was copied for it is always loaded. False: nothing is."""
        speed = None if request.stash is not None else self.swapping.costs.tokens_per_s(here)
        found = self.loading.find(request.lease, request.tokens, speed)
        if found is not None:
            self.loading.begin(request, found)
        return found is not None

    def lifted(self, event: Lifted, now: float) -> list[Result]:
        """What a tier had of it is here: have the rest filled in."""
        request, have_tokens = event.request, event.request.have_blocks * self.kv.block_size
        missing = len(request.tokens) - have_tokens
        if request.preempted_at is None:
            request.decode_cached_tokens = min(have_tokens, request.record.prompt_tokens)
            return self.begin(request, now)
        self.swapping.lifted(event.blocks, event.seconds, event.is_whole)
        # What is less than a block was never copied: to ask the prefill pool for it would compute all of it there.
        few = max(self.config.local_chunk_tokens, self.kv.block_size if event.is_whole else 0)
        here = not request.prefill.name or missing <= few
        if not event.is_whole:
            request.way = "here" if here else "pool"
        if not here:
            return self.begin(request, now)
        self.kv.landed(request.lease)
        request.known, request.arrived = have_tokens, True
        self.kv.commit(request.lease, request.tokens[:have_tokens])
        self.batch.add_local(request, now)
        return []

    def here(self, request: Request, now: float) -> None:
        """No prefill worker will do: compute what is missing in chunks, beside the running batch."""
        self.kv.landed(request.lease)
        if request.prefill.name and not request.arrived:
            self.handoffs.note("fallback", request)
        here = request.have_blocks * self.kv.block_size
        request.known = len(request.tokens) - 1 if request.arrived else here
        if request.output_tokens == 0:
            request.prefill_cached_tokens = min(request.known, request.record.prompt_tokens)
        request.arrived, request.prefill = True, NO_PREFILL
        self.batch.add_local(request, now)

    def landed(self, request: Request, now: float) -> None:
        """The handoff has brought every block."""
        request.known = len(request.tokens) - (request.first is not None)
        self.kv.landed(request.lease)
        if request.state is not RequestState.ENDING and request.first is not None:
            self.admit(request, now)

    def admit(self, request: Request, now: float) -> None:
        """Blocks and first token are both here: from now on others may share the prompt's blocks."""
        self.handoffs.done(request)
        if request.record.beams is not None:
            # The prompt's last token is computed again: what follows it is not drawn, but searched.
            request.known = len(request.tokens) - 1
            self.beams.begin(request)
        self.kv.commit(request.lease, request.tokens[: request.known])
        request.close_prefill(now)
        request.clock.enter("decode_queue", now)
        here = self.name if request.local_since is not None else request.prefill.name
        request.prefilled_by = request.prefilled_by or here
        if request.local_since is not None:
            self.swapping.costs.computed(
                request.known - request.local_from, now - request.local_since
            )
        else:
            self.swapping.costs.fetched(request.asked_tokens, now - request.asked)
        self.preemption.back(request, now)
        self.batch.add_ready(request)
        self.fork(request, now)

    def fork(self, parent: Request, now: float) -> None:
        """The prompt of `parent` is here: those that wait for it share its blocks, and compute what is their own."""
        for request in self.forks.fork(parent):
            self.batch.add_local(request, now)

    def unserved(self, request: Request, now: float) -> list[Result]:
        """Keep what has landed, and ask the router for another prefill worker."""
        if request.link == NOBODY:
            self.here(request, now)
            return []
        request.move(RequestState.ASKING)
        name = request.record.request
        return [Tell(request.link, NeedPrefill(name, request.placement, request.prefill.name))]

    def use_prefill(
        self, request: Request, prefill: PeerAddress | None, now: float
    ) -> list[Result]:
        """The router's answer, if the request still waits for one."""
        if request.state is not RequestState.ASKING:
            return []
        if prefill is None or request.arrived or request.tries >= MAX_ATTEMPTS:
            self.here(request, now)
            return []
        request.prefill = prefill
        return self.handoffs.begin(request, now)

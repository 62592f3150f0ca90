"""How the KV of a request gets here: by its prefill worker, out of a lower tier, from another sample, or computed here
in chunks, until it can decode. Pure.

    LOADING --what a tier has of it is here--> handoff, or LOCAL
    handoff --every block and the first token are here--> READY
    handoff --no use in trying again--> ASKING --another worker is named--> handoff
    none is left --> LOCAL --last chunk--> READY

From then on others may share its blocks, and those that waited for them begin
(`decode_worker.scheduler.samples.forks`). Until a load has ended its blocks are written by the tier thread: they are
RESERVED, and a request that has ended keeps them until then. What could not be loaded is had as if there were no tier.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.events import Freed, FromSource, Result, Tell
from decode_worker.scheduler.handoffs import (
    MAX_ATTEMPTS,
    HandoffResult,
    Handoffs,
    KVReceived,
    Unserved,
)
from decode_worker.scheduler.leaving.orphans import NOBODY
from decode_worker.scheduler.request import NO_PREFILL, Request, RequestState
from decode_worker.scheduler.samples.forks import Forks
from decode_worker.scheduler.swapping import Swapping
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import Loaded
from engine.messages import NeedPrefill, PeerAddress
from worker.config import DecodeConfig


@dataclass(eq=False, repr=False)
class Prefills:
    """Mutable state: `_loads` (request and blocks by the number of its load), and what `handoffs` and `forks` own; who
    is ready, or is computed here, joins the batch. Owner: the scheduler."""

    name: str
    """This worker's."""
    config: DecodeConfig
    kv: KVCacheManager
    handoffs: Handoffs
    forks: Forks
    batch: Batch
    swapping: Swapping
    _loads: dict[int, tuple[Request, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Requests that are being fetched now."""
        return len(self.handoffs) + len(self._loads)

    @property
    def is_busy(self) -> bool:
        """As much is being fetched as may be at one time."""
        return len(self) >= self.config.max_handoffs

    # begun

    def start(self, request: Request, now: float) -> list[Result]:
        """A request was taken: load its next blocks from a tier, or have all that is missing filled in."""
        if self.load(request, here=not request.prefill.worker.name):
            return []
        return self.begin(request, now)

    def begin(self, request: Request, now: float) -> list[Result]:
        """Have the prompt filled in, by its prefill worker or here."""
        prefill = request.prefill
        if not prefill.worker.name:
            self.compute_prompt(request, now)
            return []
        prefill.asked = now
        prefill.asked_tokens = len(request.tokens) - request.have_blocks * self.kv.block_size
        return self._settle(self.handoffs.begin(request, now), now)

    def wait(self, request: Request, parent: Request, now: float) -> None:
        """A sample was taken: it begins as soon as the prompt of `parent` is here, which may be now."""
        self.forks.wait(request, parent)
        if parent.state in (RequestState.READY, RequestState.RUNNING):
            self.share(parent, now)

    def load(self, request: Request, *, here: bool) -> bool:
        """Begin to load what a tier has of the whole blocks that come next after those cached in its new lease, if that
        is sooner than having them computed, `here` or not; what was copied for it is always loaded. False: nothing
        is."""
        tiers, lease, size = self.kv.tiers, request.lease, self.kv.block_size
        if tiers is None:
            return False
        limit, nodes = len(request.tokens) - 1, lease.path
        parent = nodes[-1].identity if nodes else self.kv.cache.root_identity(lease.namespace)
        found = tiers.find(parent, request.tokens, len(nodes) * size, limit, size)
        if found and request.stash is None:
            count = tiers.worthwhile(found, size, self.swapping.costs.tokens_per_s(here))
            tiers.counts.refused += count < len(found)
            found = found[:count]
        if not found:
            return False
        assert request.have_blocks == len(nodes)
        targets = lease.blocks[len(nodes) : len(nodes) + len(found)]
        number = tiers.load(tiers.pin(found), tuple(found), targets)
        self._loads[number] = request, len(found)
        request.move(RequestState.LOADING)
        return True

    def compute_prompt(self, request: Request, now: float) -> None:
        """No prefill worker will do: compute what is missing here."""
        if request.prefill.worker.name and not request.arrived:
            self.handoffs.note("fallback", request)
        known = request.have_blocks * self.kv.block_size
        if request.arrived:
            known = len(request.tokens) - 1
        if request.output_tokens == 0:
            request.origin.prefill_cached_tokens = min(known, request.record.prompt_tokens)
        request.prefill.worker = NO_PREFILL
        self.compute_rest(request, known, now)

    def compute_rest(self, request: Request, known: int, now: float) -> None:
        """The KV of `known` tokens is here: the rest is computed in chunks, beside the running batch."""
        self.kv.landed(request.lease)
        request.known, request.arrived = known, True
        self.kv.commit(request.lease, request.tokens[:known])
        self.batch.add_local(request, now)

    # here

    def ready(self, request: Request, now: float) -> None:
        """Blocks and first token are both here: from now on others may share the prompt's blocks."""
        self.handoffs.done(request)
        # Computed next: the row of the newest token, which for a search is the prompt's last one.
        request.known = len(request.tokens) - 1
        if request.record.beams is not None:
            self.batch.beams.begin(request)
        self.kv.commit(request.lease, request.tokens[: request.known])
        request.close_prefill(now)
        request.clock.enter("decode_queue", now)
        prefill, origin = request.prefill, request.origin
        here = self.name if prefill.local_since is not None else prefill.worker.name
        origin.prefilled_by = origin.prefilled_by or here
        self.swapping.arrived(request, now)
        self.batch.add_ready(request)
        self.share(request, now)

    def share(self, parent: Request, now: float) -> None:
        """The prompt of `parent` is here: those that wait for it share its blocks, and compute what is their own."""
        for request, tokens in self.forks.fork(parent):
            self.compute_rest(request, tokens, now)

    # events

    def handle(self, event: FromSource, now: float) -> list[Result]:
        """A worker that is read from, or the transfer thread, says something; first tokens are the scheduler's."""
        return self._settle(self.handoffs.handle(event, now), now)

    def loaded(self, event: Loaded, now: float) -> list[Result]:
        """A load has ended: have the rest filled in. To be called after `Tiers.handle`."""
        request, wanted_blocks = self._loads.pop(event.number)
        if request.state is RequestState.ENDING:
            return [Freed(request)]
        size, is_whole = self.kv.block_size, event.blocks == wanted_blocks
        request.have_blocks += event.blocks
        have_tokens = request.have_blocks * size
        if request.preempted is None:
            request.origin.decode_cached_tokens = min(have_tokens, request.record.prompt_tokens)
            return self.begin(request, now)
        self.swapping.loaded(event.blocks, event.host_s + event.disk_s, is_whole)
        # What is less than a block was never copied: to ask the prefill pool for it would compute all of it there.
        few = max(self.config.local_chunk_tokens, size if is_whole else 0)
        here = not request.prefill.worker.name or len(request.tokens) - have_tokens <= few
        if not is_whole:
            request.preempted.way = "here" if here else "pool"
        if not here:
            return self.begin(request, now)
        self.compute_rest(request, have_tokens, now)
        return []

    def use_worker(self, request: Request, worker: PeerAddress | None, now: float) -> list[Result]:
        """The router's answer, if the request still waits for one."""
        if request.state is not RequestState.ASKING:
            return []
        if worker is None or request.arrived or request.prefill.tries >= MAX_ATTEMPTS:
            self.compute_prompt(request, now)
            return []
        request.prefill.worker = worker
        return self._settle(self.handoffs.begin(request, now), now)

    def _settle(self, results: Iterable[HandoffResult], now: float) -> list[Result]:
        """What a handoff brought, or did not, is acted on here; everything else goes to the scheduler."""
        rest: list[Result] = []
        for result in results:
            match result:
                case KVReceived(request):
                    if request.prefill.first is not None:
                        self.ready(request, now)
                case Unserved(request) if request.link == NOBODY:
                    self.compute_prompt(request, now)
                case Unserved(request):
                    # What has landed is kept.
                    request.move(RequestState.ASKING)
                    name, worker = request.record.request, request.prefill.worker.name
                    rest.append(Tell(request.link, NeedPrefill(name, request.placement, worker)))
                case _:
                    rest.append(result)
        return rest

    # ended

    def end(self, request: Request, keep: bool, now: float) -> list[Result]:
        """The request has ended: stop what is under way for it. `Freed` follows, at once but in three cases:

        1. it is loaded: when the load has ended
        2. its handoff goes well, the first token was the last, and `keep`: when its blocks have landed, which are worth
           caching
        3. it is in another handoff: when that is fenced
        """
        state, results = request.state, list[Result]()
        has_begun = state in (RequestState.CONNECTING, RequestState.HANDOFF, RequestState.FENCING)
        if state is RequestState.FORKING:
            self.forks.leave(request)
        if has_begun and not request.arrived:
            is_well = state is RequestState.HANDOFF and request.prefill.first is not None
            if not (keep and is_well):
                results = self.abandon(request, now)
        elif state is not RequestState.LOADING:
            results = [Freed(request)]
        request.move(RequestState.ENDING)
        return results

    def abandon(self, request: Request, now: float) -> list[Result]:
        """Want no more of its handoff; `Freed` follows, at once or when the last copy of ours has ended."""
        return self._settle(self.handoffs.abandon(request, now), now)

    def check(self, requests: Iterable[Request]) -> None:
        """Recompute the invariants: `requests` are all that there are."""
        forking = {r for r in requests if r.state is RequestState.FORKING}
        loading = {r for r in requests if r.state is RequestState.LOADING}
        self.handoffs.check()
        self.forks.check(forking)
        loaded = [request for request, _ in self._loads.values()]
        assert len(loaded) == len(set(loaded))
        assert loading == {r for r in loaded if r.state is not RequestState.ENDING}
        for request, blocks in self._loads.values():
            assert not request.lease.released
            assert len(request.lease.blocks) >= request.have_blocks + blocks

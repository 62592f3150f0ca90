"""Gets the KV of a request here: by its prefill worker, out of a lower tier, from another sample, or computed here in
chunks, until it can decode. Pure.

From then on others may share its blocks, and those that waited for them begin
(`decode_worker.scheduler.samples.forks`). Until a load has ended its blocks are written by the tier thread: they are
RESERVED, and a request that has ended keeps them until then. What could not be loaded is had as if there were no tier.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.events import Freed, FromSource, Result, Tell, Unloaded
from decode_worker.scheduler.handoffs import MAX_ATTEMPTS, HandoffResult, Handoffs, KVReceived, Unserved
from decode_worker.scheduler.request import NO_PREFILL, NOBODY, Request, RequestState
from decode_worker.scheduler.samples.forks import Forks
from decode_worker.scheduler.swapping import Swapping
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import Loaded
from engine.kv.tiers.resuming import resuming
from engine.kv.tiers.tiers import Tiers
from engine.messages import NeedPrefill, PeerAddress
from worker.config import DecodeConfig

BY_HANDOFF = frozenset({RequestState.CONNECTING, RequestState.HANDOFF, RequestState.FENCING})


@dataclass(frozen=True, slots=True)
class _Load:
    """So many blocks are loaded for a request, which then has the first `have_blocks` of its sequence."""

    request: Request
    blocks: int
    have_blocks: int


@dataclass(eq=False, repr=False)
class Prefills:
    """Mutable state: `_loads` (by number), and what `handoffs` and `forks` own; who
    is ready, or is computed here, joins the batch. Owner: the scheduler."""

    name: str
    """This worker's incarnation."""
    config: DecodeConfig
    kv: KVCacheManager
    handoffs: Handoffs
    forks: Forks
    batch: Batch
    swapping: Swapping
    _loads: dict[int, _Load] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of requests whose KV is being fetched."""
        return len(self.handoffs) + len(self._loads)

    def is_busy(self, *, here: bool) -> bool:
        """Return True when no further handoff or load may begin, or no further prompt that is to be computed `here`:
        whoever waits at the router can still go elsewhere."""
        return len(self) + (len(self.batch.local) if here else 0) >= self.config.max_handoffs

    @property
    def s_per_spared_token(self) -> dict[str, float]:
        """What `Load.s_per_spared_token` says."""
        costs = self.swapping.costs
        ways = (("here", True), ("pool", False))
        return {} if self.kv.tiers is None else {way: 1 / costs.tokens_per_s(here) for way, here in ways}

    def is_landing(self, now: float) -> bool:
        """Return True if KV of some request that is to have a row is about to be here."""
        loading = (one.request for one in self._loads.values() if one.request.state is RequestState.LOADING)
        coming = [*self.handoffs.filling(), *loading]
        return any(self.batch.hold.is_about_to_land(now - r.prefill.since) for r in coming)

    # begun

    def start(self, request: Request, now: float) -> list[Result]:
        """Load the next blocks of a new request from a tier, or have all that is missing filled in."""
        if self.load(request, here=not request.prefill.worker.name):
            return []
        return self.begin(request, now)

    def begin(self, request: Request, now: float) -> list[Result]:
        """Have the prompt filled in, by its prefill worker or here."""
        prefill = request.prefill
        if not prefill.worker.name:
            self.compute_prompt(request)
            return []
        prefill.asked = now
        prefill.asked_tokens = len(request.tokens) - request.have_blocks * self.kv.block_size
        return self._settle(self.handoffs.begin(request, now), now)

    def wait(self, request: Request, parent: Request) -> None:
        """Let a new sample begin as soon as the prompt of `parent` is here, which may be now."""
        self.forks.wait(request, parent)
        if parent.state in (RequestState.READY, RequestState.RUNNING):
            self.share(parent)

    def load(self, request: Request, *, here: bool) -> bool:
        """Load the whole blocks after the cached ones, where a tier returns them sooner than computing them, `here` or
        not, would take. Blocks that were copied for the request are always loaded. Return False where nothing is
        loaded."""
        tiers, lease, size = self.kv.tiers, request.lease, self.kv.block_size
        if tiers is None:
            return False
        if self.kv.groups:
            return self._load_all(request, tiers, here=here)
        limit, nodes = request.match_limit, lease.path
        parent = nodes[-1].identity if nodes else self.kv.cache.root_identity(lease.namespace)
        found = tiers.find(parent, request.tokens, len(nodes) * size, limit, size)
        if request.stash is None:
            found = found[: tiers.worthwhile(found, size, self.swapping.costs.tokens_per_s(here))]
        if not found:
            return False
        assert request.have_blocks == len(nodes)
        targets = lease.blocks[len(nodes) : len(nodes) + len(found)]
        number = tiers.load(tiers.pin(found), found, targets)
        self._loads[number] = _Load(request, len(found), len(nodes) + len(found))
        request.move(RequestState.LOADING)
        return True

    def _load_all(self, request: Request, tiers: Tiers, *, here: bool) -> bool:
        """Do the same where layers are kept in groups: all that going on from somewhere takes, or nothing."""
        kv, lease, limit = self.kv, request.lease, request.match_limit
        found = resuming(kv.cache, tiers, kv.groups, lease.namespace, request.tokens, limit)
        if found is None:
            return False
        speed = self.swapping.costs.tokens_per_s(here)
        if request.stash is None and not tiers.is_worthwhile(
            found.identities, found.saved_blocks, kv.block_size, speed
        ):
            return False
        places = tiers.pin(found.identities)  # what is evicted to make room must not push them out
        other = kv.exchange(lease, request.tokens, limit, found.match)
        request.lease = other
        if other.cached_tokens != found.blocks * kv.block_size:
            tiers.unpin(places, found.identities)
            request.have_blocks = other.cached_tokens // kv.block_size  # one like the old may have another match
            return False
        number = tiers.load(places, found.identities, found.targets(other))
        self._loads[number] = _Load(request, len(found.wanted), found.blocks)
        request.move(RequestState.LOADING)
        return True

    def compute_prompt(self, request: Request) -> None:
        """Compute what is missing here: no prefill worker will do."""
        if request.prefill.worker.name and not request.arrived:
            self.handoffs.note("fallback", request)
        known = len(request.tokens) - 1 if request.arrived else request.have_blocks * self.kv.block_size
        # What has landed is computed again where its log probabilities were to come with the first token.
        known = min(known, request.match_limit)
        if self.kv.groups and (not request.arrived or known < len(request.tokens) - 1):
            # What has landed behind the match has none of the windows that computing on would see.
            known = min(known, request.lease.cached_tokens)
        if request.output_tokens == 0:
            request.origin.prefill_cached_tokens = known
            self.batch.hit_tokens += min(known, request.origin.decode_cached_tokens)
        request.prefill.worker = NO_PREFILL
        self.compute_rest(request, known)

    def compute_rest(self, request: Request, known: int) -> None:
        """Compute all but `known` tokens, whose KV is here, in chunks beside the running batch."""
        self.kv.landed(request.lease)
        self.kv.restart(request.lease, known)
        request.known, request.arrived = known, True
        self.kv.commit(request.lease, request.tokens[:known])
        self.batch.add_local(request)

    # here

    def ready(self, request: Request, now: float) -> None:
        """Let a request decode whose blocks and first token are both here; others may share its prompt's blocks."""
        self.handoffs.done(request)
        # Computed next: the rows of the newest tokens, which for a search is the prompt's last one.
        request.known = min(request.known, len(request.tokens) - 1)
        if request.record.beams is not None:
            self.batch.beams.begin(request)
        self.kv.commit(request.lease, request.tokens[: request.known])
        self.kv.slide(request.lease, request.known)  # until now the windows before what has landed were kept
        if not request.prefill.is_local:
            self.batch.hold.landed(now - request.prefill.since)
        request.close_prefill(now)
        request.clock.enter("decode_queue", now)
        prefill, origin = request.prefill, request.origin
        here = self.name if prefill.is_local else prefill.worker.name
        origin.prefilled_by = origin.prefilled_by or here
        self.swapping.arrived(request, now)
        self.batch.add_ready(request)
        self.share(request)

    def share(self, parent: Request) -> None:
        """Let those that wait for the prompt of `parent` share its blocks, if it is here, and compute the rest."""
        for request, tokens in self.forks.fork(parent):
            # Of what it has, nothing is to land, and all is committed.
            request.known, request.arrived = tokens, True
            self.batch.add_local(request)

    def tick(self, now: float) -> list[Result]:
        """Go on with what was put off to this turn."""
        for parent in self.forks.begin_turn():
            self.share(parent)
        return self._settle(self.handoffs.tick(now), now)

    @property
    def has_put_off(self) -> bool:
        """True where something is to go on in the next turn."""
        return self.forks.has_put_off or self.handoffs.has_put_off

    # events

    def handle(self, event: FromSource, now: float) -> list[Result]:
        """Take in what a worker that is read from, or the transfer thread, says; first tokens are the scheduler's."""
        return self._settle(self.handoffs.handle(event, now), now)

    def loaded(self, event: Loaded, now: float) -> list[Result]:
        """Have the rest filled in when a load has ended. To be called after `Tiers.handle`."""
        load = self._loads.pop(event.number)
        request, size, is_whole = load.request, self.kv.block_size, event.blocks == load.blocks
        if request.state is RequestState.ENDING:
            return [Freed(request)]
        if self.kv.groups and not is_whole:
            # A part of it is of no use, and what its lease shares goes beyond what can be computed on from.
            if request.preempted is not None:
                self.swapping.loaded(event.blocks, event.host_s + event.disk_s, is_whole)
                request.preempted.way = "pool" if request.prefill.worker.name else "here"
            return [Unloaded(request)]
        request.have_blocks = load.have_blocks - (load.blocks - event.blocks)
        have_tokens = request.have_blocks * size
        if request.preempted is None:
            request.origin.decode_cached_tokens = min(have_tokens, request.record.prompt_tokens)
            return self.begin(request, now)
        self.swapping.loaded(event.blocks, event.host_s + event.disk_s, is_whole)
        # What is less than a block was never copied: to ask the prefill pool for it would compute all of it there.
        few = max(self.config.local_chunk_tokens, size)
        here = not request.prefill.worker.name or len(request.tokens) - have_tokens <= few
        if not is_whole:
            request.preempted.way = "here" if here else "pool"
        if not here:
            return self.begin(request, now)
        self.compute_rest(request, have_tokens)
        return []

    def use_worker(self, request: Request, worker: PeerAddress | None, now: float) -> list[Result]:
        """Go on with the worker that the router names, or here, if the request still waits for its answer."""
        if request.state is not RequestState.ASKING:
            return []
        if worker is None or request.arrived or request.prefill.tries >= MAX_ATTEMPTS:
            self.compute_prompt(request)
            return []
        request.prefill.worker = worker
        return self._settle(self.handoffs.begin(request, now), now)

    def _settle(self, results: Iterable[HandoffResult], now: float) -> list[Result]:
        """Act on what a handoff brought, or did not; everything else goes to the scheduler."""
        rest: list[Result] = []
        for result in results:
            match result:
                case KVReceived(request):
                    if request.prefill.first is not None:
                        self.ready(request, now)
                case Unserved(request) if request.link == NOBODY:
                    self.compute_prompt(request)
                case Unserved(request):
                    # What has landed is kept.
                    request.move(RequestState.ASKING)
                    name, worker = request.record.request, request.prefill.worker.name
                    asked = NeedPrefill(name, request.placement, worker, request.prefill.was_full)
                    rest.append(Tell(request.link, asked))
                case _:
                    rest.append(result)
        return rest

    # ended

    def end(self, request: Request, keep: bool, now: float) -> list[Result]:
        """Stop what is under way for a request that has ended. `Freed` follows when nothing of ours writes to its
        blocks any more. `keep`: it has ended well, and its prompt is worth caching."""
        state, prefill, results = request.state, request.prefill, list[Result]()
        if state is RequestState.LOADING:
            pass  # 1. It is loaded: when the load has ended.
        elif state in BY_HANDOFF and not request.arrived:
            # 2. Its handoff goes well, and the first token was the last: when its blocks have landed.
            # 3. It is in another handoff: when that is fenced.
            is_well = keep and state is RequestState.HANDOFF and prefill.first is not None
            results = [] if is_well else self.abandon(request, now)
        else:
            # 4. Nobody writes to its blocks: at once.
            self.forks.leave(request)
            results = [Freed(request)]
        request.move(RequestState.ENDING)
        return results

    def abandon(self, request: Request, now: float) -> list[Result]:
        """Give its handoff up; `Freed` follows, at once or when the last copy of ours has ended."""
        return self._settle(self.handoffs.abandon(request, now), now)

    def check(self, requests: Iterable[Request]) -> None:
        """Recompute the invariants: `requests` are all that there are."""
        forking = {r for r in requests if r.state is RequestState.FORKING}
        loading = {r for r in requests if r.state is RequestState.LOADING}
        self.handoffs.check()
        self.forks.check(forking)
        loaded = [one.request for one in self._loads.values()]
        assert len(loaded) == len(set(loaded))
        assert loading == {r for r in loaded if r.state is not RequestState.ENDING}
        for one in self._loads.values():
            assert not one.request.lease.released
            assert len(one.request.lease.blocks) >= one.have_blocks

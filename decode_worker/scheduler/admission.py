"""Decides which requests a decode worker takes, with how much room, and what they begin with. Pure.

A request is taken with blocks for its tokens and the promise of room for `growth_tokens` more, or as the fork of one
that is here; otherwise the answer is no, at once, and the router keeps it. What it needs beyond is found as it grows:
where the pool is exhausted, somebody is preempted (`decode_worker.scheduler.preemption`). With preemption off, the
promise covers `max_tokens`, and only a search's further hypotheses are ever in want.
"""

from dataclasses import dataclass, field

from decode_worker.scheduler.events import Result, Tell
from decode_worker.scheduler.handoffs import MAX_ATTEMPTS
from decode_worker.scheduler.leaving.orphans import ResumeIndex
from decode_worker.scheduler.prefills import Prefills
from decode_worker.scheduler.request import Ownership, PrefillProgress, Request, RequestState
from decode_worker.scheduler.samples.forks import shared_tokens
from engine.kv.manager import KVCacheManager, Lease
from engine.messages import Accepted, Ended, Fault, Place, Refused, RequestStats
from engine.plan import CompiledConstraint, StageClock, refusal
from engine.types import FinishReason, Incarnation, RequestId, RequestRecord
from worker.config import DecodeConfig


@dataclass(eq=False, repr=False)
class Admission:
    """Mutable state: `requests`, the same `by_key`, and `accepted`; who is taken begins in `prefills`. Owner: the
    scheduler."""

    name: str
    """This worker's incarnation."""
    config: DecodeConfig
    kv: KVCacheManager
    vocab: int
    context_tokens: int
    prefills: Prefills
    compiled: CompiledConstraint | None = None
    adapters: frozenset[str] = frozenset()
    requests: dict[RequestId, Request] = field(default_factory=dict)
    """Requests that were taken, until they end or depart."""
    by_key: ResumeIndex[Request] = field(default_factory=ResumeIndex)
    """Those of them whose clients may come back."""
    accepted: int = 0
    """The number of requests taken."""

    def current(self, name: RequestId, placement: int) -> Request | None:
        request = self.requests.get(name)
        return None if request is None or request.placement != placement else request

    def forget(self, request: Request) -> None:
        """Forget a request that ends, or departs."""
        del self.requests[request.record.request]
        self.by_key.drop(request.record)

    def take_back(self, request: Request) -> None:
        """Hold a departed request again."""
        self._hold(request)

    def _hold(self, request: Request) -> None:
        self.requests[request.record.request] = request
        self.by_key.add(request.record, request)

    @property
    def growth_tokens(self) -> int:
        """Room that a request is given beside that for its tokens."""
        if self.config.preemption == "off":
            return self.context_tokens
        # A lost handoff may have named a token, which the next one's prompt includes: its room must be there.
        return max(self.config.growth_tokens, MAX_ATTEMPTS)

    def refusal(self, record: RequestRecord) -> Fault | None:
        """Return why `record` could never be taken, if so."""
        fault = refusal(record, self.vocab, self.context_tokens, self.compiled, self.adapters)
        if fault is not None:
            return fault
        if self._most_blocks(record) > self.kv.pool.total:
            why = "prompt and answer do not fit the decode worker's pool"
            return Fault("OUT_OF_RANGE", why, "max_tokens")
        if record.beams is not None and record.beams.width > self.config.max_batch:
            why = f"a decode worker's step has {self.config.max_batch} rows"
            return Fault("INVALID_ARGUMENT", why, "beam_width")
        return None

    def _most_blocks(self, record: RequestRecord) -> int:
        """Return all that it may hold at one time; hypotheses hold the prompt's whole blocks once, the rest each."""
        total = self.kv.pool_blocks_for(record.prompt_tokens + record.max_tokens)
        if record.beams is None:
            return total
        shared = (record.prompt_tokens - 1) // self.kv.block_size
        # One that forks holds, of each layer group with a window, the block that it copies.
        copied = (record.beams.width - 1) * len(self.kv.groups[1:])
        return shared + record.beams.width * (total - shared) + copied

    def room_tokens(self, record: RequestRecord, tokens: int) -> int:
        """Return for how many tokens a request that has `tokens` is given room."""
        return min(record.prompt_tokens + record.max_tokens, tokens + self.growth_tokens)

    def blocks(self, record: RequestRecord) -> int:
        """Return the same in blocks, for a new request."""
        return self.kv.pool_blocks_for(self.room_tokens(record, len(record.tokens)))

    def acquire(
        self,
        record: RequestRecord,
        tokens: list[int],
        *,
        migrating: bool = True,
        spare: int = 0,
        match_limit: int | None = None,
    ) -> Lease | None:
        """Return a lease for `tokens`, prompt and output so far, that leaves others `spare` blocks, if there is one. At
        most `match_limit` of them are taken from the cache; None: all but the last."""
        limit = len(tokens) - 1
        return self.kv.acquire(
            record.space,
            tokens,
            match_limit=limit if match_limit is None else match_limit,
            room_tokens=len(tokens),
            grow_tokens=self.room_tokens(record, len(tokens)),
            migrating=migrating,
            spare=spare,
        )

    def promise(self, record: RequestRecord, tokens: int, spare: int = 0) -> Lease | None:
        """The same for a request that is to share the prompt of another sample: room for what is its own."""
        return self.prefills.forks.promise(record, self.room_tokens(record, tokens), spare)

    def place(self, link: int, message: Place, router: Incarnation, barred: bool, now: float) -> list[Result]:
        """Take the request that `router` offers on stream `link`, or say no. `barred`: others come first."""
        record, name = message.record, message.record.request
        fault = self.refusal(record)
        if fault is not None:
            stats, why = RequestStats(decode_worker=self.name), FinishReason.REJECTED
            return [Tell(link, Ended(request=name, placement=message.placement, reason=why, stats=stats, fault=fault))]
        self.kv.entitle(record.namespace, record.cache_share)
        parent = self._parent(message)
        lease = None if barred else self._lease(record, parent, here=not message.prefill.name)
        if lease is None:
            cached_tokens = self.kv.matched_tokens(record.space, record.tokens, len(record.tokens) - 1)
            return [Tell(link, Refused(name, message.placement, self.blocks(record), cached_tokens))]
        request = self._take(link, message, router, lease, now)
        cached_tokens = lease.cached_tokens if parent is None else shared_tokens(record)
        request.origin.decode_cached_tokens = min(cached_tokens, record.prompt_tokens)
        accepted = Tell(link, Accepted(name, message.placement, cached_tokens))
        if parent is None:
            return [accepted, *self.prefills.start(request, now)]
        self.prefills.wait(request, parent)
        return [accepted]

    def _parent(self, message: Place) -> Request | None:
        other = None if message.fork_of is None else self.requests.get(message.fork_of)
        if other is None or other.state is RequestState.PREEMPTED or message.record.prompt_logprobs is not None:
            return None
        return self.prefills.forks.parent(message.record, other)

    def _lease(self, record: RequestRecord, parent: Request | None, *, here: bool) -> Lease | None:
        if parent is not None:
            return self.promise(record, len(record.tokens))
        limit = None if record.prompt_logprobs is None else 0
        return None if self.prefills.is_busy(here=here) else self.acquire(record, record.tokens, match_limit=limit)

    def _take(self, link: int, message: Place, router: Incarnation, lease: Lease, now: float) -> Request:
        record, group = message.record, message.record.group
        self.accepted += 1
        older = [r.age[0] for r in self.requests.values() if group and r.record.group == group]
        request = Request(
            link=link,
            record=record,
            placement=message.placement,
            tokens=list(record.tokens),
            lease=lease,
            clock=StageClock("prefill", now),
            accepted=now,
            deadline=float("inf") if record.remaining_s is None else now + record.remaining_s,
            have_blocks=lease.cached_tokens // self.kv.block_size,
            age=(min(older, default=self.accepted), self.accepted),
            owner=Ownership(router, message.losses),
            prefill=PrefillProgress(message.prefill, now),
        )
        self._hold(request)
        return request

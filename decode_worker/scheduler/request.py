"""One request as its decode worker knows it: what it is, where it stands, and what it has cost so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from engine.kv.manager import Lease
from engine.kv.tiers.stashes import Stash
from engine.messages import FirstToken, Handoff, PeerAddress, RequestStats
from engine.packed_logprobs import PackedLogprobs
from engine.plan import StageClock
from engine.types import Incarnation, RequestRecord, TokenLogprobs

NO_PREFILL = PeerAddress("", "")
"""Stands for a prefill worker where this worker prefills by itself."""
NOBODY = 0
"""The `link` of an orphan; streams are numbered from 1."""
NO_ROUTER = Incarnation(0)
"""A router that has not said who it is."""


class RequestState(StrEnum):
    NEW = "new"
    """Taken; how its KV gets here is decided in the same event."""
    FORKING = "forking"
    """Waits for the prompt of another sample."""
    CONNECTING = "connecting"
    """Waits until its prefill worker can be read from."""
    HANDOFF = "handoff"
    """A prefill worker fills its blocks."""
    FENCING = "fencing"
    """An attempt failed; copies of ours may still be under way."""
    ASKING = "asking"
    """The router is asked for another prefill worker."""
    LOADING = "loading"
    """Its next blocks come out of a lower tier."""
    LOCAL = "local"
    """Prefilled here, in chunks."""
    READY = "ready"
    """All KV but the newest token's is here; it waits for a row."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Its blocks were taken for others; it waits for room."""
    DEPARTED = "departed"
    """Yielded: it goes on elsewhere, from the KV that is kept here."""
    ENDING = "ending"
    """Its router was told of the end; it is gone when nothing of ours writes to its blocks."""


_S = RequestState
_FETCH = frozenset({_S.CONNECTING, _S.HANDOFF, _S.LOCAL})
"""States that follow when a request begins to get its KV."""
MOVES: dict[RequestState, frozenset[RequestState]] = {
    _S.NEW: _FETCH | {_S.FORKING, _S.LOADING},
    _S.FORKING: _FETCH | {_S.PREEMPTED, _S.ENDING},
    _S.CONNECTING: frozenset({_S.HANDOFF, _S.ASKING, _S.LOCAL, _S.ENDING}),
    _S.HANDOFF: frozenset({_S.READY, _S.FENCING, _S.ASKING, _S.LOCAL, _S.ENDING}),
    _S.FENCING: _FETCH | {_S.ASKING, _S.ENDING},
    _S.ASKING: _FETCH | {_S.ENDING},
    _S.LOADING: _FETCH | {_S.PREEMPTED, _S.ENDING},
    _S.LOCAL: frozenset({_S.READY, _S.PREEMPTED, _S.ENDING}),
    _S.READY: frozenset({_S.RUNNING, _S.PREEMPTED, _S.ENDING}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.DEPARTED, _S.ENDING}),
    _S.PREEMPTED: _FETCH | {_S.FORKING, _S.LOADING, _S.ENDING},
    _S.DEPARTED: frozenset({_S.READY}),
    _S.ENDING: frozenset(),
}
FETCHING = frozenset({_S.CONNECTING, _S.HANDOFF, _S.FENCING, _S.ASKING, _S.LOADING})
"""States in which the KV is being fetched, from a worker or a tier."""


@dataclass(slots=True)
class Ownership:
    """The router that a request belongs to: changed by `decode_worker.scheduler.leaving.orphans` only."""

    router: Incarnation
    losses: int
    """Decode workers that were lost under it, as its router says."""
    handovers: int = 0
    """Routers that it was given to because the one before was lost."""
    is_handed: bool = False
    """Its router has it from another one."""
    orphan_until: float = float("inf")
    """Finite while it has no router."""


@dataclass(slots=True)
class PrefillProgress:
    """One fetch of a request's KV; replaced after each preemption."""

    worker: PeerAddress
    """The worker that prefills it; `NO_PREFILL`: this worker."""
    since: float
    attempt: int = 0
    """Counts the handoffs of one placement."""
    first_attempt: int = 0
    asked: float = 0.0
    """The time at which a prefill worker was first asked."""
    asked_tokens: int = 0
    """Tokens missing at that time."""
    handoff: Handoff | None = None
    handoff_tokens: int = 0
    """Tokens that the request had when it began: those whose KV comes by it."""
    sender_block_size: int = 0
    """Tokens in a block of the prefill worker that serves `handoff`."""
    first: FirstToken | None = None
    elsewhere: bool = False
    """The next attempt is to be with another prefill worker."""
    was_full: bool = False
    """The latest attempt failed since that worker had no room in its line."""
    abandoned: bool = False
    is_local: bool = False
    """It is, or was, computed here."""
    local_since: float | None = None
    """When a step first computed some of it."""
    local_from: int = 0
    """Tokens that were known then."""

    @property
    def tries(self) -> int:
        """Handoffs that were tried for the present tokens, and have failed."""
        return self.attempt - self.first_attempt

    def again(self, now: float) -> "PrefillProgress":
        """Return a new one: what it had is gone."""
        return PrefillProgress(self.worker, now, self.attempt + 1, self.attempt + 1)


@dataclass(slots=True)
class Preempted:
    """A request from its preemption until all of its KV is here again."""

    since: float
    way: str = ""
    """The way in which it comes back: see `decode_worker.scheduler.swapping`."""
    lost_tokens: int = 0
    stash: Stash | None = None
    """The copies of its blocks, where it was swapped, until it comes back."""


@dataclass(slots=True)
class KVOrigin:
    """The sources of the KV of its prompt, and what they cost: for the final account."""

    decode_cached_tokens: int = 0
    prefill_cached_tokens: int = 0
    migrated_blocks: int = 0
    block_bytes: int = 0
    """Bytes that travel of one block; 0: all of it."""
    migration_s: float = 0.0
    transport: str = ""
    prefilled_by: str = ""
    """The worker that has prefilled the prompt, once its KV is here."""


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Mutable; owned by the scheduler. `tokens` is the prompt with everything emitted so far."""

    link: int
    """Its router's stream, or `NOBODY`."""
    record: RequestRecord
    placement: int
    tokens: list[int]
    lease: Lease
    clock: StageClock
    accepted: float
    deadline: float
    have_blocks: int
    """Leading blocks whose content is here: cached, or landed and verified."""
    age: tuple[int, int]
    """The number of the first request of its group here, and its own, in the order of their acceptance."""
    owner: Ownership
    prefill: PrefillProgress
    origin: KVOrigin = field(default_factory=KVOrigin)
    state: RequestState = RequestState.NEW
    arrived: bool = False
    """Every block of `tokens` (but the newest one's) is here, or is computed here."""
    known: int = 0
    """Tokens whose KV is in the blocks, once `arrived`."""
    preempted: Preempted | None = None
    told_s: float | None = None
    """When its latest tokens were sent on from here."""
    yielding: bool = False
    """The router wants to place it elsewhere, as soon as all of its KV is here."""
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    """Those of its output so far, where they are asked for and another router may have to be told."""

    scores: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of its prompt's tokens from the second on, as far as they are computed here."""

    @property
    def match_limit(self) -> int:
        """How many of its tokens may be had without being computed: of a prompt whose log probabilities are still to be
        told, those that are known already."""
        limit = len(self.tokens) - 1
        return limit if self.record.prompt_logprobs is None else min(limit, len(self.scores))

    def take_scores(self) -> list[TokenLogprobs]:
        """Return the log probabilities of its prompt, which are told once: they are wanted no more."""
        scores, self.scores = self.scores, []
        self.record = msgspec.structs.replace(self.record, prompt_logprobs=None)
        return scores

    def __post_init__(self) -> None:
        if self.record.emitted_logprobs:
            self.logprobs.extend(self.record.emitted_logprobs)
            self.record = msgspec.structs.replace(self.record, emitted_logprobs=())

    def keep(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Keep the log probabilities of the newest tokens for a router that may come."""
        if self.record.context:
            self.logprobs.extend(tokens)

    def __repr__(self) -> str:
        """Leave the tokens out: logs show this."""
        name, count = self.record.request, len(self.tokens)
        return f"Request({name}/{self.placement}.{self.prefill.attempt} {self.state}, {count} tokens)"

    def move(self, state: RequestState) -> None:
        """Raise AssertionError for a move that the table does not have."""
        if state not in MOVES[self.state]:
            raise AssertionError(f"{self!r} -> {state}")
        self.state = state

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.record.prompt_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.record.prompt_tokens :]

    @property
    def stash(self) -> Stash | None:
        return None if self.preempted is None else self.preempted.stash

    @property
    def is_recovering(self) -> bool:
        """True where it computes what was computed before: it came with output, or its prefill worker failed it."""
        return len(self.record.tokens) > self.record.prompt_tokens or self.prefill.tries > 0

    def close_prefill(self, now: float) -> None:
        """Attribute the wait for the first token to its stages."""
        prefill, first = self.prefill, self.prefill.first
        queue_s, run_s = (0.0, 0.0) if first is None else (first.queue_s, first.run_s)
        if prefill.is_local:
            began = now if prefill.local_since is None else prefill.local_since
            queue_s, run_s = began - prefill.since, now - began
        self.clock.split(queue_s, run_s, now)

    def stats(self, now: float, decode_worker: str, block_bytes: int, kept: int | None) -> RequestStats:
        """Return what it has cost. `kept`: output tokens that count, where the router cut the answer short."""
        if self.clock.stage == "prefill":
            self.close_prefill(now)
        self.clock.enter("over", now)
        here, origin = self.prefill.is_local, self.origin
        prefill_worker = decode_worker if here else self.prefill.worker.name
        return RequestStats(
            stages={name: s for name, s in self.clock.seconds.items() if name != "prefill"},
            prompt_tokens=self.record.prompt_tokens,
            output_tokens=self.output_tokens if kept is None else kept,
            prefill_cached_tokens=origin.prefill_cached_tokens,
            decode_cached_tokens=origin.decode_cached_tokens,
            migrated_blocks=origin.migrated_blocks,
            migrated_bytes=origin.migrated_blocks * (origin.block_bytes or block_bytes),
            migration_s=origin.migration_s,
            transport=origin.transport,
            prefill_worker=origin.prefilled_by or prefill_worker,
            decode_worker=decode_worker,
        )

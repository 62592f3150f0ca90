"""One request as its decode worker knows it: what it is, where it stands, and what it has cost so far."""

from dataclasses import dataclass
from enum import StrEnum

from engine.kv.manager import Lease
from engine.kv.stashes import Stash
from engine.messages import FirstToken, Handoff, PeerAddress, RequestStats
from engine.plan import StageClock
from engine.types import Incarnation, RequestRecord

NO_PREFILL = PeerAddress("", "")
"""In the place of a prefill worker: this worker prefills by itself."""
NO_ROUTER = Incarnation(0)
"""One that has not said who it is."""


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
"""What beginning to have KV leads to: by a prefill worker that is to be reached, or is; or computed here."""
MOVES: dict[RequestState, frozenset[RequestState]] = {
    _S.NEW: _FETCH | {_S.FORKING, _S.LOADING},
    _S.FORKING: _FETCH | {_S.PREEMPTED, _S.ENDING},
    _S.CONNECTING: frozenset({_S.HANDOFF, _S.ASKING, _S.LOCAL, _S.ENDING}),
    _S.HANDOFF: frozenset({_S.READY, _S.FENCING, _S.ASKING, _S.LOCAL, _S.ENDING}),
    _S.FENCING: _FETCH | {_S.ASKING, _S.ENDING},
    _S.ASKING: _FETCH | {_S.ENDING},
    _S.LOADING: _FETCH | {_S.ENDING},
    _S.LOCAL: frozenset({_S.READY, _S.PREEMPTED, _S.ENDING}),
    _S.READY: frozenset({_S.RUNNING, _S.PREEMPTED, _S.DEPARTED, _S.ENDING}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.DEPARTED, _S.ENDING}),
    _S.PREEMPTED: _FETCH | {_S.FORKING, _S.LOADING, _S.ENDING},
    _S.DEPARTED: frozenset({_S.READY}),
    _S.ENDING: frozenset(),
}
FETCHING = frozenset({_S.CONNECTING, _S.HANDOFF, _S.FENCING, _S.ASKING, _S.LOADING})
"""A prefill worker has the request's prompt, or is looked for; or a tier has it."""


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Mutable; owned by the scheduler. `tokens` is the prompt with everything emitted so far."""

    link: int
    record: RequestRecord
    placement: int
    prefill: PeerAddress
    tokens: list[int]
    lease: Lease
    clock: StageClock
    accepted: float
    deadline: float
    have_blocks: int
    """Leading blocks whose content is here: cached, or landed and verified."""
    number: int
    """Counts the requests that this worker has accepted."""
    era: int
    """The `number` of the first request of its group here; its own, where it has none."""
    sought: float
    """Since when its KV is being fetched or computed."""
    state: RequestState = RequestState.NEW
    attempt: int = 0
    first_attempt: int = 0
    """Of those that the present tokens have had; more than one where it was preempted."""
    handoff: Handoff | None = None
    sender_block_size: int = 0
    """Tokens in a block of the prefill worker that serves `handoff`."""
    first: FirstToken | None = None
    arrived: bool = False
    """Every block of `tokens` (but the newest one's) is here."""
    elsewhere: bool = False
    abandoned: bool = False
    yielding: bool = False
    """The router wants to place it elsewhere, as soon as all of its KV is here."""
    known: int = 0
    """Tokens whose KV is in the blocks, once `arrived`, or so far when prefilled here."""
    losses: int = 0
    router: Incarnation = NO_ROUTER
    handovers: int = 0
    orphan_until: float = float("inf")
    """Finite while it has no router: see `decode_worker.scheduler.orphans`."""
    asked: float = 0.0
    """Since when a prefill worker has been asked for its present tokens, whichever answers in the end."""
    asked_tokens: int = 0
    """How many were missing then."""
    local_since: float | None = None
    local_from: int = 0
    """Tokens that were known when it began to be computed here."""
    prefilled_by: str = ""
    """Who has prefilled its prompt, once that is here."""
    preempted_at: float | None = None
    way: str = ""
    lost_tokens: int = 0
    stash: Stash | None = None
    """Of its blocks, while it is preempted and was swapped."""
    decode_cached_tokens: int = 0
    prefill_cached_tokens: int = 0
    migrated_blocks: int = 0
    block_bytes: int = 0
    """What travels of one; 0: all of it."""
    migration_s: float = 0.0
    transport: str = ""

    def __repr__(self) -> str:
        """Without its tokens: it is shown in logs."""
        name, count = self.record.request, len(self.tokens)
        return f"Request({name}/{self.placement}.{self.attempt} {self.state}, {count} tokens)"

    def move(self, state: RequestState) -> None:
        """Raises AssertionError for a move that the table does not have."""
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
    def is_recovering(self) -> bool:
        """What it computes was computed before, or begun: it came with output, or its prefill worker failed it."""
        return len(self.record.tokens) > self.record.prompt_tokens or (
            self.local_since is not None and self.tries > 0
        )

    @property
    def tries(self) -> int:
        """Handoffs that were tried for its present tokens, and have failed."""
        return self.attempt - self.first_attempt

    def seek(self, lease: Lease, way: str, now: float) -> None:
        """It was preempted, and begins to get its KV back, into `lease`."""
        self.lease, self.way = lease, way
        self.lost_tokens = len(self.tokens) - 1 - lease.cached_tokens
        self.clock.enter("prefill", now)
        self.sought, self.local_since = now, None
        self.attempt += 1
        self.first_attempt = self.attempt

    def close_prefill(self, now: float) -> None:
        """The wait for the first token is over, or given up: say where it went."""
        if self.local_since is not None:
            self.clock.split(self.local_since - self.sought, now - self.local_since, now)
        elif self.first is not None:
            self.clock.split(self.first.queue_s, self.first.run_s, now)
        else:
            self.clock.split(0.0, 0.0, now)

    def stats(
        self, now: float, decode_worker: str, block_bytes: int, kept: int | None
    ) -> RequestStats:
        """Close the books. `kept`: output tokens that count, where the router cut the answer short."""
        if self.clock.stage == "prefill":
            self.close_prefill(now)
        self.clock.enter("over", now)
        here = decode_worker if self.local_since is not None else self.prefill.name
        return RequestStats(
            stages={name: s for name, s in self.clock.seconds.items() if name != "prefill"},
            prompt_tokens=self.record.prompt_tokens,
            output_tokens=self.output_tokens if kept is None else kept,
            prefill_cached_tokens=self.prefill_cached_tokens,
            decode_cached_tokens=self.decode_cached_tokens,
            migrated_blocks=self.migrated_blocks,
            migrated_bytes=self.migrated_blocks * (self.block_bytes or block_bytes),
            migration_s=self.migration_s,
            transport=self.transport,
            prefill_worker=self.prefilled_by or here,
            decode_worker=decode_worker,
        )


@dataclass(slots=True)
class Migrated:
    """One migration that ended, for the metrics."""

    outcome: str
    peer: str
    transport: str
    seconds: float
    blocks: int
    block_bytes: int
    """What travels of one; 0: all of it."""

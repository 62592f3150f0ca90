"""One request as the router core knows it: where it stands, what its client was given, whom it may blame.

    WAITING ──offer──> OFFERED ──Accepted──> RUNNING ──stop string──> FINISHING
       ^                  │ Refused, or lost  │  │                        │
       ├──────────────────┘                   │  └─ cancel, deadline ─> CLOSING
       └───────────────── lost, or yielded ───┘

A request adopted from an earlier router begins as RUNNING.
A request is forgotten when its worker says `Ended`, or is lost and nothing is left to do. CLOSING means that its client
has been answered and its worker has not yet said that it let go.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from engine import identity
from engine.messages import Load, RequestStats
from engine.packed_logprobs import PackedLogprobs
from engine.types import RequestRecord, TokenLogprobs
from router.core.registry import Life, ModelKey
from router.core.sessions import Pin, Session


class State(Enum):
    WAITING = "waiting"
    OFFERED = "offered"
    RUNNING = "running"
    FINISHING = "finishing"
    CLOSING = "closing"


_MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.OFFERED}),
    State.OFFERED: frozenset({State.WAITING, State.RUNNING, State.CLOSING}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHING, State.CLOSING}),
    State.FINISHING: frozenset({State.CLOSING}),
    State.CLOSING: frozenset(),
}


class Death(msgspec.Struct, frozen=True):
    """A worker that was lost while it held a request. `held_requests`: how many it held or was offered, this one
    included; `emitted_tokens`: what this one's client had by then."""

    at_s: float
    why: str
    held_requests: int
    emitted_tokens: int
    was_accepted: bool = True
    """False where the worker was lost before it had said anything to the offer."""


@dataclass(slots=True)
class Call:
    """`record` is what the next placement sends: prompt, and what was emitted before it. `emitted` is all that the
    client was given. `prefill` is empty where the decode worker prefills by itself."""

    record: RequestRecord
    turn: int
    deadline_s: float | None
    state: State = State.WAITING
    session: Session | None = None
    """The conversation that it goes on with, where its client has named one."""
    pin: Pin | None = None
    """The workers that served this conversation before, as it was last offered."""
    placement: int = 0
    highest: int = 0
    """The highest placement that some worker may know of it, besides `placement`."""
    prefill: str = ""
    decode: str = ""
    prefill_life: Life | None = None
    decode_life: Life | None = None
    key: ModelKey = ("", 1)
    """The model of the decode worker."""
    prefill_key: ModelKey = ("", 1)
    is_prefilled: bool = False
    """True once its present placement has given output: its prefill worker has nothing left to do for it."""
    left_behind: tuple[Load, int] | None = None
    """A prefill worker's report that counts the prompt of a placement which is over, and by how many tokens. It stops
    reading it, which is in nobody's way."""
    believed_prefill_tokens: int = 0
    believed_decode_blocks: int = 0
    predicted_s: tuple[float, float] | None = None
    """What workers' own figures say of its present placement: the time until its prompt is computed, and the time that
    its blocks travel. None where it goes otherwise than it was priced."""
    is_counted: bool = False
    """True once the work that it brings is part of the shares of its beginnings (`router.core.reuse`)."""
    emitted: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    """Those of `emitted`, where they are asked for and another router may have to be told."""
    losses: int = 0
    """Placements that ended because the decode worker that had accepted them was lost."""
    unheard: int = 0
    """Placements whose worker was lost before it said anything to them."""
    victims: dict[Life, Death] = field(default_factory=dict)
    """Workers that were lost while they held this request; one that turns out to live is taken out again."""
    missing: dict[Life, Death] = field(default_factory=dict)
    """Workers that were lost before they had accepted this request, and may live: it was the stream that broke."""
    held_back_until_s: float | None = None
    """While the fate of those decides whether it is offered once more: the time until which it waits for the news."""
    failed_prefills: dict[Life, bool] = field(default_factory=dict)
    """Prefill workers that this request's decode workers could not go on with; not chosen again for it. True: it may be
    what ailed them; False: their line was full, and they never had it."""
    cached_tokens_bound: int | None = None
    """After a loss: prompt tokens that may still be called cached, as all others were computed for this request."""
    yielding: bool = False
    """True once its leaving decode worker was asked to yield it."""
    source: Life | None = None
    """The decode worker that has yielded it, and keeps its KV until the next one has gone on."""
    source_placement: int = 0
    """Its placement there."""
    earlier: RequestStats | None = None
    """Its cost on decode workers that have yielded it."""
    _chains: dict[ModelKey, list[bytes]] = field(default_factory=dict)

    def move(self, state: State) -> None:
        if state not in _MOVES[self.state]:
            raise AssertionError(f"{self.record.request}: {self.state.name} -> {state.name}")
        self.state = state

    @property
    def tokens(self) -> list[int]:
        """The prompt and everything emitted."""
        return self.record.tokens[: self.record.prompt_tokens] + self.emitted.tolist()

    def emit(self, ids: list[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Note what its client is given."""
        self.emitted.extend(ids)
        if logprobs and self.record.context:
            self.logprobs.extend(logprobs)

    def chain(self, key: ModelKey) -> list[bytes]:
        """Identities of the full blocks of the record's tokens, computed once per kind of worker."""
        chain = self._chains.get(key)
        if chain is None:
            root = identity.root(self.record.space, key[0])
            chain = identity.chain(root, self.record.tokens, key[1])
            self._chains[key] = chain
        return chain

    def rewrite(self) -> None:
        """Make what was emitted history of the record: the next placement goes on behind it."""
        # Those of `emitted` are put into each offer, and not kept unpacked here.
        more: dict[str, object] = {"prompt_logprobs": None} if self.emitted else {}  # they came with the first token
        self.record = msgspec.structs.replace(self.record, tokens=self.tokens, **more)
        self._chains.clear()
        bound, believed = self.cached_tokens_bound, self.believed_prefill_tokens
        believed = min(believed, self.record.prompt_tokens)
        self.cached_tokens_bound = believed if bound is None else min(bound, believed)

    def moved(self, stats: RequestStats) -> None:
        """Rewrite the record after a move, and keep the worker's account."""
        self.believed_prefill_tokens = stats.prefill_cached_tokens
        self.rewrite()
        self.earlier = stats

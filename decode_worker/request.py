"""One request as its decode worker knows it: what it is, where it stands, and what it has cost so far."""

from dataclasses import dataclass
from enum import StrEnum

from engine.kv.manager import Lease
from engine.messages import FirstToken, Handoff, PeerAddress, RequestStats
from engine.plan import StageClock
from engine.types import Incarnation, RequestRecord


class State(StrEnum):
    CONNECTING = "connecting"
    HANDOFF = "handoff"
    READY = "ready"
    RUNNING = "running"
    RETRY = "retry"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class Request:
    """Mutable; owned by the scheduler. `tokens` is the prompt with everything emitted so far."""

    link: int
    record: RequestRecord
    placement: int
    prefill: PeerAddress
    tokens: list[int]
    lease: Lease
    clock: StageClock
    deadline: float
    state: State = State.CONNECTING
    attempt: int = 0
    handoff: Handoff | None = None
    first: FirstToken | None = None
    arrived: bool = False
    decode_cached_tokens: int = 0
    prefill_cached_tokens: int = 0
    migrated_blocks: int = 0
    migration_s: float = 0.0
    transport: str = ""

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.record.prompt_tokens

    @property
    def known_tokens(self) -> int:
        """How many tokens have their KV in the lease's blocks, once those have landed: all but the newest one."""
        return len(self.tokens) - (self.first is not None)

    def stats(
        self, now: float, decode_worker: str, block_bytes: int, kept: int | None
    ) -> RequestStats:
        """Close the books. `kept`: output tokens that count, where the router cut the answer short."""
        first = self.first
        if self.clock.stage == "prefill":
            queue_s, run_s = (0.0, 0.0) if first is None else (first.queue_s, first.run_s)
            self.clock.split(queue_s, run_s, now)
        self.clock.enter("over", now)
        return RequestStats(
            stages={name: s for name, s in self.clock.seconds.items() if name != "prefill"},
            prompt_tokens=self.record.prompt_tokens,
            output_tokens=self.output_tokens if kept is None else kept,
            prefill_cached_tokens=self.prefill_cached_tokens,
            decode_cached_tokens=self.decode_cached_tokens,
            migrated_blocks=self.migrated_blocks,
            migrated_bytes=self.migrated_blocks * block_bytes,
            migration_s=self.migration_s,
            transport=self.transport,
            prefill_worker=self.prefill.name,
            decode_worker=decode_worker,
        )


@dataclass(frozen=True, slots=True)
class Peer:
    incarnation: Incarnation
    transport: str
    address: PeerAddress


@dataclass(slots=True)
class Migrated:
    """One migration that ended, for the metrics."""

    outcome: str
    peer: str
    transport: str
    seconds: float
    blocks: int

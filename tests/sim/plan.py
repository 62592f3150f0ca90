"""What a run depends on: the cluster, the requests and the faults. Plain data."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from engine.types import RequestRecord
from router.config import RouterConfig
from tests.sim.faults import Fault
from worker.config import DecodeConfig, PrefillConfig


@dataclass(slots=True)
class Ask:
    """One request of a plan. Times count from the moment the cluster is up."""

    record: RequestRecord
    at_s: float
    deadline_s: float | None = None
    cancel_s: float | None = None
    stop_after: int | None = None


@dataclass(slots=True)
class Going:
    """One worker of a role is asked to leave, with `grace_s`, and replaced `pause_s` after it has."""

    role: str
    at_s: float
    grace_s: float = 10.0
    pause_s: float = 0.02


@dataclass(slots=True)
class Plan:
    """All that a run depends on, besides the seed of its own generator."""

    seed: int
    asks: list[Ask]
    faults: list[Fault] = field(default_factory=list)
    goings: list[Going] = field(default_factory=list)
    workers: dict[str, int] = field(default_factory=lambda: {"prefill": 2, "decode": 2})
    blocks: dict[str, int] = field(default_factory=lambda: {"prefill": 14, "decode": 14})
    large_blocks: int = 0
    """Blocks of the first decode worker, where that has more than the others."""
    giant: str = ""
    """The request, if any, that no other one could hold."""
    block_size: dict[str, int] = field(default_factory=lambda: {"prefill": 4, "decode": 4})
    windows: tuple[int, ...] = ()
    """The windows of the layer groups but the first, in tokens; empty: all layers are in one group."""
    masked: bool = False
    """Whether windows are masks over one group that keeps everything: what layer groups are to be equal to."""
    context_tokens: int = 256
    transport: str = "shm"
    ranks: dict[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    """The ranks of a worker, each with a mover: 1 or 2, the number of heads. Lower tiers are the worker's."""
    slow_copies: float = 0.0
    tier_blocks: int = 0
    """Blocks of host memory below each prefill worker's pool, with a small disk tier; 0: neither."""
    decode_tier_blocks: int = 0
    """Blocks of host memory below each decode worker's pool, with a small disk tier; 0: neither."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    prefill: PrefillConfig = field(default_factory=lambda: PrefillConfig(chunk_tokens=8))
    router: RouterConfig = field(default_factory=RouterConfig)
    strict: bool = True
    """Whether no request may end as UNAVAILABLE while the router lives and some decode worker does."""
    disarm_s: float = 1.5
    escalate_s: float = 5.0
    """How long workers and router wait before they call a silent worker so; a hung one, or a missing one, six times as
    long. Takes the place of what the configs say."""

    stall_s: float = 10.0
    """How long a tcp connection may owe bytes and bring none."""
    ahead: bool = False
    """Whether workers plan a step while one is under way."""
    drafts: bool = False
    """Whether decode workers guess at tokens to come."""
    announced: bool = False
    """Whether the supervisor tells the router which lives there are, as it does in a cluster that has one."""

    def __post_init__(self) -> None:
        transfer = replace(self.prefill.transfer, escalate_s=self.escalate_s)
        self.prefill = replace(self.prefill, transfer=transfer)
        hung_s = 6.0 * self.escalate_s
        self.router = replace(self.router, escalate_s=self.escalate_s, worker_hung_s=hung_s)

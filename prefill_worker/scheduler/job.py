"""One prompt as its prefill worker knows it: what is asked for, and how far it has come."""

from dataclasses import dataclass
from enum import StrEnum

from engine.kv.manager import Lease
from engine.kv.tiers.fetches import Fetch
from engine.messages import Handoff
from engine.types import RequestRecord


class JobState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    SENDING = "sending"


@dataclass(slots=True, eq=False)
class Job:
    """Mutable; owned by the scheduler."""

    handoff: Handoff
    record: RequestRecord
    arrived: float
    deadline: float
    state: JobState = JobState.WAITING
    lease: Lease | None = None
    computed: int = 0
    cached_tokens: int = 0
    started: float | None = None
    quarantined: float | None = None
    """Since when its receiver is lost, but may still read."""
    fetch: Fetch | None = None
    held_until: float | None = None

    @property
    def remaining(self) -> int:
        return len(self.record.tokens) - self.computed

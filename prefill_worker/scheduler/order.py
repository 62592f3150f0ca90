"""The order in which a prefill worker takes its prompts: `matched_tokens + λ · waiting_seconds`, and who may slip in.
Pure.

λ is in tokens per second: how many cached tokens one second of waiting is worth. λ = 0 is longest prefix first, a large
λ first come first served; at the speed of the prefill, a second waited equals a second saved. A prompt that comes more
than context / λ seconds after another can never have the higher priority, nor may it slip in: that is the bound on how
long anybody is overtaken. Source: RadixAttention (Zheng et al. 2024, section 3) for the first term.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from engine.kv.manager import Lease
from engine.kv.radix_cache import Match
from engine.kv.tiers.fetches import Fetch
from engine.messages import Handoff
from engine.plan import MUCH_SHORTER, mean
from engine.types import RequestRecord, TokenLogprobs

FIRST_SPEED = 300.0
"""Tokens per second, until the first step has been measured."""


class JobState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    SENDING = "sending"


@dataclass(slots=True, eq=False)
class Job:
    """One prompt as its prefill worker knows it: what is asked for, and how far it has come. Mutable; owned by the
    scheduler."""

    handoff: Handoff
    record: RequestRecord
    arrived: float
    deadline: float
    state: JobState = JobState.WAITING
    expected: int = 0
    """Tokens that it is expected to have computed for itself, while it waits: neither cached nor another one's."""
    coming: int = 0
    """How many of its first tokens will be there when lower tiers have brought what they are expected to; 0: no more
    than are there already."""
    beginnings: list[int] = field(default_factory=list)
    """What the line knows its prompt's beginnings by, until it is computed."""
    match: Match | None = None
    """What of it was cached when that was last asked, while it waits."""
    lease: Lease | None = None
    computed: int = 0
    cached_tokens: int = 0
    started: float | None = None
    quarantined: float | None = None
    """The time since which its receiver is lost, but may still read."""
    fetch: Fetch | None = None
    scores: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of its prompt's tokens from the second on, as far as it has come."""
    held_until: float | None = None
    """The time at which it is no longer held back for fetches; None as long as it never was."""

    @property
    def remaining(self) -> int:
        return len(self.record.tokens) - self.computed

    @property
    def match_limit(self) -> int:
        """How many of its tokens may be taken from the cache: none of a prompt whose log probabilities are asked for,
        as they are not in it."""
        return len(self.record.tokens) - 1 if self.record.prompt_logprobs is None else 0


class Order:
    """Mutable state: the measured speed."""

    def __init__(self, fairness_tokens_per_s: float | None, context_tokens: int) -> None:
        """`fairness_tokens_per_s` is λ; None takes the measured speed."""
        self._fairness = fairness_tokens_per_s
        self._context_tokens = context_tokens
        self._speed = 0.0

    @property
    def speed(self) -> float:
        """The speed at which prompts are computed, in tokens per second, as measured."""
        return self._speed or FIRST_SPEED

    @property
    def fairness(self) -> float:
        """λ in tokens per second."""
        return self.speed if self._fairness is None else self._fairness

    def ran(self, tokens: int, seconds: float) -> None:
        """Measure a step that has computed `tokens` tokens."""
        if tokens > 0 and seconds > 0:
            self._speed = mean(self._speed, tokens / seconds)

    def priority(self, matched_tokens: int, job: Job, now: float) -> float:
        """Return a job's priority in tokens; the highest goes first."""
        return matched_tokens + self.fairness * (now - job.arrived)

    def is_in_time(self, job: Job, others: Iterable[Job]) -> bool:
        """Say if `job` came early enough to be served before all of `others`."""
        oldest = min((other.arrived for other in others), default=job.arrived)
        return (job.arrived - oldest) * self.fairness <= self._context_tokens

    @staticmethod
    def slips_in(uncached_tokens: int, running: Sequence[int], room_tokens: int) -> bool:
        """Say if a prompt with so many tokens to compute goes beside those that run, of which `running` are left, each
        above 0: it is much shorter than one of them, and fits into `room_tokens` of a step together with those that it
        is not much shorter than, if there are any."""
        beside = [left for left in running if left < MUCH_SHORTER * uncached_tokens]
        return len(beside) < len(running) and (not beside or sum(beside) + uncached_tokens <= room_tokens)

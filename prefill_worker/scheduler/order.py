"""In which order a prefill worker takes its prompts: `matched_tokens + λ · waiting_seconds`, and who may slip in. Pure.

λ is in tokens per second: how many cached tokens one second of waiting is worth. λ = 0 is longest prefix first, a large
λ first come first served; at the speed of the prefill, a second waited equals a second saved. A prompt that comes more
than context / λ seconds after another can never have the higher priority, nor may it slip in: that is the bound on how
long anybody is overtaken. Source: RadixAttention (Zheng et al. 2024, section 3) for the first term.
"""

from collections.abc import Iterable
from typing import Protocol

from engine.plan import mean

FIRST_SPEED = 300.0
"""Tokens per second, until the first step has been measured."""


class Waiter(Protocol):
    """What the order must know of a job."""

    arrived: float

    @property
    def remaining(self) -> int: ...


class Order:
    """Mutable state: the measured speed."""

    def __init__(self, fairness_tokens_per_s: float | None, context_tokens: int) -> None:
        """`fairness_tokens_per_s` is λ; None takes the measured speed."""
        self._fairness = fairness_tokens_per_s
        self._context_tokens = context_tokens
        self._speed = 0.0

    @property
    def speed(self) -> float:
        """Of the prefill, in tokens per second, as measured."""
        return self._speed or FIRST_SPEED

    @property
    def fairness(self) -> float:
        """λ in tokens per second."""
        return self.speed if self._fairness is None else self._fairness

    def ran(self, tokens: int, seconds: float) -> None:
        """A step has computed `tokens` tokens."""
        if tokens > 0 and seconds > 0:
            self._speed = mean(self._speed, tokens / seconds)

    def priority(self, matched_tokens: int, job: Waiter, now: float) -> float:
        """In tokens; the highest goes first."""
        return matched_tokens + self.fairness * (now - job.arrived)

    def is_in_time(self, job: Waiter, others: Iterable[Waiter]) -> bool:
        """Did `job` come early enough to be served before all of `others`?"""
        oldest = min((other.arrived for other in others), default=job.arrived)
        return (job.arrived - oldest) * self.fairness <= self._context_tokens

    @staticmethod
    def is_much_shorter(uncached_tokens: int, first: Waiter, running: Iterable[Waiter]) -> bool:
        """Is a prompt so much shorter than the first in line that it shares its steps? One at a time does."""
        shortest = min(job.remaining for job in running)
        return 2 * uncached_tokens <= first.remaining < 2 * shortest

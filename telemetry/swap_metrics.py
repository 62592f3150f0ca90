"""Counts of preempted requests on a decode worker: how they were to come back, at what price, and what was copied."""

from collections.abc import Mapping
from typing import Protocol

from telemetry.families import Families, Growth
from telemetry.labels import SWAP_CHOICES, SWAP_FALLBACKS

DIRECTIONS = ("out", "in")


class SwapCosts(Protocol):
    """Fulfilled by `decode_worker.scheduler.swapping.KVCosts`."""

    @property
    def predicted(self) -> Mapping[str, float]: ...


class Swaps(Protocol):
    """Totals since the worker started, and prices in seconds. Fulfilled by
    `decode_worker.scheduler.swapping.Swapping`."""

    @property
    def choices(self) -> Mapping[str, int]: ...

    @property
    def fallbacks(self) -> Mapping[str, int]: ...

    @property
    def copied(self) -> Mapping[str, tuple[int, float]]: ...

    @property
    def costs(self) -> SwapCosts: ...


class SwapMetrics:
    """Families of one worker. Mutable state beside them: the totals last seen."""

    def __init__(self, families: Families, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._choices = families.counter(
            "preemption_choices_total",
            "Preempted requests with whole blocks to lose, by how they were to have them back.",
            choice=SWAP_CHOICES,
        )
        self._predicted = families.gauge(
            "preemption_predicted_seconds",
            "What either way would cost, for the latest request that both could be chosen for.",
            choice=SWAP_CHOICES,
        )
        self._fallbacks = families.counter(
            "swap_fallbacks_total", "Swaps that came to nothing, by the reason.", why=SWAP_FALLBACKS
        )
        self._bytes = families.counter(
            "swap_bytes_total", "KV bytes of preempted requests copied to host memory and back.", way=DIRECTIONS
        )
        self._seconds = families.counter(
            "swap_seconds_total", "Time that these copies took, with their digests.", way=DIRECTIONS
        )
        self._growth = Growth()
        self._spent_s = dict.fromkeys(DIRECTIONS, 0.0)

    def seen(self, swaps: Swaps) -> None:
        """Take over the totals as they are now."""
        for choice, seconds in swaps.costs.predicted.items():
            self._choices[choice].inc(self._growth.of(("choice", choice), swaps.choices[choice]))
            self._predicted[choice].set(seconds)
        for why in SWAP_FALLBACKS:
            self._fallbacks[why].inc(self._growth.of(("fallback", why), swaps.fallbacks[why]))
        for way, (blocks, seconds) in swaps.copied.items():
            self._bytes[way].inc(self._growth.of(("copied", way), blocks) * self._block_bytes)
            self._seconds[way].inc(seconds - self._spent_s[way])
            self._spent_s[way] = seconds

"""Counts what the lower tiers have done, and tells whether loading a block is sooner than computing it. Pure.

Both sides are measured: the seconds that a block took to come out of a tier, and the worker's tokens per second. What
has never been loaded counts as free, so that it is tried once. What is refused is not measured any more, so each
refusal takes a little off its price: a disk that was busy for a while is tried again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from engine.plan import mean, saving_most

FADING = 0.02
"""Share of its price that a refused load loses."""

TIERS = ("host", "disk")


class TierCost:
    """Mutable state: the two prices, in seconds a block."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.disk_s = 0.0

    @property
    def s_per_block(self) -> dict[str, float]:
        """The prices that are known, by tier."""
        return {tier: price for tier, price in zip(TIERS, (self.host_s, self.disk_s), strict=True) if price}

    def measured(self, host_blocks: int, host_s: float, disk_blocks: int, disk_s: float) -> None:
        """A load has taken so long for so many blocks of each tier."""
        if host_blocks:
            self.host_s = mean(self.host_s, host_s / host_blocks)
        if disk_blocks:
            self.disk_s = mean(self.disk_s, disk_s / disk_blocks)

    def quicker(self, on_disk: Sequence[bool], compute_s: float) -> int:
        """Return how many of the first of these blocks save most if they are loaded, where computing one takes
        `compute_s`."""
        runs = ((len(list(run)), self.disk_s if is_on_disk else self.host_s) for is_on_disk, run in groupby(on_disk))
        return saving_most(runs, compute_s)

    def are_quicker(self, on_disk: Sequence[bool], compute_s: float) -> bool:
        """Return True if loading all of these blocks takes less than `compute_s`."""
        return sum(self.disk_s if is_on_disk else self.host_s for is_on_disk in on_disk) < compute_s

    def worthwhile(self, on_disk: Sequence[bool], compute_s: float) -> int:
        """Return what `quicker` does; the others are refused."""
        best = self.quicker(on_disk, compute_s)
        if best < len(on_disk):
            self._refuse(on_disk[best:])
        return best

    def is_worthwhile(self, on_disk: Sequence[bool], compute_s: float) -> bool:
        """Return what `are_quicker` does; where they are not, they are refused."""
        if self.are_quicker(on_disk, compute_s):
            return True
        self._refuse(on_disk)
        return False

    def _refuse(self, on_disk: Sequence[bool]) -> None:
        self.disk_s *= 1 - FADING * any(on_disk)
        self.host_s *= 1 - FADING * (not all(on_disk))


@dataclass(slots=True)
class TierCounts:
    """Blocks and seconds since the worker started: numbers that only grow. Written by the engine thread."""

    saved_blocks: int = 0
    """Copied from the device into host memory."""
    spilled_blocks: int = 0
    """Written from host memory to disk."""
    loaded_blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    load_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIERS, 0.0))
    evicted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    """Blocks that had to leave a tier for others."""
    broken_blocks: int = 0
    """Found torn or unreadable when they were wanted."""
    torn_segments: int = 0
    """Files of an earlier life that were not whole."""
    hung_calls: int = 0
    """Calls of the disk that did not come back."""
    refused: int = 0
    """Loads that were not begun because computing was predicted to be sooner."""

    def loaded(self, host_blocks: int, host_s: float, disk_blocks: int, disk_s: float) -> None:
        for tier, blocks, seconds in zip(TIERS, (host_blocks, disk_blocks), (host_s, disk_s), strict=True):
            self.loaded_blocks[tier] += blocks
            self.load_s[tier] += seconds

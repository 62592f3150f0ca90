"""What the lower tiers have done since their worker started: numbers that only grow. Pure."""

from dataclasses import dataclass, field

TIERS = ("host", "disk")


@dataclass(slots=True)
class TierCounts:
    """Blocks and seconds; written by the engine thread."""

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
    """Of the disk, that did not come back."""
    refused: int = 0
    """Loads that were not begun because computing was predicted to be sooner."""

    def loaded(self, host_blocks: int, host_s: float, disk_blocks: int, disk_s: float) -> None:
        for tier, blocks, seconds in zip(TIERS, (host_blocks, disk_blocks), (host_s, disk_s), strict=True):
            self.loaded_blocks[tier] += blocks
            self.load_s[tier] += seconds

"""The thread below a simulated worker's cache: it carries out what the real index of lower tiers asks for, one thing
after another, each in the time that its blocks take.

Saves take none: on a card they run beside the steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import Loaded, OnDisk, Spill, Spilled, TierEvent, TierLoad
from engine.kv.tiers.disk_index import segment_bytes
from engine.kv.tiers.fetches import Fetches
from engine.kv.tiers.tiers import SEGMENT_BLOCKS, Tiers

BLOCK_BYTES = 1 << 20
"""What a block is taken to have. Only its ratio to a segment's header counts."""


@dataclass(frozen=True, slots=True)
class TierShape:
    """What one worker has below its device, in blocks, and the seconds a block takes: 64 MiB of an 8B model's KV, at
    25 GB/s from host memory and 5 GB/s from or to a disk."""

    host_blocks: int = 0
    disk_blocks: int = 0
    host_block_s: float = 0.0027
    disk_block_s: float = 0.0135

    @property
    def blocks(self) -> int:
        return self.host_blocks + self.disk_blocks

    def open(self) -> Tiers | None:
        """Return the real index of such tiers; None where there are none. Raises ValueError for a disk without a host
        tier of four blocks."""
        if not self.blocks:
            return None
        segments = -(-self.disk_blocks // SEGMENT_BLOCKS)
        return Tiers(self.host_blocks, BLOCK_BYTES, segments * segment_bytes(SEGMENT_BLOCKS, BLOCK_BYTES))


NO_TIERS = TierShape()


class SimulatedClock(Protocol):
    now: float

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Let something happen so many seconds from now."""


class SimulatedTiers:
    """Mutable state: until when the thread has something to do. `loaded` is called after each load."""

    def __init__(
        self, kv: KVCacheManager, tiers: Tiers, shape: TierShape, time: SimulatedClock, loaded: Callable[[], None]
    ) -> None:
        self.fetches = Fetches(kv, tiers)
        self._tiers, self._shape = tiers, shape
        self._time, self._loaded = time, loaded
        self._busy_until_s = 0.0

    def carry_out(self) -> None:
        """Begin what is asked for."""
        for command in self._tiers.take_commands():
            match command:
                case TierLoad(number, _, places):
                    disk_blocks = sum(isinstance(place, OnDisk) for place in places)
                    host_s = (len(places) - disk_blocks) * self._shape.host_block_s
                    disk_s = disk_blocks * self._shape.disk_block_s
                    self._take(host_s + disk_s, Loaded(number, len(places), host_s, disk_s))
                case Spill(segment, identities):
                    self._take(len(identities) * self._shape.disk_block_s, Spilled(segment))

    def _take(self, seconds: float, end: TierEvent) -> None:
        self._busy_until_s = max(self._busy_until_s, self._time.now) + seconds
        self._time.after(self._busy_until_s - self._time.now, lambda: self._ended(end))

    def _ended(self, end: TierEvent) -> None:
        self.fetches.handle(end)
        self.carry_out()
        if isinstance(end, Loaded):
            self._loaded()

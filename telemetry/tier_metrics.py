"""Counts of the tiers below a worker's device: blocks there, and blocks that go down and come back."""

from collections.abc import Mapping
from typing import Protocol

from telemetry.families import Families, Growth

TIERS = ("host", "disk")


class TierTotals(Protocol):
    """Totals since the worker started, by tier where there are two. Fulfilled by `engine.kv.tiers.cost`."""

    saved_blocks: int
    spilled_blocks: int
    broken_blocks: int
    torn_segments: int
    hung_calls: int
    refused: int

    @property
    def loaded_blocks(self) -> Mapping[str, int]: ...

    @property
    def load_s(self) -> Mapping[str, float]: ...

    @property
    def evicted(self) -> Mapping[str, int]: ...


class TierReadings(Protocol):
    """Fulfilled by `engine.kv.tiers.tiers.Tiers`."""

    block_bytes: int
    disk_error: str

    @property
    def counts(self) -> TierTotals: ...

    @property
    def blocks(self) -> Mapping[str, int]: ...


class TierMetrics:
    """Families of one worker. Mutable state beside them: the totals last seen."""

    def __init__(self, families: Families) -> None:
        self._blocks = families.gauge("kv_tier_blocks", "KV blocks in a tier.", tier=TIERS)
        self._stored = families.counter(
            "kv_tier_stored_bytes_total", "KV bytes that went down into a tier.", tier=TIERS
        )
        self._hits = families.counter(
            "kv_tier_hit_blocks_total", "KV blocks that came back instead of being computed.", tier=TIERS
        )
        self._bytes = families.counter(
            "kv_tier_loaded_bytes_total", "KV bytes that came back from a tier.", tier=TIERS
        )
        self._seconds = families.counter(
            "kv_tier_load_seconds_total", "Time that copies and reads out of a tier took.", tier=TIERS
        )
        self._evicted = families.counter(
            "kv_tier_evicted_blocks_total", "KV blocks that left a tier for others.", tier=TIERS
        )
        self._broken = families.counter(
            "kv_tier_broken_total",
            "What a tier did not give back: blocks not whole when they were wanted, nor segments at start; calls.",
            what=("block", "segment", "call"),
        )
        self._refused = families.counter(
            "kv_tier_refused_total", "Hits not loaded, or not all of them, since computing was predicted sooner."
        )[()]
        self._off = families.gauge(
            "kv_tier_disk_given_up", "1 when the disk tier has failed and was given up."
        )[()]
        self._growth = Growth()
        self._load_s = dict.fromkeys(TIERS, 0.0)

    def seen(self, tiers: TierReadings) -> None:
        """Take over the tiers' totals as they are now."""
        counts, nbytes = tiers.counts, tiers.block_bytes
        for tier, blocks in tiers.blocks.items():
            self._blocks[tier].set(blocks)
        stored = {"host": counts.saved_blocks, "disk": counts.spilled_blocks}
        for tier in TIERS:
            self._stored[tier].inc(self._growth.of(("stored", tier), stored[tier]) * nbytes)
            loaded = self._growth.of(("loaded", tier), counts.loaded_blocks[tier])
            self._hits[tier].inc(loaded)
            self._bytes[tier].inc(loaded * nbytes)
            self._seconds[tier].inc(counts.load_s[tier] - self._load_s[tier])
            self._load_s[tier] = counts.load_s[tier]
            self._evicted[tier].inc(self._growth.of(("evicted", tier), counts.evicted[tier]))
        self._broken["block"].inc(self._growth.of(("broken", "block"), counts.broken_blocks))
        self._broken["segment"].inc(self._growth.of(("broken", "segment"), counts.torn_segments))
        self._broken["call"].inc(self._growth.of(("broken", "call"), counts.hung_calls))
        self._refused.inc(self._growth.of(("refused", ""), counts.refused))
        self._off.set(bool(tiers.disk_error))

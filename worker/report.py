"""What a worker says of itself: to its routers how it stands and how fast it is, to its metrics all there is."""

from typing import Any

from engine.messages import Load
from telemetry.tier_metrics import TierMetrics
from transfer.handoff.silence import Silence
from worker.opening import Parts
from worker.role import Role


class Reporter:
    """Mutable state: since when readers are silent. Owner: the engine thread."""

    def __init__(self, parts: Parts, role: Role[Any]) -> None:
        self._parts = parts
        self._role = role
        self._silence = Silence(parts.transfer.escalate_s)
        self._tier_metrics = None if parts.kv.tiers is None else TierMetrics(parts.metrics.families)

    def load(self, steps: int, evicted: list[bytes], now: float) -> Load:
        """The report after so many steps, with these blocks evicted since the last one; the metrics are told too."""
        self._observe(len(evicted), now)
        scheduler, counts = self._role.scheduler, self._parts.kv.pool.counts()
        load = Load(
            step=steps,
            free_blocks=counts["free"],
            cached_blocks=counts["cached"],
            active_blocks=counts["active"],
            reserved_blocks=counts["reserved"],
            quarantined_blocks=counts["quarantined"],
            waiting_requests=scheduler.waiting_requests,
            running_requests=scheduler.running_requests,
            evicted=evicted,
            leaving=scheduler.leaving,
            silent=self._silence.overdue(self._role.source.sender.quarantined, now),
        )
        return self._role.load(load, now)

    def _observe(self, evicted_blocks: int, now: float) -> None:
        scheduler, source = self._role.scheduler, self._role.source
        kv, mover, metrics = self._parts.kv, self._parts.mover, self._parts.metrics
        metrics.blocks(kv.pool.counts())
        metrics.slots(*scheduler.slots)
        metrics.evicted(evicted_blocks)
        metrics.load(scheduler.waiting_requests, scheduler.running_requests, mover.outstanding)
        metrics.handoffs_dropped("sender", source.sender.dropped)
        metrics.transferred(
            mover.digests.made, mover.digests.verified, mover.digests.mismatched, mover.scrapped_bytes
        )
        for since in source.take_quarantined():
            metrics.quarantined(now - since)
        if self._tier_metrics is not None and kv.tiers is not None:
            self._tier_metrics.seen(kv.tiers)

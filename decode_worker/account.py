"""What a decode worker says of itself: to its routers how it stands and how fast it is, to its metrics all there is."""

from decode_worker.scheduler.scheduler import DecodeScheduler
from engine.measure import mean
from engine.messages import Load
from telemetry.metrics import WorkerMetrics
from telemetry.swap_metrics import SwapMetrics
from telemetry.tier_metrics import TierMetrics
from transfer.handoff.silence import Silence
from transfer.mover import Mover


class Account:
    """Mutable state: the running means. Owner: the engine thread."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        metrics: WorkerMetrics,
        mover: Mover,
        silence: Silence,
        block_bytes: int,
    ) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._mover = mover
        self._silence = silence
        self._block_bytes = block_bytes
        self._swap_metrics = SwapMetrics(metrics.families, block_bytes)
        self._tier_metrics = None if scheduler.kv.tiers is None else TierMetrics(metrics.families)
        self._s_per_step = 0.0
        self._s_per_block: dict[str, float] = {}

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens."""
        self._metrics.step(tokens, seconds)
        self._s_per_step = mean(self._s_per_step, seconds)

    def count(self) -> None:
        """Take what the scheduler has counted since the last call."""
        scheduler, metrics = self._scheduler, self._metrics
        drawing = scheduler.drawing
        if drawing.generated_tokens:
            metrics.generated(drawing.generated_tokens)
            drawing.generated_tokens = 0
        if drawing.prefilled_tokens or drawing.recomputed_tokens:
            computed, again = drawing.prefilled_tokens, drawing.recomputed_tokens
            metrics.prompt_tokens(computed=computed, prefix_hit=0, recomputed=again)
            drawing.prefilled_tokens = drawing.recomputed_tokens = 0
        for back in scheduler.take_resumed():
            metrics.resumed(back.way, back.lost_tokens, back.seconds)
        for one in scheduler.take_migrated():
            nbytes = one.blocks * (one.block_bytes or self._block_bytes)
            metrics.migration(one.outcome, one.transport, one.seconds, nbytes)
            if one.blocks and one.outcome == "ok":
                latest = one.seconds / one.blocks
                self._s_per_block[one.peer] = mean(self._s_per_block.get(one.peer, 0.0), latest)

    def observe(self, now: float, evicted_blocks: int) -> None:
        """Tell the metrics how the worker stands; so many blocks were evicted since the last call."""
        scheduler, metrics = self._scheduler, self._metrics
        metrics.blocks(scheduler.kv.pool.counts())
        metrics.slots(*scheduler.slots)
        metrics.evicted(evicted_blocks)
        metrics.load(
            scheduler.waiting_requests,
            scheduler.running_requests,
            len(scheduler.handoffs),
            self._mover.outstanding,
        )
        metrics.forks(scheduler.forks.forked, scheduler.forks.inherited)
        metrics.preempted(scheduler.preemption.preempted)
        self._swap_metrics.seen(scheduler.swapping)
        metrics.orphans_expired(scheduler.orphans.expired)
        for dropped in (scheduler.receiver.dropped, scheduler.handoffs.dropped):
            metrics.handoffs_dropped("receiver", dropped)
        metrics.handoffs_dropped("sender", scheduler.sender.dropped)
        for since in scheduler.departures.source.take_quarantined():
            metrics.quarantined(now - since)
        done, scrapped = self._mover.digests, self._mover.scrapped_bytes
        metrics.transferred(done.made, done.verified, done.mismatched, scrapped)
        if self._tier_metrics is not None and scheduler.kv.tiers is not None:
            self._tier_metrics.seen(scheduler.kv.tiers)

    def load(self, steps: int, evicted: list[bytes], now: float) -> Load:
        """For the routers: after so many steps, with these blocks evicted since the last one."""
        scheduler = self._scheduler
        counts = scheduler.kv.pool.counts()
        return Load(
            step=steps,
            free_blocks=counts["free"],
            cached_blocks=counts["cached"],
            active_blocks=counts["active"],
            reserved_blocks=counts["reserved"],
            quarantined_blocks=counts["quarantined"],
            waiting_requests=scheduler.waiting_requests,
            running_requests=scheduler.running_requests,
            s_per_token=self._s_per_step,
            s_per_block=dict(self._s_per_block),
            evicted=evicted,
            leaving=scheduler.leaving,
            silent=self._silence.overdue(scheduler.sender.quarantined, now),
        )

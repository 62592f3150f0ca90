"""What is told of preempted requests: choices, prices and copies, each total once."""

from decode_worker.scheduler.swapping import Swapping
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import Store, Stored
from engine.kv.tiers.stashes import Stash
from engine.kv.tiers.tiers import Tiers
from telemetry.metrics import WorkerMetrics
from telemetry.swap_metrics import SwapMetrics
from tests.telemetry.test_metrics import samples
from worker.config import DecodeConfig


def _stashed(swapping: Swapping, kv: KVCacheManager) -> Stash:
    tokens = list(range(9))
    lease = kv.acquire(b"", tokens, match_limit=8, room_tokens=9)
    assert lease is not None and swapping.stashes is not None and kv.tiers is not None
    kv.commit(lease, tokens)
    stash = swapping.stashes.put(lease, len(tokens))
    kv.release(lease)
    assert stash is not None
    (store,) = kv.tiers.take_commands()
    assert isinstance(store, Store)
    stored = Stored(store.number, len(store.blocks), 0.5)
    kv.tiers.handle(stored)
    swapping.stored(stored, [])
    return stash


def test_swap_figures() -> None:
    """Guards totals that are added again with every report."""
    metrics = WorkerMetrics("m", "decode-0", "decode")
    told = SwapMetrics(metrics.families, block_bytes=1000)
    kv = KVCacheManager(8, 4, "f", Tiers(8, 1000))
    swapping = Swapping(DecodeConfig(preemption="swap"), kv)
    _stashed(swapping, kv)
    swapping.choices["swap"] += 3
    swapping.fallbacks["full"] += 1
    swapping.loaded(4, 0.25, is_whole=False)
    swapping.costs.predicted = {"recompute": 2.0, "swap": 1.5}
    for _ in range(2):
        told.seen(swapping)
        seen = samples(metrics.render())
    assert seen["headrace_preemption_choices_total", (("choice", "swap"),)] == 3
    assert seen["headrace_preemption_choices_total", (("choice", "recompute"),)] == 0
    assert seen["headrace_preemption_predicted_seconds", (("choice", "swap"),)] == 1.5
    for why, count in (("full", 1), ("failed", 0), ("lost", 1)):
        assert seen["headrace_swap_fallbacks_total", (("why", why),)] == count
    for way, blocks, seconds in (("out", 2, 0.5), ("in", 4, 0.25)):
        assert seen["headrace_swap_bytes_total", (("way", way),)] == 1000 * blocks
        assert seen["headrace_swap_seconds_total", (("way", way),)] == seconds
    assert swapping.costs.store_s == 0.25, "a block"

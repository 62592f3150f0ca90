"""What is told of the tiers below the device: totals become counters, once."""

from engine.kv.tiers.commands import Loaded, Spill, Spilled, TierSlot
from engine.kv.tiers.tiers import Tiers
from engine.types import BlockId
from telemetry.metrics import WorkerMetrics
from telemetry.tier_metrics import TierMetrics
from tests.telemetry.test_metrics import samples


def test_tier_figures() -> None:
    """Guards totals that are added again with every report."""
    metrics = WorkerMetrics("m", "prefill-0", "prefill")
    told = TierMetrics(metrics.families)
    tiers = Tiers(4, 1000, disk_bytes=100_000)
    names = [bytes([n]) * 16 for n in range(8)]
    for name in names:
        tiers.demote(name, BlockId(0))
        for command in tiers.take_commands():
            if isinstance(command, Spill):
                tiers.handle(Spilled(command.segment))
    on_disk = next(name for name in names if name not in tiers.host)
    wanted = [names[-1], on_disk]
    places = tiers.pin(wanted)
    assert isinstance(places[0], TierSlot) and not isinstance(places[1], TierSlot)
    number = tiers.load(places, wanted, [BlockId(1), BlockId(2)])
    tiers.handle(Loaded(number, 2, 0.25, 0.5))
    for _ in range(2):
        told.seen(tiers)
        seen = samples(metrics.render())
    for tier, seconds in (("host", 0.25), ("disk", 0.5)):
        label = (("tier", tier),)
        assert seen["headrace_kv_tier_hit_blocks_total", label] == 1
        assert seen["headrace_kv_tier_loaded_bytes_total", label] == 1000
        assert seen["headrace_kv_tier_load_seconds_total", label] == seconds
    assert seen["headrace_kv_tier_blocks", (("tier", "host"),)] == 4
    assert seen["headrace_kv_tier_stored_bytes_total", (("tier", "host"),)] == 8000
    assert seen["headrace_kv_tier_evicted_blocks_total", (("tier", "host"),)] == 4
    spilled = seen["headrace_kv_tier_stored_bytes_total", (("tier", "disk"),)]
    assert spilled == 1000 * seen["headrace_kv_tier_blocks", (("tier", "disk"),)] > 0
    assert seen["headrace_kv_tier_disk_given_up", ()] == 0
    tiers.disable_disk("No space left on device")
    told.seen(tiers)
    assert samples(metrics.render())["headrace_kv_tier_disk_given_up", ()] == 1

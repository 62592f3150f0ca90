"""Whether a block is loaded or computed, by figures chosen by hand. What a worker makes of it is in test_fetches.py and
tests/integration/test_tiers_fake.py, its figures in tests/telemetry/test_tier_metrics.py."""

import pytest

from engine.kv.tiers.cost import FADING, TierCost, TierCounts


def _cost(host_s: float, disk_s: float) -> TierCost:
    cost = TierCost()
    cost.measured(1, host_s, 1, disk_s)
    return cost


def test_what_was_never_loaded_is_tried() -> None:
    assert TierCost().worthwhile([False, True], 0.001) == 2


@pytest.mark.parametrize(
    ("on_disk", "count"),
    [
        ([False, False], 2),
        ([True, True], 0),
        ([False, True], 1),
        ([True, False], 0),
        ([True, False, False, False], 4),
        ([False, True, False, False, False], 5),
    ],
)
def test_as_many_are_loaded_as_save_most(on_disk: list[bool], count: int) -> None:
    """Guards the blocks behind a dear one: they are worth loading only where they save what that one costs."""
    assert _cost(host_s=1.0, disk_s=4.0).worthwhile(on_disk, 2.5) == count


def test_a_tier_that_is_refused_is_tried_again_one_day() -> None:
    """Guards a disk that was busy for a minute against being left alone for ever, and nobody else's price."""
    cost = _cost(host_s=1.0, disk_s=4.0)
    assert cost.worthwhile([False, True], 2.0) == 1
    assert (cost.host_s, cost.disk_s) == (1.0, 4.0 * (1 - FADING))
    while cost.worthwhile([True], 2.0) == 0:
        pass
    assert cost.disk_s < 2.0


def test_a_price_is_by_the_block_and_a_tier_that_gave_none_keeps_its_own() -> None:
    cost = _cost(host_s=1.0, disk_s=4.0)
    cost.measured(0, 0.0, 4, 16.0)
    assert (cost.host_s, cost.disk_s) == (1.0, 4.0)


def test_loads_are_counted_by_tier() -> None:
    counts = TierCounts()
    counts.loaded(3, 0.5, 1, 0.25)
    counts.loaded(1, 0.5, 0, 0.0)
    assert counts.loaded_blocks == {"host": 4, "disk": 1} and counts.load_s == {"host": 1.0, "disk": 0.25}

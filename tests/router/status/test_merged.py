"""What several routers report, as an operator reads it: one report."""

from typing import Any

import msgspec

from router.status.journal import Recent, together
from router.status.overview import Overview, WorkerOverview, merged


def worker(name: str, age_s: float, **more: Any) -> WorkerOverview:
    figures: dict[str, Any] = dict.fromkeys(("address", "incarnation", "host", "metrics_address"), "")
    figures |= {"role": "decode", "pid": 1, "block_size": 16, "blocks": 8, **more}
    return WorkerOverview(name=name, age_s=age_s, **figures)


def test_requests_are_added_up_and_workers_named_once() -> None:
    """Guards against a worker that is listed once by each router, and one that a router does not reach."""
    stages = {"admit": 0.1, "route": 0.2}
    first = Recent(outcomes={"stop": 3, "error": 1}, output_tokens=10, ttft_p50_s=0.1, stages=stages)
    second = Recent(outcomes={"stop": 12}, output_tokens=5, ttft_p50_s=0.3, stages={"admit": 0.5, "route": 0.2})
    one = Overview(model="m", ready=True, waiting=1, open=4, workers=[worker("d0", 0.2)], recent=first)
    other = Overview(
        model="m", ready=True, waiting=2, open=5, workers=[worker("d0", 0.1), worker("d1", 0.3)], recent=second
    )
    both = merged([one, other])
    assert (both.waiting, both.open, both.ready) == (3, 9, True)
    assert [(w.name, w.age_s) for w in both.workers] == [("d0", 0.1), ("d1", 0.3)]
    assert both.recent.outcomes == {"stop": 15, "error": 1} and both.recent.output_tokens == 15
    assert both.recent.ttft_p50_s == 0.3 and both.recent.itl_p50_s is None
    assert both.recent.stages == {"admit": (0.1 * 4 + 0.5 * 12) / 16, "route": 0.2}
    assert not merged([one, msgspec.structs.replace(other, ready=False)]).ready


def test_targets_are_met_over_all_routers() -> None:
    first, second = Recent(in_time={"ttft": (6, 10), "itl": (1, 1)}), Recent(in_time={"ttft": (4, 4), "itl": (0, 2)})
    assert together([first, second, Recent()]).in_time == {"ttft": (10, 14), "itl": (1, 3)}


def test_where_nothing_has_ended_there_are_no_means() -> None:
    assert together([Recent(), Recent()]) == Recent()

"""Where the time went: stages add up, and nothing is folded in."""

import pytest

from engine.messages import RequestStats
from engine.types import FinishReason
from router.timing import Timeline


def test_stages_and_unattributed_add_up() -> None:
    """Guards against time that is counted twice, or hidden in another stage."""
    line = Timeline(10.0)
    line.submitted_s = 10.5
    line.offered(11.0)
    line.offered(12.0)
    line.accepted_s = 13.0
    line.tokens(1, 15.0)
    line.tokens(2, 16.0)
    line.tokens(1, 18.0)
    line.ended_s = 19.0
    stats = RequestStats(
        stages={"prefill_run": 1.5, "decode_run": 3.0}, output_tokens=4, prefill_cached_tokens=3
    )
    end = line.finished(FinishReason.LENGTH, stats, "", 19.25)
    stages = end.stats.stages
    assert stages["admit"] == 0.5 and stages["route"] == 0.5 and stages["reserve"] == 2.0
    assert stages["stream_out"] == 0.25
    assert stages["unattributed"] == pytest.approx(1.5)
    assert len(stages) == 10 and sum(stages.values()) == pytest.approx(end.e2e_s) == 9.25
    assert (end.ttft_s, end.itl_p99_s, end.cached_tokens) == (5.0, 2.0, 3)
    assert end.itl_mean_s == pytest.approx(1.0)


def test_an_acceptance_heard_late_is_not_counted_twice() -> None:
    """Guards against `reserve` and the worker's first stage claiming the same milliseconds."""
    line = Timeline(0.0)
    line.submitted_s = 0.0
    line.offered(0.0)
    line.accepted_s = 0.5  # the worker accepted at 0.1, but the loop was busy
    line.ended_s = 2.1
    line.tokens(1, 2.0)
    stats = RequestStats(stages={"prefill_run": 2.0})
    stages = line.finished(FinishReason.LENGTH, stats, "", 2.1).stats.stages
    assert stages["reserve"] == pytest.approx(0.1)
    assert stages["unattributed"] == pytest.approx(0.0)

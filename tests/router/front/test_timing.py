"""Where the time went: stages add up, and nothing is folded in."""

import pytest

from engine.messages import RequestStats
from engine.types import FinishReason
from router.front.timing import Timeline


def test_stages_and_unattributed_add_up() -> None:
    """Guards against time that is counted twice, or hidden in another stage."""
    line = Timeline(10.0)
    line.submitted(10.5)
    line.offered(11.0)
    line.offered(12.0)
    line.accepted(13.0)
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
    line.submitted(0.0)
    line.offered(0.0)
    line.accepted(0.5)  # the worker accepted at 0.1, but the loop was busy
    line.ended_s = 2.1
    line.tokens(1, 2.0)
    stats = RequestStats(stages={"prefill_run": 2.0})
    stages = line.finished(FinishReason.LENGTH, stats, "", 2.1).stats.stages
    assert stages["reserve"] == pytest.approx(0.1)
    assert stages["unattributed"] == pytest.approx(0.0)


def test_a_lost_worker_repeats_stages_and_hides_nothing() -> None:
    """Guards the account of a request that was placed twice: sums true, the lost worker's time in no stage."""
    line = Timeline(0.0)
    line.submitted(1.0)
    line.offered(2.0)
    line.accepted(4.0)
    line.tokens(1, 5.0)
    line.interrupted(10.0)  # six seconds on the lost worker
    line.offered(13.0)
    line.offered(14.0)
    line.accepted(18.0)
    line.tokens(1, 20.0)
    line.ended_s = 21.0
    stats = RequestStats(stages={"prefill_run": 1.0, "decode_run": 2.0}, output_tokens=2)
    end = line.finished(FinishReason.LENGTH, stats, "", 21.0)
    stages = end.stats.stages
    assert (stages["admit"], stages["route"], stages["reserve"]) == (1.0, 1.0 + 3.0, 2.0 + 5.0)
    assert stages["unattributed"] == pytest.approx(6.0)
    assert sum(stages.values()) == pytest.approx(end.e2e_s) == 21.0
    assert (end.ttft_s, end.itl_mean_s) == (5.0, 15.0)


def test_a_move_brings_the_first_workers_account_along() -> None:
    """Guards against time that is lost with a move, or counted against the wrong reservation."""
    line = Timeline(0.0)
    line.submitted(0.0)
    line.offered(0.0)
    line.accepted(1.0)
    line.tokens(1, 3.0)
    line.moved({"prefill_run": 2.0, "decode_run": 4.0}, 7.0)
    line.offered(8.0)
    line.accepted(9.0)
    line.ended_s = 12.0
    stats = RequestStats(stages={"migrate": 1.0, "decode_run": 2.0}, output_tokens=9)
    stages = line.finished(FinishReason.LENGTH, stats, "", 12.0).stats.stages
    assert (stages["route"], stages["reserve"], stages["prefill_run"]) == (1.0, 2.0, 2.0)
    assert (stages["migrate"], stages["decode_run"]) == (1.0, 6.0)
    assert stages["unattributed"] == pytest.approx(0.0)


def test_only_the_last_reservation_can_have_been_heard_late() -> None:
    """Guards against a correction that takes an earlier placement's time away."""
    line = Timeline(0.0)
    line.submitted(0.0)
    line.offered(0.0)
    line.accepted(3.0)
    line.interrupted(3.0)
    line.offered(3.0)
    line.accepted(4.0)
    line.ended_s = 5.0
    stats = RequestStats(stages={"decode_run": 9.0})
    stages = line.finished(FinishReason.LENGTH, stats, "", 5.0).stats.stages
    assert stages["reserve"] == 3.0
    assert sum(stages.values()) == pytest.approx(5.0)

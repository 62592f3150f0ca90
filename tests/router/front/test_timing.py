"""Where the time went: stages add up, and nothing is folded in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import RequestStats
from engine.types import FinishReason
from router.front.timing import WORKER_STAGES, Timeline


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


SECONDS = st.floats(0.0, 5.0)
SHARES = st.lists(SECONDS, min_size=len(WORKER_STAGES), max_size=len(WORKER_STAGES))
PLACEMENT = st.tuples(st.sampled_from(("moved", "lost")), SECONDS, SECONDS, SECONDS, SHARES, SECONDS)


class History:
    """What really happens to a request, each word of a worker heard late: never an account of more than there was."""

    def __init__(self, line: Timeline, now: float) -> None:
        self.line, self.now, self.stages = line, now, dict[str, float]()

    def place(self, in_line_s: float, offer_s: float, heard_s: float) -> None:
        """Offered after `in_line_s`, accepted `offer_s` later, which is heard `heard_s` after that."""
        self.line.offered(self.now + in_line_s)
        self.now += in_line_s + offer_s
        self.line.accepted(self.now + heard_s)
        self.heard_s = self.now + heard_s

    def run(self, shares: list[float], late_s: float) -> float:
        """Spend `shares` on the worker; the time at which its word about it is heard, never before that before it."""
        self.stages = dict(zip(WORKER_STAGES, shares, strict=True))
        self.now = max(self.heard_s, self.now + sum(shares) + late_s)
        return self.now


def closed(line: Timeline, stages: dict[str, float], ended_s: float, told_s: float) -> None:
    line.ended_s = ended_s
    end = line.finished(FinishReason.LENGTH, RequestStats(stages=stages), "", told_s)
    assert min(end.stats.stages.values()) >= -1e-9, end.stats.stages
    assert sum(end.stats.stages.values()) == pytest.approx(end.e2e_s)
    assert end.ttft_s >= 0


@given(SECONDS, st.lists(PLACEMENT, max_size=3), PLACEMENT, SECONDS)
def test_no_history_of_placements_leaves_less_than_nothing(
    admit_s: float,
    earlier: list[tuple[str, float, float, float, list[float], float]],
    last: tuple[str, float, float, float, list[float], float],
    out_s: float,
) -> None:
    """Guards `unattributed` against a move: the first worker's acceptance, too, may have been heard late."""
    line = Timeline(0.0)
    line.submitted(admit_s)
    history = History(line, admit_s)
    for how, in_line_s, offer_s, heard_s, shares, late_s in earlier:
        history.place(in_line_s, offer_s, heard_s)
        now = history.run(shares, late_s)
        if how == "moved":
            line.moved(history.stages, now)
        else:
            line.interrupted(now)
    _, in_line_s, offer_s, heard_s, shares, late_s = last
    history.place(in_line_s, offer_s, heard_s)
    ended_s = history.run(shares, late_s)
    closed(line, history.stages, ended_s, ended_s + out_s)


@given(SHARES, SHARES, SECONDS, SECONDS, st.booleans(), SECONDS)
def test_an_adopted_request_is_no_younger_than_what_its_worker_accounts_for(
    before: list[float], after: list[float], told_late_s: float, end_late_s: float, is_moved: bool, out_s: float
) -> None:
    """Guards `unattributed` against an age that was old when the new router heard it."""
    age_s, heard_s = sum(before), 100.0
    line = Timeline.adopted(age_s, 0, heard_s)
    history = History(line, heard_s - told_late_s)
    history.heard_s = heard_s
    shares = [b + a for b, a in zip(before, after, strict=True)]
    now = history.run(after, end_late_s)
    stages = dict(zip(WORKER_STAGES, shares, strict=True))
    if is_moved:
        line.moved(stages, now)
        history.place(1.0, 1.0, 1.0)
        now, stages = history.run(after, end_late_s), history.stages
    closed(line, stages, now, now + out_s)

"""When a step waits for rows that are about to land. What the shell does meanwhile is tried in
tests/engine/test_loop.py, and every order of events in tests/sim."""

import msgspec
import pytest

from decode_worker.scheduler.drafting import _Means
from decode_worker.scheduler.events import FromPeer
from decode_worker.scheduler.holding import AUTO_MOST_S, AUTO_STEPS, FADING, LATE, MOST_MARGIN, NEVER, StepHold
from decode_worker.scheduler.request import RequestState
from engine.messages import Cancel, Fault, Handoff, PrefillFailed, Tokens, Yield
from engine.step import DrawnRun, StepPlan
from engine.types import BeamParams, FinishReason, RequestId
from tests.decode_worker.scheduler.bench import POOL, Fetching, P
from transfer.handoff.commands import Leave
from worker.config import DecodeConfig

STEP_S = 0.010
"""What every step takes."""


def _means(measured: dict[int, float]) -> _Means:
    made = _Means()
    for size, seconds in measured.items():
        made.note(size, seconds)
    return made


class Timed(Fetching):
    """A bench whose clock is a test's: a step takes `STEP_S`, and nothing else takes any time."""

    def turn(self, step_s: float = STEP_S) -> StepPlan | None:
        """Plan a step and let it end; None: none was to begin now."""
        plan, commands = self.scheduler.plan(self.now)
        self._do(commands)
        if plan is not None:
            self.now += step_s
            drawn = [self.drawn + n + 1 for n, row in enumerate(r for r in plan.rows if r.draw)]
            self.drawn += len(drawn)
            self._do(self.scheduler.complete(plan, drawn, self.now))
            self.scheduler.batch.lasted(step_s)
        self.scheduler.check()
        return plan

    def decoding(self, name: str, prompt: int, **more: object) -> None:
        """Let a request run that was prefilled here, at a time when no other is."""
        assert self.place(name, list(range(prompt, prompt + 8)), **more)  # type: ignore[arg-type]
        for _ in range(3):
            assert self.turn() is not None

    def coming(self, name: str, prompt: int, **more: object) -> Handoff:
        """Let a request wait for its prefill worker."""
        assert self.place(name, list(range(prompt, prompt + 8)), POOL, **more)  # type: ignore[arg-type]
        return self.asked().handoff

    def rows(self) -> int:
        plan = self.turn()
        return 0 if plan is None else len(plan.rows)


def timed(target_ms: float | str = 50.0, **config: object) -> Timed:
    return Timed(64, itl_target_ms=target_ms, **config)


def test_a_step_waits_as_long_as_its_streams_can_and_no_longer() -> None:
    """Guards both halves: rows that land join the step, and no stream is late for them."""
    bench = timed()
    bench.decoding("a", 100, max_tokens=40)
    bench.coming("b", 200)
    hold = bench.scheduler.batch.hold
    began = bench.now
    assert bench.rows() == 0 and hold.due == pytest.approx(began + 0.050 - STEP_S)
    bench.now = hold.due - 0.001
    assert bench.rows() == 0 and hold.expired == 0
    bench.now = hold.due
    assert bench.rows() == 1, "it is due, with the rows that there are"
    assert bench.now == pytest.approx(began + 0.050) and hold.due == NEVER
    assert (hold.filled, hold.expired, hold.missed_tokens) == (0, 1, 0) and hold.held_s == pytest.approx(0.040)


def test_what_lands_meanwhile_is_in_the_step() -> None:
    bench = timed()
    bench.decoding("a", 100, max_tokens=40)
    handoff = bench.coming("b", 200, max_tokens=40)
    assert bench.rows() == 0
    bench.now += 0.020
    bench.land(handoff)
    assert bench.rows() == 0, "its first token is still to be named"
    bench.name_token(handoff)
    assert bench.rows() == 2, "nothing more is to come: at once"
    hold = bench.scheduler.batch.hold
    assert (hold.filled, hold.expired) == (1, 0) and hold.held_s == pytest.approx(0.020)
    assert bench.rows() == 2, "and the next as well"


def test_without_a_target_no_step_waits() -> None:
    bench = timed("off")
    bench.decoding("a", 100, max_tokens=40)
    bench.coming("b", 200)
    for _ in range(5):
        assert bench.rows() == 1
    hold = bench.scheduler.batch.hold
    assert (hold.filled, hold.expired, hold.missed_tokens, hold.held_s) == (0, 0, 0, 0.0)


def test_a_target_below_a_step_is_no_reason_to_wait() -> None:
    bench = timed(STEP_S * 1000)
    bench.decoding("a", 100, max_tokens=40)
    bench.coming("b", 200)
    assert bench.rows() == 1
    assert bench.rows() == 1


@pytest.mark.parametrize("why", ["full", "prompt", "search", "nobody", "leaving"])
def test_what_a_step_does_not_wait_beside(why: str) -> None:
    """Guards against waiting for what could not join, or at the cost of a prompt, which goes on by steps."""
    bench = timed(max_batch=2)
    bench.decoding("a", 100, max_tokens=40)
    if why == "full":
        bench.decoding("c", 300, max_tokens=40)
    bench.coming("b", 200)
    if why == "prompt":
        bench.place("c", list(range(300, 308)))
    elif why == "search":
        bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
        bench.place("c", list(range(300, 308)), beams=BeamParams(width=2, answers=1))
        plan, _ = bench.scheduler.plan(bench.now)
        assert plan is not None
        bench.scheduler.complete(plan, [1], bench.now)
        plan, _ = bench.scheduler.plan(bench.now)
        assert plan is not None and plan.rows[0].candidates and bench.scheduler.batch.hold.due == NEVER
        return
    elif why == "nobody":
        bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
        assert bench.rows() == 0 and bench.scheduler.batch.hold.due == NEVER
        return
    elif why == "leaving":
        bench.request("a").yielding = True
    plan = bench.turn()
    assert plan is not None or why == "leaving"
    assert bench.scheduler.batch.hold.due == NEVER


def test_a_handoff_that_does_not_come_is_waited_for_no_longer() -> None:
    """Guards streams against the pace of the target for as long as a prefill worker hangs."""
    bench = timed()
    bench.decoding("a", 100, max_tokens=60)
    first = bench.coming("b", 200, max_tokens=40)
    assert bench.rows() == 0
    bench.now += 0.020
    bench.land(first)
    bench.name_token(first)
    assert bench.rows() == 2
    bench.coming("c", 300)
    asked = bench.now
    assert bench.rows() == 0
    bench.now = asked + 0.059
    bench.request("a").told_s = bench.request("b").told_s = bench.now
    assert bench.rows() == 0
    bench.now = asked + 0.061
    assert bench.rows() == 2, "three times as long as the one that landed"


def test_a_failed_handoff_ends_the_wait() -> None:
    bench = timed()
    bench.decoding("a", 100, max_tokens=40)
    handoff = bench.coming("b", 200)
    assert bench.rows() == 0
    bench.tell(FromPeer(P, PrefillFailed(handoff, Fault("RESOURCE_EXHAUSTED", "no room"))))
    assert bench.request("b").state is not RequestState.HANDOFF
    assert bench.rows() == 1


def test_steps_that_take_longer_than_they_did_make_the_next_begin_sooner() -> None:
    """Guards the target itself: what a held step was late by is not lost again, and is forgotten in time."""
    bench = timed()
    bench.decoding("a", 100, max_tokens=90)
    bench.coming("b", 200)
    hold = bench.scheduler.batch.hold
    assert bench.rows() == 0
    bench.now = hold.due
    assert bench.turn(STEP_S + 0.015) is not None
    assert hold.missed_tokens == 1 and hold._margin_s == pytest.approx(0.015)
    assert bench.rows() == 0 and hold.due <= bench.now + 0.050 - STEP_S - 0.015
    bench.now = hold.due
    assert bench.turn(STEP_S + 0.010) is not None
    assert hold.missed_tokens == 1, "in time"
    before = hold._margin_s
    for _ in range(20):
        assert bench.rows() == 0
        bench.now = hold.due
        assert bench.rows() == 1
    assert hold._margin_s < before * 0.7 and hold.missed_tokens == 1
    assert bench.rows() == 0
    bench.now = hold.due
    bench.turn(9.0)
    assert hold._margin_s == MOST_MARGIN * 0.050 and bench.rows() in (0, 1)


def test_nothing_is_planned_behind_a_step_where_the_next_may_wait() -> None:
    """Guards the rows that land while a step is under way: planned ahead, the next would be without them."""
    bench = timed()
    bench.decoding("a", 100, max_tokens=40)
    plan, _ = bench.scheduler.plan(bench.now)
    assert plan is not None
    bench.coming("b", 200)
    behind, _ = bench.scheduler.plan(bench.now)
    assert behind is None and bench.scheduler.batch.hold.due == NEVER, "the shell has nothing to wake for"
    bench.now += STEP_S
    bench._do(bench.scheduler.complete(plan, [77], bench.now))
    assert bench.rows() == 0 and bench.scheduler.batch.hold.due < NEVER
    one = timed("off")
    one.decoding("a", 100, max_tokens=40)
    assert one.scheduler.plan(one.now)[0] is not None
    one.coming("b", 200)
    assert one.scheduler.plan(one.now)[0] is not None, "without a target it is"


def test_answers_are_the_same_with_and_without() -> None:
    """Guards against a row that is lost or doubled by a step that was put off."""
    told = []
    for target in ("off", 50.0, "auto"):
        bench = timed(target)
        bench.decoding("a", 100, max_tokens=12)
        handoff = bench.coming("b", 200, max_tokens=5)
        for _ in range(4):
            bench.turn()
        bench.land(handoff)
        bench.name_token(handoff)
        for _ in range(20):
            bench.now += 0.050
            bench.turn()
        said: dict[str, int] = {}
        for record in bench.told:
            if isinstance(record, Tokens):
                assert record.index == said.get(record.request, 0)
                said[record.request] = record.index + len(record.ids)
        told.append(said)
    assert told[0] == told[1] == told[2] == {"a": 12, "b": 5}


def test_a_row_is_about_to_land_for_less_than_so_many_times_the_mean() -> None:
    """Guards both sides of the border, and the first rows of all, of which nothing is known."""
    hold = StepHold(0.5)
    assert hold.is_about_to_land(1e9), "as long as none has landed"
    hold.landed(0.5)
    assert hold.is_about_to_land(0.0) and hold.is_about_to_land(LATE * 0.5 - 0.01)
    assert not hold.is_about_to_land(LATE * 0.5)
    assert not StepHold(None).may_wait(0.0)


def test_a_step_that_takes_all_of_the_target_is_not_waited_for() -> None:
    hold = StepHold(0.5)
    assert hold.may_wait(0.25) and not hold.may_wait(0.5) and not hold.may_wait(0.75)
    hold._margin_s = 0.25
    assert hold.may_wait(0.125) and not hold.may_wait(0.25)


def test_a_token_in_time_to_the_moment_is_not_late() -> None:
    """Guards the count that operators see, and the margin, which a step in time makes smaller, held or not."""
    bench = Timed(64, itl_target_ms=500.0)
    bench.decoding("a", 100, max_tokens=40)
    request, hold = bench.request("a"), bench.scheduler.batch.hold
    for gap_s, missed in ((0.25, 0), (0.5, 0), (0.75, 1)):
        request.told_s, hold.missed_tokens = 8.0, 0
        hold.followed(request, 8.0 + gap_s)
        assert (request.told_s, hold.missed_tokens) == (8.0 + gap_s, missed)
    for was_held in (False, True):
        for gap_s, margin_s in ((0.25, 0.125 * FADING), (0.5, 0.125 * FADING), (0.625, 0.25 if was_held else 0.125)):
            request.told_s, hold._margin_s, hold._was_held = 8.0, 0.125, was_held
            hold.stepped([request], 8.0 + gap_s)
            assert hold._margin_s == margin_s, (was_held, gap_s)
    request.told_s, hold._margin_s, hold._was_held = None, 0.125, True
    hold.stepped([request], 99.0)
    assert hold._margin_s == 0.125 * FADING, "a first token is behind none"
    free = StepHold(None)
    free.stepped([request], 99.0)
    free.followed(request, 99.0)
    assert (request.told_s, free.missed_tokens, free._margin_s) == (99.0, 0, 0.0)


def test_the_oldest_of_all_streams_says_when_a_step_is_due() -> None:
    """Guards the stream that was told first, and one that was told nothing yet: it counts from when it was taken."""
    bench = Timed(64, itl_target_ms=500.0)
    for name, prompt in (("a", 100), ("b", 200)):
        bench.decoding(name, prompt, max_tokens=40)
    one, other = bench.request("a"), bench.request("b")
    hold = StepHold(0.5)
    for told_s, accepted, due in (((8.0, 9.0), 7.0, 8.0), ((9.0, 8.5), 7.0, 8.5), ((9.0, None), 8.25, 8.25)):
        (one.told_s, other.told_s), other.accepted = told_s, accepted
        assert hold.holds([one, other], True, 0.125, 8.0) and hold.due == due + 0.375
    assert (hold.held_s, hold.filled, hold.expired) == (0.0, 0, 0)
    assert not hold.holds([one, other], False, 0.125, 8.25) and (hold.held_s, hold.filled, hold.due) == (0.25, 1, NEVER)
    assert not hold.holds([], True, 0.125, 8.25) and hold.filled == 1, "it was not held"


@pytest.mark.parametrize("under_way", [False, True])
def test_a_step_is_as_long_as_one_with_another_row(under_way: bool) -> None:
    """Guards the target: what a step takes is that of the rows which are to be in it, not of those that wait."""
    bench = timed(500.0)
    bench.decoding("a", 100, max_tokens=40)
    costs, hold = bench.scheduler.batch.drafting.costs, bench.scheduler.batch.hold
    costs._seconds = _means({1: 0.001, 2: 0.125, 3: 0.4})
    bench.coming("b", 200)
    if not under_way:
        assert bench.turn() is None and hold.due == pytest.approx(bench.request("a").told_s + 0.5 - 0.125)
        costs._seconds._means[2] = 0.5
        assert bench.turn() is not None, "such a step is late whenever it begins"
        return
    assert bench.scheduler.batch.is_under_way is False
    bench.request("a").told_s = bench.now - 9.0
    plan, _ = bench.scheduler.plan(bench.now)
    assert plan is not None, "it is due"
    assert bench.scheduler.plan(bench.now)[0] is None, "the next may wait"
    costs._seconds._means[2] = 0.5
    assert bench.scheduler.plan(bench.now)[0] is not None, "and now it may not"


def test_before_any_step_was_measured_none_waits() -> None:
    bench = timed()
    bench.decoding("a", 100, max_tokens=40)
    bench.coming("b", 200)
    costs = bench.scheduler.batch.drafting.costs
    known, costs._seconds = costs._seconds, _means({})
    assert bench.turn() is not None
    costs._seconds = known
    assert bench.turn() is None


def test_by_itself_a_target_is_of_so_many_steps() -> None:
    """Guards the default against gaps that grow with a slow step without end, and against a margin or late tokens
    counted for what nobody has asked for."""
    bench = timed("auto")
    bench.decoding("a", 100, max_tokens=40)
    bench.coming("b", 200)
    hold, costs = bench.scheduler.batch.hold, bench.scheduler.batch.drafting.costs
    told_s = bench.request("a").told_s
    assert told_s is not None
    assert bench.turn() is None and hold.due == pytest.approx(told_s + (AUTO_STEPS - 1) * STEP_S)
    costs._seconds = _means({1: AUTO_MOST_S * 0.75})
    assert bench.turn() is None and hold.due == pytest.approx(told_s + AUTO_MOST_S * 0.25)
    bench.now = hold.due
    assert bench.turn(9.0) is not None
    assert (hold.missed_tokens, hold._margin_s, hold.expired) == (0, 0.0, 1)
    costs._seconds = _means({1: AUTO_MOST_S})
    assert bench.turn() is not None, "it takes as long as a gap may be"


@pytest.mark.parametrize("wrong", [0.0, -5.0])
def test_a_target_of_no_time_is_refused_by_name(wrong: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"itl_target_ms.*more than 0"):
        msgspec.convert({"itl_target_ms": wrong}, DecodeConfig)


def test_a_step_is_not_held_while_the_last_rows_of_one_that_departs_are_to_be_computed() -> None:
    """Guards a request that has left the batch: a run of its tokens takes several steps, and whoever is to go on with
    it waits for all of them, not for rows that land here."""
    bench = timed(local_chunk_tokens=2)
    bench.decoding("a", 100, max_tokens=40)
    bench.decoding("b", 300, max_tokens=40)
    for _ in range(3):
        bench.turn()
    plan, _ = bench.scheduler.plan(bench.now)
    assert plan is not None and [row.request for row in plan.rows] == ["a", "b"]
    assert bench.request("b").state is RequestState.RUNNING
    bench._do(bench.scheduler.complete(plan, [DrawnRun(tuple(range(50, 59))), 70], bench.now))
    bench.coming("c", 200)
    bench.tell(Leave(9.0))
    bench.router(Yield(RequestId("a"), 1))
    ends = []
    while (plan := bench.turn()) is not None:
        ends += [row.end for row in plan.rows if row.request == "a"]
    whole = len(bench.scheduler.departures._departures[RequestId("a")].request.tokens)
    assert ends[-1] == whole and len(ends) > 1, "in one go"
    assert bench.scheduler.batch.hold.due < NEVER, "and now the next waits for who lands"

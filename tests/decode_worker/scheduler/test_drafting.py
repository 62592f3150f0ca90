"""How many drafts a step has, by what was measured."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from decode_worker.scheduler.drafting import OTHER_WAY, Drafting, StepCosts, _Draft
from engine.drafts import DraftWanted, EachAlone, Proposed
from engine.types import BeamParams, RequestId, RequestRecord
from tests.decode_worker.scheduler.bench import Fetching

CPU = {1: 16.2, 2: 19.7, 3: 22.7, 4: 25.8, 5: 34.3, 6: 38.4, 8: 46.7}
"""Milliseconds of a step by its tokens, as once measured with the demo's model."""


class Counting:
    def propose(self, tokens: Any, most: int) -> list[int]:
        return list(range(most))


class _Asked:
    tokens = (0,) * 5
    output_tokens = 1

    def __init__(self) -> None:
        self.record = RequestRecord(
            request=RequestId(str(id(self))), tokens=[0] * 4, prompt_tokens=4, max_tokens=100_000, seed=0
        )


def _request() -> Any:
    return _Asked()


def _drafting(costs: dict[int, float] = CPU) -> Drafting:
    made = Drafting(EachAlone(lambda _: Counting()), 3)
    for tokens, ms in costs.items():
        made.costs.measured(tokens, ms / 1e3)
    return made


def test_the_most_tokens_per_second_win() -> None:
    costs = _drafting().costs
    assert costs.worth(1, [1.0, 1.0, 1.0]) == 3
    assert costs.worth(1, [0.5, 0.25, 0.125]) == 2
    assert costs.worth(1, [0.2, 0.04, 0.008]) == 0, "1.2 tokens in 1.22 times the time"
    assert costs.worth(4, [0.6, 0.3]) == 0, "a fifth row costs a third of a step"


def test_nothing_is_drafted_where_more_tokens_take_as_much_longer() -> None:
    costs = StepCosts()
    for tokens in range(1, 40):
        costs.measured(tokens, 0.01 * tokens)
    assert costs.worth(16, [0.9] * 16) == 0


def test_what_was_never_measured_is_tried() -> None:
    costs = StepCosts()
    assert costs.worth(1, [0.1, 0.01]) == 2, "nothing is known yet"
    costs.measured(3, 0.03)
    assert costs.worth(1, [0.1, 0.01]) == 0, "a step without drafts comes first"
    costs.measured(1, 0.01)
    assert costs.worth(1, [0.1, 0.01]) == 1, "so far two tokens cost no more than one"


def test_one_slow_step_is_not_believed() -> None:
    costs = _drafting().costs
    costs.measured(4, 9.0)
    assert costs.of(4) < 2 * 0.0258


def test_a_request_whose_drafts_are_never_drawn_has_none_soon() -> None:
    """And one whose are, has them at once: what is measured is of each request."""
    made, good, bad = _drafting(), _request(), _request()
    for _ in range(30):
        for request, drawn in ((good, 3), (bad, 0)):
            drafts = made.propose([(request, 3)], 1, 8).get(request, [])
            made.stepped(request, len(drafts), min(drawn, len(drafts)))
    counts = dict.fromkeys(("good", "bad"), 0)
    for _ in range(OTHER_WAY):
        counts["good"] += len(made.propose([(good, 3)], 1, 8).get(good, []))
        counts["bad"] += len(made.propose([(bad, 3)], 1, 8).get(bad, []))
    assert counts["good"] >= 3 * (OTHER_WAY - 2)
    assert counts["bad"] <= 9, "now and then it is tried"
    assert made.drawn_tokens > 60


def test_drafts_go_where_they_are_drawn() -> None:
    """Guards a batch whose room is shared evenly between who repeats itself and who does not."""
    made, good, bad = _drafting({1: 16.0, 2: 16.0, 3: 16.0, 4: 16.0, 5: 16.0, 6: 40.0}), _request(), _request()
    for _ in range(10):
        made.stepped(good, 3, 3)
        made.stepped(bad, 3, 0)
    given = made.propose([(bad, 3), (good, 3)], 2, 3)
    assert {"good": len(given[good]), "bad": len(given.get(bad, []))} == {"good": 3, "bad": 0}


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_row_has_no_more_drafts_than_it_may(most: int) -> None:
    """Guards blocks that are not there, and an answer's last token."""
    made, request = Drafting(EachAlone(lambda _: Counting()), 3), _request()
    assert made.propose([(request, most)], 1, 8) == {request: list(range(most))}


def test_a_drafter_whose_time_is_not_known_is_not_worth_it() -> None:
    costs = _drafting().costs
    assert costs.weighed(1, [1.0, 1.0], [1, 2]) == (0, 0.0)
    costs.proposed(Proposed([], forwards=((1, 1e-6),)))
    assert costs.worth(1, [1.0, 1.0], [1, 2]) == 2


def test_a_drafter_is_not_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _drafting()
    asked: list[object] = []
    monkeypatch.setattr(made.drafter, "propose", asked.append)
    assert made.propose([(_request(), 3)], 1, 0) == {} and not asked


@pytest.mark.parametrize("room", [0, 1, 2])
def test_room_is_kept(room: int) -> None:
    made = Drafting(EachAlone(lambda _: Counting()), 3)
    assert sum(map(len, made.propose([(_request(), 3), (_request(), 3)], 2, room).values())) == room


def test_who_waits_for_tokens_weighs_no_more_drafts_than_a_step_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards each step that is planned ahead: all drafts of all rows, of which a few could be had."""
    made, weighed = _drafting(), list[int]()
    of = made.costs.weighed
    monkeypatch.setattr(made.costs, "weighed", lambda rows, gains, *more: weighed.append(len(gains)) or of(rows, gains))
    assert made.awaits([_request() for _ in range(4)], 4, 2) is False
    assert weighed == [2]
    monkeypatch.setattr(made.drafter, "takes_time", True)
    monkeypatch.setattr(made.drafter, "unread", lambda asked: 0, raising=False)
    made.awaits([_request() for _ in range(4)], 4, 5)
    assert weighed == [2, 5]


class _Size(int):
    compared = 0

    def __lt__(self, other: int) -> bool:
        _Size.compared += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        _Size.compared += 1
        return int(self) > int(other)


def test_what_a_step_takes_is_found_among_many_sizes() -> None:
    """Guards a step's time on a worker that has had many sizes: it asks once for each draft."""
    costs = StepCosts()
    sizes = random.Random(0).sample(range(2, 2002, 2), 500)
    for size in sizes:
        costs.measured(_Size(size), 1e-3 * size)
    for asked in (1, min(sizes), min(sizes) + 1, 1000, 1001, max(sizes), 5000):
        assert costs.of(asked) == 1e-3 * max((size for size in sizes if size <= asked), default=0)
    _Size.compared = 0
    costs.of(1001)
    assert 0 < _Size.compared <= 10


def test_what_became_of_a_request_is_told_once() -> None:
    made, request = _drafting(), _request()
    made.stepped(request, 3, 2)
    made.stepped(request, 0, 0)
    made.forget(request)
    (told,) = made.take_outcomes()
    assert (told.drafted, told.drawn, told.steps, told.tokens_per_step) == (3, 2, 2, 2.0)
    assert (made.drafted_tokens, made.drawn_tokens) == (3, 2), "of all requests"
    made.forget(request)
    assert made.take_outcomes() == []


def test_who_waits_for_tokens_is_worth_it() -> None:
    made, request = _drafting(), _request()
    for _ in range(20):
        made.stepped(request, 3, 0)
    assert not made.awaits([request], 1, 8)
    for _ in range(60):
        made.stepped(request, 3, 3)
    assert made.awaits([request], 1, 8)
    assert not Drafting(None, 3).awaits([request], 1, 8)


def test_a_search_counts_as_all_of_its_rows() -> None:
    """Guards the step's memory, and what it is measured by: drafts beside a search took the room of its hypotheses."""
    bench = Fetching(128, max_batch=12, local_chunk_tokens=32)
    batch = bench.scheduler.batch
    batch.drafting.drafter = EachAlone(lambda _: Counting())
    assert bench.place("search", [1, 2, 3, 4], beams=BeamParams(width=8, answers=1), max_tokens=30)
    assert all(bench.place(f"r{n}", [n, 6, 7, 8], max_tokens=30) for n in range(4))
    drafted = 0
    for at in range(8):
        plan, _ = bench.scheduler.plan(float(at))
        assert plan is not None
        drawn = [tuple((100 + n, -float(n)) for n in range(r.candidates)) or 900 for r in plan.rows if r.draw]
        bench.scheduler.complete(plan, drawn, float(at))
        drafts = sum(row.drafts for row in plan.rows)
        assert len(plan.rows) + drafts <= 12 + batch.drafting.most
        drafted += drafts * (len(plan.rows) == 12)
    assert drafted, "the search has never had rows beside drafts"


class Small:
    """A draft model by its costs alone: milliseconds of a pass, of a token that is read, and how often it is
    right. It says no tokens that mean anything."""

    takes_time = True

    def __init__(self, pass_ms: float, read_ms: float, right: float, prompt: int = 40) -> None:
        self.pass_s, self.read_s, self.right, self.prompt = pass_ms / 1e3, read_ms / 1e3, right, prompt
        self.behind: dict[str, int] = {}
        self.read_tokens = 0

    def unread(self, asked: DraftWanted) -> int | None:
        return self.behind.setdefault(asked.record.request, self.prompt)

    def propose(self, asked: Sequence[DraftWanted]) -> Proposed:
        read = 0
        for one in asked:
            count = min(self.behind[one.record.request], 64 - read)
            self.behind[one.record.request] -= count
            read += count
        self.read_tokens += read
        able = [one for one in asked if not self.behind[one.record.request]]
        depths = [sum(one.most > at for one in able) for at in range(max([one.most for one in able], default=0))]
        drafts = [[1] * one.most if one in able else [] for one in asked]
        passes = tuple((rows, self.pass_s * (1 + 0.1 * rows)) for rows in depths)
        return Proposed(drafts, read, read * self.read_s, passes)

    def forget(self, request: str) -> None:
        del self.behind[request]


def _served(drafter: Small | None, rows: int, steps: int, length: int = 100_000) -> tuple[float, int]:
    """Run so many steps of as many requests, of `length` tokens each; return tokens per second, and drafts."""
    made, chosen = Drafting(drafter, 3), random.Random(5)
    running, told = [_request() for _ in range(rows)], [0] * rows
    seconds = tokens = drafted = 0.0
    for _ in range(steps):
        drafts = made.propose([(one, 3) for one in running], rows, 3 * rows)
        count = sum(map(len, drafts.values()))
        some = sorted(CPU)
        lasted = CPU[max(n for n in some if n <= max(1, rows + count))] / 1e3 + made._proposing_s
        for at, request in enumerate(running):
            mine = drafts.get(request, [])
            drawn = 0
            while drawn < len(mine) and drafter is not None and chosen.random() < drafter.right:
                drawn += 1
            made.stepped(request, len(mine), drawn)
            if drafter is not None and request.record.request in drafter.behind:
                drafter.behind[request.record.request] += 1 + (drawn if not mine else 0)
                if mine:
                    drafter.behind[request.record.request] = 0
            tokens += 1 + drawn
            told[at] += 1 + drawn
            if told[at] >= length:
                made.forget(request)
                running[at], told[at] = _request(), 0
        made.lasted(rows, count, lasted, is_mixed=False)
        seconds += lasted
        drafted += count
    return tokens / seconds, int(drafted)


@pytest.mark.parametrize("length", [30, 300, 100_000])
@pytest.mark.parametrize(("pass_ms", "read_ms"), [(2.0, 0.3), (16.0, 4.0), (60.0, 20.0)])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_model_that_is_never_right_loses_little(
    rows: int, pass_ms: float, read_ms: float, length: int
) -> None:
    """Guards a worker that a bad draft model slows down: it is tried within a bound of all time, which holds for one
    that takes longer than the model itself, and for requests that come and go, each new to it."""
    without, _ = _served(None, rows, 4000)
    rate, drafted = _served(Small(pass_ms, read_ms, right=0.0), rows, 4000, length)
    assert rate > 0.95 * without, f"{rate / without:.3f}"
    assert drafted > 0, "it was tried"


def test_a_draft_model_that_takes_as_long_as_the_model_is_not_used_however_right() -> None:
    """Guards costs without the drafter's own: four rows cost little more than one, but each draft another pass."""
    without, _ = _served(None, 1, 4000)
    rate, drafted = _served(Small(16.0, 4.0, right=1.0), 1, 4000)
    assert rate > 0.95 * without and drafted < 300


def test_a_draft_model_that_is_quick_and_right_gains() -> None:
    for rows, least in ((1, 1.8), (2, 1.2)):
        without, _ = _served(None, rows, 2000)
        rate, _ = _served(Small(1.0, 0.1, right=0.9), rows, 2000)
        assert rate > least * without, f"{rows} rows: {rate / without:.2f}"


def test_it_comes_back_when_it_is_right_again() -> None:
    """Guards a worker that has given a draft model up for ever."""
    drafter = Small(1.0, 0.1, right=0.0)
    made, request, chosen = Drafting(drafter, 3), _request(), random.Random(1)
    counts = []
    for step in range(9000):
        drafter.right = 0.0 if step < 3000 else 0.95
        mine = made.propose([(request, 3)], 1, 3).get(request, [])
        drawn = next((at for at in range(len(mine)) if chosen.random() >= drafter.right), len(mine))
        made.stepped(request, len(mine), drawn)
        drafter.behind[request.record.request] = 0 if mine else drafter.behind.get(request.record.request, 0) + 1
        made.lasted(1, len(mine), CPU[1 + len(mine)] / 1e3 + made._proposing_s, is_mixed=False)
        counts.append(len(mine))
    assert sum(counts[2000:3000]) < 150 and sum(counts[-1000:]) > 2000


def _brought_in(drafter: "Small") -> Drafting:
    """Return what has seen eighty steps of one request, all of whose guesses were right; no trial is due."""
    made, known = Drafting(drafter, 3), _request()
    for _ in range(80):
        mine = made.propose([(known, 3)], 1, 3).get(known, [])
        made.stepped(known, len(mine), len(mine))
        drafter.behind[known.record.request] = 0
        made.lasted(1, len(mine), CPU[1 + len(mine)] / 1e3 + made._proposing_s, is_mixed=False)
    made.forget(known)
    made._trials_s = made._all_s  # no trial is due
    return made


def test_a_long_prompt_is_not_read_for_a_short_answer() -> None:
    """Guards the time of all others: an answer of five tokens brings in no reading of thousands."""
    drafter = Small(1.0, 0.1, right=0.9)
    made = _brought_in(drafter)
    for most, is_read in ((6, False), (4000, True)):
        new, before = _request(), drafter.read_tokens
        drafter.behind[new.record.request] = 3000
        new.record = msgspec.structs.replace(new.record, max_tokens=most)
        assert made.awaits([new], 1, 3) is is_read, "a step that is planned ahead waits for nothing"
        made.propose([(new, 3)], 1, 3)
        assert (drafter.read_tokens > before) is is_read


def test_a_reading_that_once_took_long_is_not_believed_for_ever() -> None:
    """Guards a draft model that is quick and right: one reading that had waited for a disk, and nothing was ever read
    again, since no request that was new seemed worth it."""
    drafter = Small(1.0, 0.1, right=1.0, prompt=10)
    made, counts = Drafting(drafter, 3), list[int]()
    for number in range(30):
        request = _request()
        request.record = msgspec.structs.replace(request.record, max_tokens=300)
        drafted = 0
        for step in range(100):
            drafter.read_s = 0.2 if (number, step) == (1, 0) else 1e-4
            mine = made.propose([(request, 3)], 1, 3).get(request, [])
            made.stepped(request, len(mine), len(mine))
            made.lasted(1, len(mine), CPU[1 + len(mine)] / 1e3 + made._proposing_s, is_mixed=False)
            drafted += len(mine)
        made.forget(request)
        drafter.prompt = 500
        counts.append(drafted)
    assert counts[0] > 200 and made.costs.reading_s(500) < 3.0
    assert min(counts[-5:]) > 200, counts


def test_a_step_is_measured_without_its_drafters_time() -> None:
    """Guards costs by tokens in which a step of two rows, and one of a row with a draft, are the same."""
    made, request = Drafting(Small(5.0, 1.0, right=1.0, prompt=10), 3), _request()
    assert len(made.propose([(request, 3)], 1, 3)[request]) == 3
    assert made.drafting_s == pytest.approx(0.0265) and made.read_tokens == 10
    assert made.lasted(1, 3, 0.0265 + 0.03, is_mixed=False) == pytest.approx(0.03)
    assert made.costs.of(4) == pytest.approx(0.03) and made.costs.reading_s(20) == pytest.approx(0.02)
    made.lasted(1, 0, 0.02, is_mixed=False)
    assert made.costs.of(1) == pytest.approx(0.02), "one that had none took none"


@pytest.mark.parametrize("worth", [False, True])
def test_one_choice_of_so_many_is_the_other_one(worth: bool) -> None:
    """Guards what was measured once against being believed for ever: both ways, as often as said, and then all or
    none."""
    costs = {1: 10.0, 2: 10.0, 3: 10.0} if worth else {1: 10.0, 2: 90.0, 3: 90.0}
    drafting = _drafting(costs)
    ranked = [_Draft(0.5, 1, _request()), _Draft(0.25, 2, _request())]
    chosen = [drafting._choose(1, ranked) for _ in range(2 * OTHER_WAY)]
    usual, other = (2, 0) if worth else (0, 2)
    assert chosen == [*[usual] * (OTHER_WAY - 1), other] * 2


def test_a_drafter_whose_time_is_not_known_is_on_trial() -> None:
    """Guards a worker that has just started: it read whole prompts with a draft model before it knew at what cost."""
    drafter = Small(60.0, 20.0, right=0.0, prompt=200)
    made, request, all_s, longest_s = Drafting(drafter, 3), _request(), 0.0, 0.0
    for _ in range(400):
        made.propose([(request, 3)], 1, 3)
        longest_s = max(longest_s, made._proposing_s)
        lasted = CPU[1] / 1e3 + made._proposing_s
        made.lasted(1, 0, lasted, is_mixed=False)
        all_s += lasted
    assert drafter.read_tokens == 64, "once: 1.3 s, and 6.5 s of steps are no fifty times that"
    assert made.drafting_s == longest_s


@pytest.mark.parametrize("left", [5, 50])
def test_reading_is_worth_what_the_tokens_that_are_left_save(left: int) -> None:
    """Guards the time of all others against a prompt that takes half a token longer to read than its answer saves."""
    drafter = Small(1.0, 0.1, right=1.0)
    made = _brought_in(drafter)
    for tokens, is_read in ((left - 0.5, True), (left + 0.5, False)):
        new = _request()
        new.record = msgspec.structs.replace(new.record, max_tokens=left + new.output_tokens)
        saved_s = made._weighed(1, made._ranked([(new, 3)]))[1]
        drafter.behind[new.record.request] = int(tokens * saved_s / made.costs.reading_s(1))
        assert made.awaits([new], 1, 3) is is_read


def test_a_drafter_that_is_not_worth_its_time_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a step against the call itself: a draft model counts by its calls whose blocks are idle."""
    drafter = Small(60.0, 20.0, right=0.0)
    made = Drafting(drafter, 3)
    made.costs.measured(1, 0.01)
    made.costs.proposed(Proposed([], forwards=((1, 9.0),)))
    made._trials_s, made._all_s = 9.0, 9.0  # no trial is due
    asked: list[object] = []
    monkeypatch.setattr(drafter, "propose", asked.append)
    assert made.propose([(_request(), 3)], 1, 3) == {} and not asked


def test_a_trial_that_found_nothing_took_its_drafters_time_alone() -> None:
    """Guards drafters against being thought dear: a step that was slow by itself counted as theirs."""
    made = Drafting(Small(60.0, 20.0, right=0.0, prompt=20), 3)
    made.costs.measured(1, 0.01)
    made.propose([(_request(), 3)], 1, 3)
    assert made._is_trial and made._proposing_s > 0.0
    took_s = made._proposing_s
    made.lasted(1, 0, took_s + 0.5, is_mixed=False)
    assert made._trials_s == took_s


def test_what_is_tried_is_one_draft_of_whoever_is_read_soonest() -> None:
    """Guards the bound of what trials cost: one that is not thought to be worth it is tried, and no more of it."""
    drafter = Small(60.0, 20.0, right=0.0)
    made, one, other = Drafting(drafter, 3), _request(), _request()
    for tokens, ms in CPU.items():
        made.costs.measured(tokens, ms / 1e3)
    made.costs.proposed(Proposed([], forwards=((1, 9.0),)))
    drafter.behind.update({one.record.request: 20, other.record.request: 5})
    assert made._wanted(drafter, [(one, 3), (other, 3)], 1, 8) == ({other: 1}, True)


def test_of_a_request_that_had_no_step_nothing_is_told() -> None:
    """Guards the figures of drafts: requests that were only ranked would count among those that had none drawn."""
    made, ranked, stepped = _drafting(), _request(), _request()
    for request in (ranked, stepped):
        made._guessed(request)
    made.stepped(stepped, 3, 2)
    for request in (ranked, stepped):
        made.forget(request)
    assert [(one.drafted, one.drawn, one.steps) for one in made.take_outcomes()] == [(3, 2, 1)]

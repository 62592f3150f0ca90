"""How many drafts a step has, by what was measured."""

from typing import Any

import pytest

from decode_worker.scheduler.drafting import OTHER_WAY, Drafting, StepCosts
from engine.types import BeamParams
from tests.decode_worker.scheduler.bench import Fetching

CPU = {1: 16.2, 2: 19.7, 3: 22.7, 4: 25.8, 5: 34.3, 6: 38.4, 8: 46.7}
"""Milliseconds of a step by its tokens, as once measured with the demo's model."""


class Counting:
    def propose(self, tokens: Any, most: int) -> list[int]:
        return list(range(most))


class _Asked:
    tokens = (0,) * 5
    record = None


def _request() -> Any:
    return _Asked()


def _drafting(costs: dict[int, float] = CPU) -> Drafting:
    made = Drafting(lambda _: Counting(), 3)
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


@pytest.mark.parametrize("room", [0, 1, 2])
def test_room_is_kept(room: int) -> None:
    made = Drafting(lambda _: Counting(), 3)
    assert sum(map(len, made.propose([(_request(), 3), (_request(), 3)], 2, room).values())) == room


def test_what_became_of_a_request_is_told_once() -> None:
    made, request = _drafting(), _request()
    made.stepped(request, 3, 2)
    made.stepped(request, 0, 0)
    made.forget(request)
    (told,) = made.take_outcomes()
    assert (told.drafted, told.drawn, told.steps, told.tokens_per_step) == (3, 2, 2, 2.0)
    made.forget(request)
    assert made.take_outcomes() == []


def test_who_waits_for_tokens_is_worth_it() -> None:
    made, request = _drafting(), _request()
    for _ in range(20):
        made.stepped(request, 3, 0)
    assert not made.awaits([request], 1)
    for _ in range(60):
        made.stepped(request, 3, 3)
    assert made.awaits([request], 1)
    assert not Drafting(None, 3).awaits([request], 1)


def test_a_search_counts_as_all_of_its_rows() -> None:
    """Guards the step's memory, and what it is measured by: drafts beside a search took the room of its hypotheses."""
    bench = Fetching(128, max_batch=12, local_chunk_tokens=32)
    batch = bench.scheduler.batch
    batch.drafting.new = lambda _: Counting()
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


@pytest.mark.parametrize("worth", [False, True])
def test_one_choice_of_so_many_is_the_other_one(worth: bool) -> None:
    """Guards what was measured once against being believed for ever: both ways, as often as said, and then all or
    none."""
    costs = {1: 10.0, 2: 10.0, 3: 10.0} if worth else {1: 10.0, 2: 90.0, 3: 90.0}
    drafting = _drafting(costs)
    chosen = [drafting._choose(1, [0.5, 0.25]) for _ in range(2 * OTHER_WAY)]
    usual, other = (2, 0) if worth else (0, 2)
    assert chosen == [*[usual] * (OTHER_WAY - 1), other] * 2

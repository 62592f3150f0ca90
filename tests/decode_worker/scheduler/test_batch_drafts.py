"""Drafts in the batch: which requests have them, how many, and what is known when the step has ended. What drafts are
worth is tried in test_drafting.py, that no answer depends on them in tests/integration/test_speculation.py."""

from collections.abc import Sequence

import pytest

from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.drafting import Drafting
from engine.drafts import EachAlone
from engine.messages import Tokens
from engine.step import DrawnRun, StepPlan
from engine.types import BeamParams
from tests.decode_worker.scheduler.bench import Fetching

PROMPT = [7] * 6


class Guessing:
    """Guesses 50, 51, 52, ..."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        return list(range(50, 50 + most))


def _bench(blocks: int = 32, most: int = 3, **config: object) -> Fetching:
    bench = Fetching(blocks, **config)
    bench.scheduler.batch.drafting = Drafting(EachAlone(lambda _: Guessing()), most)
    return bench


def _batch(bench: Fetching) -> Batch:
    return bench.scheduler.batch


def _plan(bench: Fetching) -> StepPlan:
    plan, _ = bench.scheduler.plan(bench.now)
    assert plan is not None
    return plan


def _running(bench: Fetching, name: str = "a", **more: object) -> None:
    """Have a request whose first token is known; nothing has been drafted for it."""
    assert bench.place(name, PROMPT, **more)  # type: ignore[arg-type]
    bench.step()


def test_drafts_stand_behind_a_rows_own_tokens_and_count_as_they_are_drawn() -> None:
    """Guards a row whose drafts are its own tokens, blocks that they would be written beyond, and KV that is taken
    for a drawn token's though another was drawn."""
    bench = _bench()
    _running(bench, max_tokens=12)
    plan = _plan(bench)
    (row,) = plan.rows
    assert [*row.tokens] == [*PROMPT, 1, 50, 51, 52] and (row.start, row.end, row.drafts) == (6, 10, 3)
    request = bench.request("a")
    assert len(request.lease.blocks) == 3, "for ten tokens"
    bench._do(bench.scheduler.complete(plan, [DrawnRun((50, 51, 9))], 1.0))
    assert request.tokens == [*PROMPT, 1, 50, 51, 9] and request.known == 9
    batch = _batch(bench)
    assert (batch.drawn_drafts, batch.running_rows) == (2, 1)
    assert (batch.generated_tokens, batch.forced_tokens) == (4, 0), "each of them was drawn"
    assert (batch.drafting.drafted_tokens, batch.drafting.drawn_tokens) == (3, 2)
    assert [record.ids for record in bench.of(Tokens) if isinstance(record, Tokens)][-1] == [50, 51, 9]
    plan = _plan(bench)
    assert (plan.rows[0].start, plan.rows[0].end) == (9, 13)
    bench._do(bench.scheduler.complete(plan, [8], 2.0))
    assert request.known == 10 and batch.drawn_drafts == 0, "none of them was drawn"


def test_nothing_is_drafted_beyond_an_answers_last_token() -> None:
    """Guards tokens that nobody asked for, and a row of drafts for one that ends with what it draws."""
    bench = _bench()
    _running(bench, max_tokens=3)
    plan = _plan(bench)
    assert plan.rows[0].drafts == 1, "one is said, one is drawn, so one may come between"
    bench._do(bench.scheduler.complete(plan, [4], 1.0))
    assert not _batch(bench)._may_be_drafted(bench.request("a")), "no step is held back for its drafts"
    assert _plan(bench).rows[0].drafts == 0


@pytest.mark.parametrize("why", ["a prompt is computed here", "a search", "it departs", "no drafter"])
def test_who_has_no_drafts(why: str) -> None:
    """Guards a step that is longer than its memory was counted for, a search's list of candidates, and a token of one
    that departs, behind which its next worker goes on."""
    bench = _bench(local_chunk_tokens=8)
    beams = BeamParams(width=2, answers=1) if why == "a search" else None
    _running(bench, max_tokens=12, beams=beams)
    if why == "a prompt is computed here":
        assert bench.place("b", [8] * 30)
    elif why == "it departs":
        bench.request("a").yielding = True
    elif why == "no drafter":
        _batch(bench).drafting.drafter = None
    may = _batch(bench)._may_be_drafted(bench.request("a"))
    assert may == (why not in ("a search", "it departs")), "a step is not held back for drafts that never come"
    assert not any(row.drafts for row in _plan(bench).rows)


def test_of_a_search_no_drafts_are_told() -> None:
    """Guards the figures of drafts: searches, which have none, would count among those that had none drawn."""
    bench = _bench()
    _running(bench, max_tokens=3, beams=BeamParams(width=2, answers=1))
    plan = _plan(bench)
    (row,) = plan.rows
    drawn = tuple((5 + n, -0.1 * n) for n in range(row.candidates))
    assert drawn
    bench._do(bench.scheduler.complete(plan, [drawn], 1.0))
    assert not _batch(bench).drafting._of


def test_forced_tokens_come_before_drafts() -> None:
    """Guards drafts that would be drawn in the places of tokens that a grammar forces, and that are not computed."""
    bench = _bench()
    drafting = _batch(bench).drafting
    drafting.drafter, guessing = None, drafting.drafter
    _running(bench, max_tokens=12)
    plan = _plan(bench)
    bench._do(bench.scheduler.complete(plan, [DrawnRun((2, 3, 4))], 1.0))
    request = bench.request("a")
    assert request.tokens == [*PROMPT, 1, 2, 3, 4] and request.known == 7
    assert _batch(bench).forced_tokens == 2
    drafting.drafter = guessing
    plan = _plan(bench)
    assert [(row.start, row.end, row.drafts) for row in plan.rows] == [(7, 10, 0)]
    bench._do(bench.scheduler.complete(plan, [5], 2.0))
    assert _plan(bench).rows[0].drafts == 3


@pytest.mark.parametrize(("left", "drafts"), [(1, 1), (2, 3)])
def test_drafts_take_a_block_only_where_each_row_has_one_beside(left: int, drafts: int) -> None:
    """Guards rows without a block for their next token, which a draft had; and drafts that are cut short although a
    block is there for them."""
    bench = _bench(blocks=6, growth_tokens=4)
    _running(bench, max_tokens=9)
    request, kv = bench.request("a"), bench.scheduler.kv
    assert kv.room_tokens(request.lease) == 12
    plan = _plan(bench)
    assert plan.rows[0].drafts == 3
    bench._do(bench.scheduler.complete(plan, [DrawnRun((50, 51, 52, 9))], 1.0))
    others = kv.acquire(b"", [], match_limit=0, room_tokens=4 * (kv.available - left))
    assert others is not None and kv.available == left and len(request.tokens) == 11
    # Behind eleven tokens three drafts take a fourth block; the last that is free is for who runs.
    assert _plan(bench).rows[0].drafts == drafts
    assert kv.available == 1


def test_nothing_is_planned_behind_a_step_with_drafts() -> None:
    """Guards a row that goes on at a place that is not known yet."""
    bench = _bench()
    _running(bench, max_tokens=12)
    bench.step()
    batch = _batch(bench)
    assert batch.running and not batch.goes_on(), "its drafts are worth waiting for"
    batch.drafting.costs.measured(1, 0.01)
    batch.drafting.costs.measured(2, 0.1)
    assert batch.goes_on(), "and now they are not"
    batch.drafting = Drafting(EachAlone(lambda _: Guessing()), 3)
    assert _plan(bench).rows[0].drafts == 3
    batch.drafting.drafter = None
    assert not batch.goes_on(), "nobody waits for drafts, but how far the row comes is not known"


def test_a_step_has_as_many_drafts_as_a_full_batch_has_rows() -> None:
    """Guards a step's memory: of the logits of a full batch, or of one row with all of its drafts."""
    bench = _bench(max_batch=4)
    for name in "ab":
        _running(bench, name, max_tokens=20)
    batch = _batch(bench)
    batch.drafting = Drafting(EachAlone(lambda _: Guessing()), 3)
    plan = _plan(bench)
    assert sum(row.drafts for row in plan.rows) == 3, "two rows leave room for two, but one row may have three"


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_drafts_take_all_of_what_a_step_has_room_for(room: int) -> None:
    """Guards the last of them: a token of its own each row has beside."""
    bench = _bench(local_chunk_tokens=room)
    assert bench.place("a", PROMPT, max_tokens=20)
    while not _batch(bench).running:
        bench.step()
    _batch(bench).drafting = Drafting(EachAlone(lambda _: Guessing()), 3)
    assert _plan(bench).rows[0].drafts == min(room, 3)


def test_a_copy_that_is_under_way_is_not_made_again() -> None:
    """Guards a fork's first block: the second copy would come behind what its first step wrote."""
    bench = Fetching(local_chunk_tokens=2)
    bench.place("a", [5] * 6, max_tokens=8)
    for _ in range(4):
        bench.step()
    assert bench.place("b", [5] * 6, fork_of="a", max_tokens=8)
    fork = bench.request("b")
    assert len(fork.lease.copies) == 1
    first, _ = bench.scheduler.plan(bench.now)
    second, _ = bench.scheduler.plan(bench.now)
    assert first is not None and len(first.copies) == 1
    assert fork.lease.steps == 1, "a step under way counts once"
    assert second is None or second.copies == ()


@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_step_with_drafts_says_nothing_of_the_pace(has_drafts: bool) -> None:
    """Guards the part of a step that prompts have: rows with drafts take longer, and rows are priced without."""
    bench = _bench() if has_drafts else Fetching(32)
    batch, measured = _batch(bench), list[tuple[int, int, float]]()
    batch.pace.measured = lambda *what: measured.append(what)  # type: ignore[method-assign]
    _running(bench, max_tokens=12)
    plan = _plan(bench)
    assert (plan.rows[0].drafts > 0) == has_drafts
    bench._do(bench.scheduler.complete(plan, [9], 1.0))
    batch.lasted(0.25)
    assert measured == ([] if has_drafts else [(1, 0, 0.25)])

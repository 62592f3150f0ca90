"""What a step holds: rows, chunks, and who waits for either. Beam rows are tried in test_beams.py, what the rows
compute in tests/integration/test_colocated_fake.py, and every order of events in tests/sim."""

import pytest

from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.request import RequestState
from engine.config import EngineConfig
from engine.messages import Cancel, Ended
from engine.step import DrawnRun
from engine.types import BeamParams, FinishReason, RequestId
from tests.decode_worker.scheduler.bench import POOL, Fetching
from worker.config import DecodeConfig


def _prompt(number: int, length: int = 8) -> list[int]:
    return list(range(100 * number, 100 * number + length))


def test_a_step_has_rows_for_so_many_and_the_others_wait_in_their_order() -> None:
    bench = Fetching(max_batch=2)
    for number, name in enumerate("abc", 1):
        assert bench.place(name, _prompt(number))
    bench.step()
    batch = bench.scheduler.batch
    assert [r.record.request for r in batch.local] == ["c"], "the first two are prefilled"
    for _ in range(2):
        bench.step()
        assert [r.record.request for r in batch.running] == ["a", "b"]
    assert [r.record.request for r in batch.ready] == ["c"], "prefilled beside them, as a step always has room for one"


def test_prompts_that_are_computed_here_share_a_budget_beside_the_running() -> None:
    """Guards inter-token latency: a long prompt computed at once would hold up who is decoding."""
    bench = Fetching(local_chunk_tokens=6)
    batch = bench.scheduler.batch
    counted = (batch.generated_tokens, batch.forced_tokens, batch.prefilled_tokens, batch.hit_tokens)
    assert (*counted, batch.recomputed_tokens, batch.running_rows, batch.drawn_drafts) == (0,) * 7
    bench.place("a", _prompt(1, 4))
    bench.step()
    bench.place("b", _prompt(2, 20))
    sizes = []
    for _ in range(4):
        plan = bench.step()
        assert plan is not None
        sizes.append({row.request: row.end - row.start for row in plan.rows})
    assert sizes == [{"a": 1, "b": 6}, {"a": 1, "b": 6}, {"a": 1, "b": 6}, {"a": 1, "b": 2}]
    assert (batch.generated_tokens, batch.prefilled_tokens, batch.recomputed_tokens) == (6, 24, 0)
    assert batch.forced_tokens == 0, "a first token is drawn like any"


def test_the_step_behind_one_that_is_under_way_goes_on_behind_it() -> None:
    """Guards a chunk that would be computed twice."""
    bench = Fetching(local_chunk_tokens=8)
    bench.place("a", _prompt(1, 16), max_tokens=4)
    plans = [bench.scheduler.plan(0.0)[0] for _ in range(2)]
    rows = [(row.start, row.end, row.draw) for plan in plans if plan is not None for row in plan.rows]
    assert rows == [(0, 8, False), (8, 16, True)]
    assert bench.scheduler.batch.is_under_way and not bench.request("a").known


def test_who_has_no_block_for_its_next_token_has_no_row() -> None:
    """Guards against a step that writes beyond its blocks: the row comes back with the room."""
    bench = Fetching(5, growth_tokens=4, preemption="recompute")
    bench.place("a", _prompt(1, 7), max_tokens=9)
    bench.step()
    lease = bench.scheduler.kv.acquire(b"", [], match_limit=0, room_tokens=8)
    assert lease is not None and not bench.scheduler.kv.available
    while (plan := bench.step()) is not None:
        assert len(plan.rows) == 1
    assert len(bench.request("a").tokens) == 13, "twelve rows are in three blocks, a thirteenth is not"
    bench.scheduler.kv.release(lease)
    plan = bench.step()
    assert plan is not None and plan.rows[0].end == 13


def test_a_prompt_without_a_share_of_the_step_has_no_row() -> None:
    """Guards steps with rows of no tokens, and more of them than the step's memory was counted for."""
    bench = Fetching(max_batch=1, local_chunk_tokens=4)
    bench.place("a", _prompt(1, 4))
    numbers = []
    for _ in range(2):
        plan = bench.step()
        assert plan is not None and [row.request for row in plan.rows] == ["a"]
        numbers.append(plan.number)
    for number, name in enumerate("bc", 2):
        bench.place(name, _prompt(number, 20))
    plan = bench.step()
    assert plan is not None and [row.request for row in plan.rows] == ["a", "b"], "one beside a full batch"
    assert [*numbers, plan.number] == [1, 2, 3]
    wide = Fetching(max_batch=8, local_chunk_tokens=4)
    for number, name in enumerate("bc", 2):
        wide.place(name, _prompt(number, 20))
    plan = wide.step()
    assert plan is not None and [(row.request, row.end - row.start) for row in plan.rows] == [("b", 4)]


def test_rows_of_who_departs_are_rows_of_the_step() -> None:
    """Guards the step's memory where a worker leaves: for so many rows it was counted."""
    bench = Fetching(max_batch=3)
    for number, name in enumerate("abc", 1):
        assert bench.place(name, _prompt(number))
    plan, _ = bench.scheduler.plan(1.0)
    assert plan is not None
    bench.scheduler.complete(plan, [1] * sum(row.draw for row in plan.rows), 1.0)
    batch = bench.scheduler.batch
    assert len(batch.ready) == 3
    batch.fill(1.0, 2)
    assert len(batch.running) == 1
    batch.fill(1.0, 1)
    assert len(batch.running) == 2
    batch.fill(1.0)
    assert len(batch.running) == 3


def test_a_search_takes_as_many_rows_as_it_is_wide() -> None:
    """Guards the step's memory: two searches of two hypotheses are four rows, not two."""
    bench = Fetching(max_batch=3)
    beams = BeamParams(width=2, answers=1)
    for number, name in enumerate("ab", 1):
        assert bench.place(name, _prompt(number), beams=beams)
    plan, _ = bench.scheduler.plan(1.0)
    assert plan is not None
    bench.scheduler.complete(plan, [1] * sum(row.draw for row in plan.rows), 1.0)
    bench.scheduler.batch.fill(1.0)
    batch = bench.scheduler.batch
    assert [r.record.request for r in batch.running] == ["a"] and [r.record.request for r in batch.ready] == ["b"]
    assert batch.generated_tokens == 0, "a search says nothing yet"
    request = bench.request("a")
    plan = batch.plan([], 1.0)
    assert plan is not None and plan.rows[0].candidates and batch.search(request, ((5, -0.1), (6, -0.2))) is None
    assert batch.generated_tokens == 1


def test_a_forks_copy_is_made_once_and_its_source_let_go() -> None:
    """Guards the parent's block: it would stay held, and be copied over what the fork has written since."""
    bench = Fetching()
    assert bench.place("a", _prompt(1, 10), POOL) and bench.place("b", _prompt(1, 10), POOL, fork_of="a")
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    copied = []
    for _ in range(3):
        plan = bench.step()
        assert plan is not None
        copied.append(len(plan.copies))
    assert copied == [1, 0, 0] and bench.request("b").lease.copies == []


def test_the_time_of_a_request_goes_into_its_stages() -> None:
    """Guards the account of the tokens' own time: from the first row in the batch to the end. A step takes no time
    here; between two is a second."""
    bench = Fetching()
    bench.place("a", _prompt(1), max_tokens=4)
    for _ in range(4):
        bench.step()
    ended = bench.last(Ended)
    assert isinstance(ended, Ended)
    assert ended.stats.stages == {
        "prefill_queue": 1.0, "prefill_run": 0.0, "migrate": 0.0, "decode_queue": 1.0, "decode_run": 2.0
    }
    assert bench.scheduler.batch.generated_tokens == 4


def test_what_a_token_costs_here_is_measured_over_those_that_were_computed() -> None:
    """Guards the price that decides between computing and loading: cached tokens cost nothing."""
    bench = Fetching(local_chunk_tokens=4)
    bench.place("a", _prompt(1, 12), max_tokens=1)
    while bench.step() is not None:
        pass
    costs = bench.scheduler.swapping.costs
    costs.here_s = 0.0
    bench.place("b", [*_prompt(1, 4), *_prompt(5, 8)])
    while bench.request("b").state is RequestState.LOCAL:
        bench.step()
    assert costs.here_s == 1.0 / 8, "from the first step to the second, eight tokens"


def test_a_searchs_prompt_is_known_but_for_its_last_token() -> None:
    """Guards a shared block: each hypothesis computes the prompt's last row again, so its block must not be indexed."""
    bench = Fetching()
    bench.place("a", _prompt(1, 8), beams=BeamParams(width=2, answers=1))
    plan, _ = bench.scheduler.plan(1.0)
    assert plan is not None
    bench.scheduler.complete(plan, [1], 1.0)
    assert bench.request("a").state is RequestState.READY and bench.request("a").known == 7
    assert bench.scheduler.kv.matched_tokens(b"", _prompt(1, 8), 8) == 4
    plan, _ = bench.scheduler.plan(2.0)
    assert plan is not None and plan.rows[0].candidates
    bench.scheduler.complete(plan, [((5, -0.1), (6, -0.2), (7, -0.3), (8, -0.4))], 2.0)
    assert bench.request("a").known == 7, "what its hypotheses have is their own"


@pytest.mark.parametrize("left", [1, 2])
def test_the_row_of_one_that_ends_by_number_is_given_away_behind_its_last_step(left: int) -> None:
    """Guards a row for a token that nobody asked for, and one that stays empty for a step; but nobody loses its row a
    token early."""
    bench = Fetching(max_batch=1)
    assert bench.place("a", _prompt(1), max_tokens=3 + left) and bench.place("b", _prompt(2), max_tokens=9)
    bench.step()
    bench.step()
    bench.step()
    batch = bench.scheduler.batch
    assert [r.record.request for r in batch.ready] == ["b"] and bench.request("a").output_tokens == 3
    first, _ = bench.scheduler.plan(bench.now)
    second, _ = bench.scheduler.plan(bench.now)
    assert first is not None and [row.request for row in first.rows] == ["a"]
    assert second is not None and [row.request for row in second.rows] == ["b" if left == 1 else "a"]
    assert [r.record.request for r in batch.running] == (["a", "b"] if left == 1 else ["a"])
    bench._do(bench.scheduler.complete(first, [50], bench.now))
    bench._do(bench.scheduler.complete(second, [51], bench.now))
    assert "a" not in bench.scheduler._requests
    bench.scheduler.check()


def test_who_ends_with_the_step_under_way_needs_no_block_behind_it() -> None:
    """Guards planning ahead in a full pool: it would wait for the room of a row that there never is."""
    for max_tokens, goes_on in ((5, True), (6, False)):
        bench = Fetching(growth_tokens=4, preemption="recompute")
        assert bench.place("a", _prompt(1, 8), max_tokens=max_tokens)
        bench.step()
        request, kv, batch = bench.request("a"), bench.scheduler.kv, bench.scheduler.batch
        while request.output_tokens < 4:
            bench.step()
        assert kv.room_tokens(request.lease) == 12 and kv.promise(b"", kv.available) is not None
        plan, _ = bench.scheduler.plan(bench.now)
        assert plan is not None and plan.rows[0].end == 12
        assert batch.goes_on() == goes_on


def test_runs_share_what_a_step_has_room_for_beside_a_token_each() -> None:
    """Guards a step's memory: of two that are told five tokens at once the second computes one, and the
    rest is computed in the steps behind it; a row that stops before its newest token draws none."""
    bench = Fetching(local_chunk_tokens=4)
    for name, number in (("a", 1), ("b", 2)):
        assert bench.place(name, _prompt(number, 4), max_tokens=40)
    for _ in range(3):
        bench.step()
    run = DrawnRun((50, 51, 52, 53, 54, 55))
    plan, _ = bench.scheduler.plan(bench.now)
    assert plan is not None and [row.request for row in plan.rows] == ["a", "b"]
    bench._do(bench.scheduler.complete(plan, [run, run], bench.now))
    spans = []
    for drawn in ([], [7, 8]):
        plan, _ = bench.scheduler.plan(bench.now)
        assert plan is not None
        spans.append([(row.end - row.start, row.draw) for row in plan.rows])
        bench._do(bench.scheduler.complete(plan, drawn, bench.now))
        bench.scheduler.check()
    assert spans == [[(5, False), (1, False)], [(1, True), (5, True)]]


def test_beside_a_full_batch_one_prompt_is_computed_however_short() -> None:
    """Guards the rows that a step's memory was counted for."""
    bench = Fetching(max_batch=1, local_chunk_tokens=64)
    assert bench.place("a", _prompt(1, 4), max_tokens=20)
    bench.step()
    for number, name in enumerate("bcd", 2):
        assert bench.place(name, _prompt(number, 4))
    plan = bench.step()
    assert plan is not None and [row.request for row in plan.rows] == ["a", "b"]
    wide = Fetching(max_batch=3, local_chunk_tokens=64)
    for number, name in enumerate("abcd", 1):
        assert wide.place(name, _prompt(number, 4))
    plan = wide.step()
    assert plan is not None and [row.request for row in plan.rows] == ["a", "b", "c"]


@pytest.mark.parametrize("run", [(50, 51), (50, 51, 52, 53)])
def test_behind_a_run_that_came_meanwhile_no_token_of_the_step_under_way_is_awaited(run: tuple[int, ...]) -> None:
    """Guards a row for a token that nobody draws: the step under way was planned for one token, its draw is dropped
    since that token came in a run, and what comes behind the run is not known before the run is computed."""
    bench = Fetching(local_chunk_tokens=8)
    assert bench.place("a", _prompt(1, 8), max_tokens=40)
    bench.step()
    request = bench.request("a")
    first, second = (bench.scheduler.plan(bench.now)[0] for _ in range(2))
    assert first is not None and second is not None and (second.rows[0].end, second.rows[0].draw) == (10, True)
    bench._do(bench.scheduler.complete(first, [DrawnRun(run)], bench.now))
    third, _ = bench.scheduler.plan(bench.now)
    assert third is not None
    (row,) = third.rows
    assert (row.start, row.end, row.draw, row.follows) == (10, 9 + len(run), True, False)
    bench._do(bench.scheduler.complete(second, [99], bench.now))
    bench._do(bench.scheduler.complete(third, [60], bench.now))
    assert request.output == [1, *run, 60] and request.known == 9 + len(run)
    bench.scheduler.check()


def test_what_a_step_says_of_one_that_has_ended_meanwhile_is_nobodys() -> None:
    """Guards a client that cancels: tokens came behind the end of its answer, which counted as written."""
    bench = Fetching()
    assert bench.place("a", _prompt(1)) and bench.place("b", _prompt(2))
    bench.step()
    batch = bench.scheduler.batch
    plan, _ = bench.scheduler.plan(bench.now)
    assert plan is not None and len(plan.rows) == 2
    request, before = bench.request("a"), batch.generated_tokens
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    told, known = len(bench.told), request.known
    assert request.state is RequestState.ENDING
    followed = batch.complete(plan, [50, 51])
    assert [(one.record.request, token) for one, token in followed] == [("b", 51)]
    assert request.known == known and batch.generated_tokens == before and len(bench.told) == told


def test_a_row_has_as_many_drafts_as_are_configured() -> None:
    config = DecodeConfig(engine=EngineConfig(draft_tokens=3))
    assert Batch(config, Fetching().scheduler.kv, frozenset()).drafting.most == 3


def test_a_prompts_token_is_predicted_beside_those_that_run() -> None:
    """Guards what a router is told of prompts here: they are as slow as beside this batch, not a larger one."""
    bench = Fetching()
    batch, asked = bench.scheduler.batch, list[int]()
    batch.pace.s_per_token = lambda rows: asked.append(rows) or 0.5  # type: ignore[method-assign, func-returns-value]
    assert batch.s_per_prompt_token == 0.5
    for number, name in enumerate("ab", 1):
        assert bench.place(name, _prompt(number))
        bench.step()
        bench.step()
    asked.clear()
    assert len(batch.running) == 2 and batch.s_per_prompt_token == 0.5 and asked == [2]

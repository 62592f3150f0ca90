"""Asynchronous scheduling through both schedulers, with the fake model, for which one wrong KV byte is a wrong token.
The answers are those of planning one step at a time, whatever ends, waits or gives way while a step runs. That a device
may compute as late as it is waited for is the simulator's to show (`tests.sim.shadow`)."""

import random

import pytest
from hypothesis import given, settings

from decode_worker.scheduler.events import FromRouter
from engine.messages import Cancel
from engine.types import BeamParams, FinishReason, RequestId, RequestRecord, SamplingParams
from fakes.colocated import LINK, Colocated, ColocatedAnswer
from tests.integration.crowd import ASKED, CROWD, LAYOUT, finish, prompt_of, record_of, serve, small_cluster, wanted

PLENTY = 64


def _both(records: list[RequestRecord], blocks: int = 64, **decode: object) -> tuple[list[ColocatedAnswer], Colocated]:
    """Run them one step at a time and planned ahead; return the answers of the second, which are those of the first."""
    answers: list[list[ColocatedAnswer]] = []
    for ahead in (False, True):
        cluster = small_cluster(blocks, PLENTY, ahead, **decode)
        answers.append([cluster.submit(record) for record in records])
        finish(cluster, answers[-1])
    for one, other in zip(*answers, strict=True):
        assert one.tokens == other.tokens
        assert one.ended is not None and other.ended is not None
        assert (one.ended.reason, one.ended.beams) == (other.ended.reason, other.ended.beams)
    return answers[1], cluster


def test_answers_are_those_of_one_step_at_a_time() -> None:
    records = [record_of(f"r{i}", prompt_of(i, 5 + 6 * i), 12 + i) for i in range(5)]
    answers, cluster = _both(records, max_batch=3)
    assert [answer.tokens for answer in answers] == [wanted(record) for record in records]
    assert cluster.decode.batch.generated_tokens == 12 + 13 + 14 + 15 + 16 and not cluster.decode.batch.is_under_way


def test_rows_follow_tokens_that_are_not_drawn_yet() -> None:
    """Guards that steps are planned ahead at all: after the first, each row follows, and no row comes behind the last
    token that is asked for."""
    cluster, follows = small_cluster(64, ahead=True), []
    launch = cluster._engines[1]._runner.launch

    def seen(plan):  # type: ignore[no-untyped-def]
        follows.append([row.follows for row in plan.rows])
        return launch(plan)

    cluster._engines[1]._runner.launch = seen  # type: ignore[method-assign]
    record = record_of("r", prompt_of(1, 9), 20)
    finish(cluster, [cluster.submit(record)])
    assert follows == [[False], *[[True]] * 18], "the prefill worker has drawn the first of 20"


def test_a_stop_is_found_one_step_late_and_what_follows_it_is_dropped() -> None:
    """Guards the row behind the token that ends a request: neither its token nor a block of it is left, and the tokens
    that are counted are the answer's."""
    plain = record_of("r", prompt_of(3, 10), 24)
    answer = wanted(plain)
    at = next(i for i in range(4, 20) if answer[i] not in answer[:i])
    ends = RequestRecord(
        request=RequestId("r"), tokens=plain.tokens, prompt_tokens=10, max_tokens=24, seed=1,
        sampling=plain.sampling, stop_token_ids=[answer[at]],
    )  # fmt: skip
    (got,), cluster = _both([ends])
    assert got.tokens == answer[: at + 1] and got.ended is not None and got.ended.reason is FinishReason.STOP
    assert cluster.decode.kv.matched_tokens(b"", plain.tokens + answer[:at], 10 + at) == 10 + at, "all of it is cached"


def test_a_search_waits_for_its_tokens_and_others_do_not_lose_theirs() -> None:
    beams = RequestRecord(
        request=RequestId("b"), tokens=prompt_of(5, 11), prompt_tokens=11, max_tokens=9, seed=1,
        sampling=SamplingParams(temperature=0.0), beams=BeamParams(width=3, answers=2), ignore_eos=True,
    )  # fmt: skip
    _both([record_of("a", prompt_of(4, 7), 16), beams, record_of("c", prompt_of(6, 13), 16)])


def test_min_tokens_bans_by_the_place_of_a_token_and_not_by_what_is_known() -> None:
    stops = list(range(0, 257, 2))
    record = RequestRecord(
        request=RequestId("m"), tokens=prompt_of(8, 9), prompt_tokens=9, max_tokens=20, seed=1,
        sampling=SamplingParams(temperature=0.0), stop_token_ids=stops, min_tokens=7,
    )  # fmt: skip
    cluster, banned = small_cluster(64, ahead=True), {}
    launch = cluster._engines[1]._runner.launch

    def seen(plan):  # type: ignore[no-untyped-def]
        for row in plan.rows:
            banned[row.end] = len(row.banned)
        return launch(plan)

    cluster._engines[1]._runner.launch = seen  # type: ignore[method-assign]
    finish(cluster, [cluster.submit(record)])
    assert [bool(banned.get(9 + n)) for n in range(1, 8)] == [True] * 6 + [False]


@pytest.mark.parametrize("turns", range(4, 14))
def test_a_request_cancelled_while_its_row_runs_gives_everything_back(turns: int) -> None:
    cluster = small_cluster(24, ahead=True)
    answers = [cluster.submit(record_of(f"r{i}", prompt_of(i, 9), 30)) for i in range(2)]
    for _ in range(turns):
        cluster.turn()
    cancel = Cancel(RequestId("r0"), 1, FinishReason.CANCELLED)
    cluster._engines[1].receive([FromRouter(LINK, cancel)])
    finish(cluster, answers)
    assert answers[1].tokens == wanted(answers[1].record)
    assert answers[0].tokens == wanted(answers[0].record)[: len(answers[0].tokens)]


@pytest.mark.parametrize(("host_blocks", "mode"), [(0, "recompute"), (PLENTY, "swap")])
def test_requests_give_way_to_each_other(host_blocks: int, mode: str) -> None:
    """Guards the pool that runs out while a step runs: nobody whose row is under way is preempted."""
    cluster = serve(CROWD, 14, 6, 4, host_blocks, mode, ahead=True)
    assert cluster.decode.preemption.preempted.total() > 2


@settings(max_examples=40, deadline=None)
@given(ASKED)
def test_crowds(asked: list[tuple[int, int, int, int, int, int]]) -> None:
    chosen = random.Random(str(asked))
    serve(asked, chosen.randrange(14, 24), chosen.choice((1, 6, 64)), chosen.choice((2, 8)), ahead=True)


def test_a_prompt_computed_in_chunks_is_offered_no_earlier_than_it_is_there() -> None:
    """Guards blocks that are offered as a step is launched: the prefill worker's copies would be of nothing."""
    cluster = small_cluster(64, ahead=True)
    engine = cluster._engines[0]
    launched, offered = [0], []
    launch, offer = engine._runner.launch, cluster.prefill.source.offer

    def seen(plan):  # type: ignore[no-untyped-def]
        launched[0] = max(row.end for row in plan.rows)
        return launch(plan)

    def told(handoff, lease, known_tokens):  # type: ignore[no-untyped-def]
        offered.append((known_tokens, launched[0]))
        return offer(handoff, lease, known_tokens)

    engine._runner.launch, cluster.prefill.source.offer = seen, told  # type: ignore[method-assign]
    record = record_of("r", prompt_of(2, 40), 4)
    finish(cluster, [answer := cluster.submit(record)])
    assert answer.tokens == wanted(record, LAYOUT)
    assert (8, 16) in offered and (32, 40) in offered, "the next chunk was launched by then"

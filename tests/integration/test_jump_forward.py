"""Tokens that a constraint forces take no step, and change nothing: the same requests with them told at once and drawn
one by one, with the fake model, whose next token depends on every KV byte."""

import itertools
import json
import random

import msgspec
import pytest

from engine.constraints.matchers import MAX_RUN_TOKENS
from engine.types import Constraint, ConstraintKind, FinishReason, RequestRecord, TokenLogprobs
from fakes.colocated import ColocatedAnswer
from tests.integration.crowd import finish, prompt_of, record_of, small_cluster
from tests.integration.fake_device import STOP_ID

RECORD = Constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps({
        "type": "object",
        "properties": {"considerate": {"type": "boolean"}, "kind": {"enum": ["kestrel", "kingfisher"]}},
        "required": ["considerate", "kind"],
        "additionalProperties": False,
    }),
)  # fmt: skip
DOTS = Constraint(ConstraintKind.REGEX, "([ab]\\.{7}){3}[0-9]")
LONG = Constraint(ConstraintKind.REGEX, "[a-z]=" + "0123456789" * 12 + "[a-z]")
MIXED = (RECORD, DOTS, LONG, None)


def _record(name: str, number: int, max_tokens: int, constraint: Constraint | None, **more: object) -> RequestRecord:
    record = record_of(name, prompt_of(number, 5 + 3 * number), max_tokens, constraint=constraint, **more)
    return msgspec.structs.replace(record, ignore_eos=constraint is None)


def _crowd(**more: object) -> list[RequestRecord]:
    return [_record(f"r{i}", i, 12 if i % 4 == 3 else 14 + 19 * i, MIXED[i % 4], **more) for i in range(8)]


def _run(records: list[RequestRecord], jumps: bool, **cluster: object) -> tuple[list[ColocatedAnswer], int, int]:
    """Return the answers, how many tokens were forced, and the steps of the decode worker."""
    made = small_cluster(**{"blocks": 200, **cluster}, jumps=jumps)  # type: ignore[arg-type]
    answers = [made.submit(record) for record in records]
    finish(made, answers)
    return answers, made.decode.batch.forced_tokens, made.decode.batch._steps


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_are_the_same_and_take_fewer_steps(ahead: bool) -> None:
    with_runs, forced, steps = _run(_crowd(), True, ahead=ahead)
    without, none, more_steps = _run(_crowd(), False, ahead=ahead)
    assert [a.tokens for a in with_runs] == [a.tokens for a in without]
    assert [a.ended.reason for a in with_runs if a.ended] == [a.ended.reason for a in without if a.ended]
    assert forced > 200 and none == 0
    assert steps < more_steps


@pytest.mark.parametrize("ahead", [False, True])
def test_an_answer_alone_takes_a_step_for_what_is_drawn(ahead: bool) -> None:
    """`[a-z]`, then 120 digits that come in runs, then `[a-z]`, and the end."""
    record = _record("r", 1, 150, LONG)
    (answer,), forced, steps = _run([record], True, ahead=ahead, growth_tokens=150)
    text = bytes(answer.tokens[:-1])
    assert text[1:-1] == b"=" + b"0123456789" * 12 and answer.tokens[-1] == STOP_ID
    # The letter and a whole run come from the prefill worker; then one more of the 121 with those that are left; then
    # the letter and the end. Planned ahead, a run has a step before it that draws nothing new.
    assert forced == MAX_RUN_TOKENS + (121 - MAX_RUN_TOKENS - 1) + 1
    assert steps <= (4 if ahead else 2)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("max_tokens", range(1, 26))
def test_a_limit_cuts_a_run(max_tokens: int, ahead: bool) -> None:
    (whole,), _, _ = _run([_record("r", 2, 200, DOTS)], False)
    (answer,), _, _ = _run([_record("r", 2, max_tokens, DOTS)], True, ahead=ahead)
    assert answer.tokens == whole.tokens[:max_tokens]
    assert answer.ended is not None
    is_whole = max_tokens >= len(whole.tokens)
    assert answer.ended.reason is (FinishReason.STOP if is_whole else FinishReason.LENGTH)
    assert answer.ended.stats.output_tokens == len(answer.tokens)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stop_token_ends_a_run_in_its_middle(ahead: bool) -> None:
    (answer,), _, _ = _run([_record("r", 3, 200, LONG, stop_token_ids=(ord("5"),))], True, ahead=ahead)
    assert bytes(answer.tokens[1:]) == b"=012345"
    assert answer.ended is not None and answer.ended.reason is FinishReason.STOP


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_forced_is_certain(ahead: bool) -> None:
    """Guards log probabilities that depend on who was asked: a forced token has 0.0 and no alternatives, whether a step
    drew it or none; all others have the model's own."""
    with_runs, _, _ = _run(_crowd(logprobs=2), True, ahead=ahead)
    without, _, _ = _run(_crowd(logprobs=2), False, ahead=ahead)
    assert [a.logprobs for a in with_runs] == [a.logprobs for a in without]
    for answer in with_runs:
        assert [one.token for one in answer.logprobs] == answer.tokens
        certain = [one for one in answer.logprobs if not one.top]
        assert all(one == TokenLogprobs(one.token, 0.0) for one in certain)
        assert bool(certain) == (answer.record.constraint is not None)
        assert all(one.logprob < 0.0 and len(one.top) == 2 for one in answer.logprobs if one.top)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("host_blocks", "mode"), [(0, "recompute"), (64, "swap")])
def test_room_for_runs_is_made_by_others(ahead: bool, host_blocks: int, mode: str) -> None:
    """Guards a row whose run needs several blocks at once, where the pool has none: whoever gives way has computed less
    than it has told."""
    preempted = 0
    for blocks in (39, 45, 51):
        made = small_cluster(blocks, host_blocks, ahead, max_batch=6, preemption=mode)
        answers = [made.submit(record) for record in _crowd()]
        finish(made, answers)
        without, _, _ = _run(_crowd(), False)
        assert [a.tokens for a in answers] == [a.tokens for a in without]
        preempted += made.decode.preemption.preempted.total()
    assert preempted > 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_a_step_takes_no_more_of_a_run_than_it_has_room_for(chunk: int, ahead: bool) -> None:
    made = small_cluster(200, 0, ahead, local_chunk_tokens=chunk)
    largest = 0
    plan = made.decode.plan

    def planned(now: float) -> object:
        nonlocal largest
        found = plan(now)
        if found[0] is not None:
            largest = max(largest, found[0].computed_tokens - len(made.decode.batch.running))
        return found

    made.decode.plan = planned  # type: ignore[method-assign, assignment]
    answers = [made.submit(record) for record in _crowd()]
    finish(made, answers)
    without, _, _ = _run(_crowd(), False)
    assert [a.tokens for a in answers] == [a.tokens for a in without]
    assert largest <= chunk + 1, "a departing or local row beside the running ones is one token"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("turns", range(1, 14, 2))
def test_a_run_from_a_prefill_worker_outlives_it(turns: int, ahead: bool) -> None:
    """Its tokens are history as soon as they are told, whatever becomes of the blocks that were to come with them."""
    made = small_cluster(200, 0, ahead)
    records = [_record(f"r{i}", i + 2, 60, one) for i, one in enumerate((LONG, DOTS, RECORD))]
    answers = [made.submit(record) for record in records]
    for _ in range(turns):
        made.turn()
    made.lose_prefill()
    while not all(answer.ended for answer in answers):
        assert made.turn()
    without, _, _ = _run(records, False)
    assert [a.tokens for a in answers] == [a.tokens for a in without]


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_it_goes_on_behind_any_part_of_a_run(at: int) -> None:
    """A frame with half of a run is all that a router has of it when it places the request again."""
    record = _record("r", 4, 90, LONG)
    (whole,), _, _ = _run([record], False)
    again = msgspec.structs.replace(record, tokens=record.tokens + whole.tokens[:at])
    made = small_cluster(200)
    answer = made.submit(again)
    answer.tokens += whole.tokens[:at]
    finish(made, [answer])
    assert answer.tokens == whole.tokens


def test_random_stories() -> None:
    """Small pools and batches, planned ahead or not, requests that come at any time, runs of any length."""
    without, _, _ = _run(_crowd(), False)
    wanted = [answer.tokens for answer in without]
    for seed in range(16):
        chosen = random.Random(seed)
        made = small_cluster(
            chosen.randrange(39, 60), 48, chosen.random() < 0.5, max_batch=chosen.randrange(2, 6),
            preemption=chosen.choice(("recompute", "swap")), local_chunk_tokens=chosen.choice((2, 8, 64)),
            growth_tokens=chosen.choice((1, 4, 30)),
        )  # fmt: skip
        answers = []
        for record in _crowd():
            answers.append(made.submit(record))
            for _ in range(chosen.randrange(5)):
                made.turn()
        finish(made, answers)
        assert [answer.tokens for answer in answers] == wanted, seed


def test_samples_share_their_prompt_and_no_run() -> None:
    """Each sample is held to another constraint: the fake model has but one answer to a prompt."""
    prompt = prompt_of(7, 22)
    records = [
        msgspec.structs.replace(
            record_of(f"s{i}", prompt, 40, sample_index=i, group="s", constraint=one), ignore_eos=False
        )
        for i, one in enumerate((RECORD, DOTS, LONG))
    ]
    told = []
    for jumps, ahead in itertools.product((True, False), repeat=2):
        made = small_cluster(200, 0, ahead, jumps)
        answers = [made.submit(r, records[0].request if i else None) for i, r in enumerate(records)]
        finish(made, answers)
        assert made.decode.prefills.forks.forked == 2
        told.append([answer.tokens for answer in answers])
    assert all(one == told[0] for one in told)

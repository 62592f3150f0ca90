"""Constraints through both schedulers, with the fake model: whatever becomes of a request, its answer keeps its
constraint and is that of a request to which nothing happens.

The grammars are real, over a vocabulary of bytes; a token depends on every KV byte and on the whole mask, so that a
matcher that stands elsewhere gives another token.
"""

import json
import random
from collections.abc import Callable

import msgspec
import pytest

from decode_worker.scheduler.events import FromRouter
from engine.messages import Cancel
from engine.plan import row_of
from engine.types import Constraint, ConstraintKind, FinishReason, RequestId, RequestRecord
from fakes.colocated import LINK, Colocated, ColocatedAnswer
from fakes.model import fake_constrained
from fakes.vocabulary import byte_matchers
from tests.integration.crowd import LAYOUT, finish, prompt_of, record_of, small_cluster, wanted
from tests.integration.fake_device import STOP_ID, VOCAB

LETTERS = Constraint(ConstraintKind.REGEX, "([a-f]{3}-){6}[0-9]+\\.")
PAIRS = Constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps({
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "kind": {"enum": ["x", "yy", "zzz"]}, "n": {"type": "integer"}},
        "required": ["on", "kind"],
        "additionalProperties": False,
    }),
)  # fmt: skip
TREE = Constraint(ConstraintKind.LARK, 'start: item\nitem: "(" item item ")" | /[a-z]{1,3}/')
CONSTRAINTS = (LETTERS, PAIRS, TREE)


def constrained(name: str, prompt: list[int], max_tokens: int, constraint: Constraint, **more: object) -> RequestRecord:
    record = record_of(name, prompt, max_tokens, constraint=constraint, **more)
    return msgspec.structs.replace(record, ignore_eos=False)


def answer_of(record: RequestRecord) -> list[int]:
    """The answer as one process would give it that is asked for nothing else, with a matcher that is new at each
    token."""
    tokens = list(record.tokens)
    while len(tokens) < record.prompt_tokens + record.max_tokens:
        row = row_of(record, tokens, len(tokens) - 1, len(tokens), [], frozenset({STOP_ID}))
        (mask,) = byte_matchers(STOP_ID).masks([row])
        assert isinstance(mask, bytes)
        tokens.append(fake_constrained(tokens, LAYOUT, VOCAB, mask))
        if tokens[-1] == STOP_ID:
            break
    return tokens[record.prompt_tokens :]


def _crowd() -> list[RequestRecord]:
    return [
        constrained(f"c{i}", prompt_of(i, 5 + 4 * i), 14 + 3 * i, CONSTRAINTS[i % 3]) if i % 4 else
        record_of(f"c{i}", prompt_of(i, 5 + 4 * i), 14 + 3 * i)
        for i in range(9)
    ]  # fmt: skip


def _right(answers: list[ColocatedAnswer]) -> None:
    for answer in answers:
        record = answer.record
        asked = wanted(record) if record.constraint is None else answer_of(record)
        assert answer.tokens == asked, record.request
        assert answer.ended is not None
        is_whole = bool(asked) and asked[-1] == STOP_ID
        assert answer.ended.reason is (FinishReason.STOP if is_whole else FinishReason.LENGTH)


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_keep_their_constraints_beside_others_that_have_none(ahead: bool) -> None:
    cluster = small_cluster(64, 0, ahead, max_batch=4)
    answers = [cluster.submit(record) for record in _crowd()]
    finish(cluster, answers)
    _right(answers)
    assert {answer.ended.reason for answer in answers if answer.ended} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("host_blocks", "mode"), [(0, "recompute"), (64, "swap")])
def test_preempted_requests_go_on_in_their_grammar(ahead: bool, host_blocks: int, mode: str) -> None:
    cluster = small_cluster(22, host_blocks, ahead, max_batch=6, preemption=mode)
    answers = [cluster.submit(record) for record in _crowd()]
    finish(cluster, answers)
    _right(answers)
    assert cluster.decode.preemption.preempted.total() > 0


@pytest.mark.parametrize("turns", range(1, 24, 3))
def test_a_lost_prefill_worker_leaves_the_grammar_where_it_was(turns: int) -> None:
    cluster = small_cluster(64)
    answers = [cluster.submit(record) for record in _crowd()[:4]]
    for _ in range(turns):
        cluster.turn()
    cluster.lose_prefill()
    while not all(answer.ended for answer in answers):
        assert cluster.turn()
    _right(answers)


@pytest.mark.parametrize("at", range(0, 20, 3))
def test_a_lost_decode_worker_is_replaced_behind_what_was_emitted(at: int) -> None:
    """The router places the record again, with the tokens that it has: history, which nobody draws again."""
    whole = constrained("r", prompt_of(4, 9), 40, LETTERS)
    tokens = answer_of(whole)
    again = msgspec.structs.replace(whole, tokens=whole.tokens + tokens[:at])
    cluster = small_cluster(64)
    answer = cluster.submit(again)
    answer.tokens += tokens[:at]
    finish(cluster, [answer])
    assert answer.tokens == tokens


def test_samples_of_one_prompt_have_a_place_of_their_own() -> None:
    """Guards matchers that are shared with the lease: each sample draws by itself. The fake model has but one answer to
    a prompt, so each has another constraint."""
    cluster, prompt = small_cluster(64), prompt_of(7, 22)
    records = [constrained(f"s{i}", prompt, 20, one, sample_index=i, group="s") for i, one in enumerate(CONSTRAINTS)]
    answers = [cluster.submit(r, records[0].request if i else None) for i, r in enumerate(records)]
    finish(cluster, answers)
    _right(answers)


def test_a_prefix_hit_changes_nothing() -> None:
    cluster, prompt = small_cluster(64), prompt_of(8, 23)
    answers = [cluster.submit(constrained("first", prompt, 18, PAIRS))]
    while answers[0].ended is None:
        cluster.turn()
    answers += [cluster.submit(constrained(f"n{i}", prompt, 18, one)) for i, one in enumerate(CONSTRAINTS)]
    finish(cluster, answers)
    _right(answers)
    assert all(a.ended.stats.decode_cached_tokens for a in answers[1:] if a.ended)


@pytest.mark.parametrize("turns", range(2, 14, 2))
@pytest.mark.parametrize("ahead", [False, True])
def test_a_cancelled_request_leaves_the_others_alone(turns: int, ahead: bool) -> None:
    cluster = small_cluster(64, 0, ahead)
    answers = [cluster.submit(record) for record in _crowd()[:3]]
    for _ in range(turns):
        cluster.turn()
    cluster._engines[1].receive([FromRouter(LINK, Cancel(RequestId("c1"), 1, FinishReason.CANCELLED))])
    finish(cluster, answers)
    _right([answers[0], answers[2]])
    assert answers[1].tokens == answer_of(answers[1].record)[: len(answers[1].tokens)]


def test_min_tokens_keep_the_end_away_until_there_is_nothing_else() -> None:
    """The fake model draws among what a grammar allows, and knows no bans: what is seen here is when a request ends."""
    cluster = small_cluster(64)
    word = Constraint(ConstraintKind.REGEX, "abc")
    answer = cluster.submit(constrained("m", prompt_of(1, 6), 20, word, min_tokens=10))
    finish(cluster, [answer])
    assert bytes(answer.tokens[:-1]) == b"abc" and answer.tokens[-1] == STOP_ID
    assert answer.ended is not None and answer.ended.reason is FinishReason.STOP


COSTLY = Constraint(ConstraintKind.REGEX, "((a{1000}){1000}){1000}")
UNKNOWN = Constraint(ConstraintKind.LARK, "start: nothing")


@pytest.mark.parametrize("constraint", [COSTLY, UNKNOWN])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_dead_end_ends_its_request_and_no_other(constraint: Constraint, ahead: bool) -> None:
    """One is found by the prefill worker, at the first token, the other behind some of them."""
    cluster = small_cluster(64, 0, ahead)
    answers = [cluster.submit(record) for record in _crowd()[:3]]
    dead = cluster.submit(constrained("dead", prompt_of(3, 11), 60, constraint))
    finish(cluster, [*answers, dead])
    _right(answers)
    assert dead.ended is not None and dead.ended.reason is FinishReason.ERROR
    assert dead.ended.fault is not None and dead.ended.fault.code == "INVALID_ARGUMENT"
    assert dead.ended.fault.message.startswith("constraint: ")
    assert (constraint is UNKNOWN) == (not dead.tokens)


def _slow(cluster: Colocated) -> list[Callable[[], bool]]:
    """Let constraints take their time; return what says that one is compiled by now."""
    opened: list[bool] = []

    def compiled(constraint: Constraint) -> bool:
        return bool(opened)

    cluster.prefill.line._compiled = cluster.decode.batch._compiled = compiled
    return [lambda: bool(opened.append(True))]


@pytest.mark.parametrize("ahead", [False, True])
def test_who_waits_for_a_compiler_holds_up_nobody(ahead: bool) -> None:
    cluster = small_cluster(64, 0, ahead, max_batch=2)
    (compile_now,) = _slow(cluster)
    slow = cluster.submit(constrained("slow", prompt_of(1, 9), 20, LETTERS))
    others = [cluster.submit(record_of(f"o{i}", prompt_of(i + 20, 9), 12)) for i in range(4)]
    for _ in range(200):
        cluster.turn()
    assert all(other.ended for other in others) and slow.ended is None and not slow.tokens
    compile_now()
    finish(cluster, [slow, *others])
    _right([slow, *others])


def test_a_worker_without_grammars_refuses() -> None:
    """Guards answers that look as if they kept a constraint which nobody has looked at."""
    cluster = small_cluster(64)
    cluster.decode.admission.compiled = None
    answer = cluster.submit(constrained("r", prompt_of(1, 9), 20, LETTERS))
    finish(cluster, [answer])
    assert not answer.tokens and answer.ended is not None and answer.ended.fault is not None
    assert answer.ended.fault.field == "constraint"


def test_random_stories() -> None:
    """Small pools, planned ahead or not, requests that come at any time."""
    for seed in range(12):
        chosen = random.Random(seed)
        mode = chosen.choice(("recompute", "swap"))
        cluster = small_cluster(
            chosen.randrange(20, 34), 48, chosen.random() < 0.5, max_batch=chosen.randrange(2, 6), preemption=mode
        )
        answers = []
        for record in _crowd():
            answers.append(cluster.submit(record))
            for _ in range(chosen.randrange(5)):
                cluster.turn()
        finish(cluster, answers)
        _right(answers)

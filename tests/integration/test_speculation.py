"""Drafts change no answer, only how many steps it takes: the same requests with and without, with the fake model, whose
next token depends on every KV byte. Drafters know that model, and err on purpose: those that are told its answers, and
a draft model, which is another one of it with a pool of its own."""

import random
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from engine.draft_model import ModelDrafter
from engine.drafts import Drafter, EachAlone
from engine.runner import Done, HostMark
from engine.step import StepPlan
from engine.storage.paged import PagedKV
from engine.types import Constraint, ConstraintKind, FinishReason, RequestRecord
from fakes.colocated import ColocatedAnswer
from fakes.model import FakeRunner, fake_next
from tests.integration.crowd import LAYOUT, SIZE, finish, prompt_of, record_of, small_cluster, wanted
from tests.integration.fake_device import VOCAB

GRAMMARS = (
    None,
    None,
    Constraint(ConstraintKind.REGEX, "([ab]\\.{7}){3}[0-9]"),
    Constraint(ConstraintKind.REGEX, "[a-z]=" + "0123456789" * 4 + "[a-z]"),
)


class Knowing:
    """Right, but for the place in a row's drafts that `wrong_at` names; -1: right everywhere."""

    def __init__(self, wrong_at: int) -> None:
        self._wrong_at = wrong_at

    def propose(self, tokens: list[int], most: int) -> list[int]:
        proposed: list[int] = []
        for at in range(most):
            token = fake_next([*tokens, *proposed], LAYOUT, VOCAB)
            proposed.append((token + 1) % VOCAB if at == self._wrong_at else token)
        return proposed


class Telling:
    """Knows the answers beforehand, those of other prompts too; errs at random, in every way."""

    def __init__(self, answers: dict[str, list[int]], seed: int, record: RequestRecord) -> None:
        self._whole = record.tokens[: record.prompt_tokens] + answers[record.request]
        self._random = random.Random(f"{seed} {record.request}")

    def propose(self, tokens: list[int], most: int) -> list[int]:
        some = self._whole[len(tokens) : len(tokens) + most]
        chosen = self._random
        if chosen.random() < 0.4:
            some = some[: chosen.randrange(most)]
        # Also beyond the answer's end, and other tokens than can be.
        some += [chosen.randrange(VOCAB) for _ in range(chosen.randrange(most + 1 - len(some)))]
        if some and chosen.random() < 0.3:
            some[chosen.randrange(len(some))] = chosen.randrange(VOCAB)
        return some


class Erring:
    """The fake model, but for one draw in so many. Its KV is that of what it was told to read."""

    def __init__(self, runner: FakeRunner, seed: int, one_in: int) -> None:
        self.kv = runner.kv
        self._runner, self._random, self._one_in = runner, random.Random(seed), one_in

    def launch(self, plan: StepPlan) -> Done:
        drawn = self._runner.launch(plan).wait()
        told = [(t + 1) % VOCAB if self._one_in and not self._random.randrange(self._one_in) else t for t in drawn]
        return Done(told, HostMark(), HostMark())


def modelled(blocks: int, seed: int = 0, one_in: int = 0) -> ModelDrafter:
    """A draft model with so many blocks, that errs now and then; `one_in` 0: never."""
    runner = Erring(FakeRunner(PagedKV(LAYOUT, blocks), VOCAB), seed, one_in)
    return ModelDrafter(runner, blocks, VOCAB, 4096, lambda: 0.0)


def telling(answers: dict[str, list[int]], seed: int) -> Drafter:
    return EachAlone(partial(Telling, answers, seed))


def erring(answers: dict[str, list[int]], seed: int) -> Drafter:
    """Its pool is too small for all in half of the cases."""
    return modelled((40, 200)[seed % 2], seed, 4)


MADE_BY = pytest.mark.parametrize("made_by", [telling, erring])
MadeBy = Callable[[dict[str, list[int]], int], Drafter]


def _crowd(**more: object) -> list[RequestRecord]:
    return [_record(i, **more) for i in range(8)]


def _record(i: int, **more: object) -> RequestRecord:
    record = record_of(f"r{i}", prompt_of(i, 3 + 4 * i), 9 + 5 * i, constraint=GRAMMARS[i % 4], **more)
    return msgspec.structs.replace(record, ignore_eos=record.constraint is None)


def _run(
    records: list[RequestRecord], drafter: Drafter | None, **cluster: object
) -> tuple[list[ColocatedAnswer], int]:
    """Return the answers, and the steps of the decode worker."""
    made = small_cluster(**{"blocks": 200, **cluster}, drafter=drafter)  # type: ignore[arg-type]
    answers = [made.submit(record) for record in records]
    finish(made, answers)
    assert made.decode.batch.drafting._of == {}, "what was guessed outlives its request"
    return answers, made.decode.batch._steps


def _told(answers: list[ColocatedAnswer]) -> list[tuple[list[int], FinishReason | None, object]]:
    return [(a.tokens, a.ended and a.ended.reason, a.logprobs) for a in answers]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("wrong_at", [-1, 0, 1, 2])
def test_an_answer_alone(wrong_at: int, ahead: bool) -> None:
    """Guards a rejected token that is kept, and one accepted too many: at every place of a block."""
    for length in range(1, SIZE + 2):
        record = record_of("r", prompt_of(5, length), 25)
        (answer,), steps = _run([record], EachAlone(lambda _: Knowing(wrong_at)), ahead=ahead, growth_tokens=25)
        assert answer.tokens == wanted(record), length
        # The first token comes from the prefill worker; each step draws one, and the drafts before the wrong one.
        drawn = 4 if wrong_at < 0 else wrong_at + 1
        assert steps == -(-24 // drawn), "now and then a choice is the other one: not in so few"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
@MADE_BY
def test_answers_are_the_same_and_take_fewer_steps(
    made_by: MadeBy, logprobs: int | None, jumps: bool, ahead: bool
) -> None:
    plain, many = _run(_crowd(logprobs=logprobs), None, ahead=ahead, jumps=jumps)
    answers = {a.record.request: a.tokens for a in plain}
    for seed in range(6):
        told, few = _run(_crowd(logprobs=logprobs), made_by(answers, seed), ahead=ahead, jumps=jumps)
        assert _told(told) == _told(plain), seed
        # A draft model knows no grammar, and the longest answer has one.
        assert few < many or (made_by is erring and few == many)


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_a_limit_and_a_stop_cut_drafts(max_tokens: int) -> None:
    record = record_of("r", prompt_of(2, 6), 14)
    whole = wanted(record)
    limited = msgspec.structs.replace(record, max_tokens=max_tokens)
    (answer,), _ = _run([limited], EachAlone(lambda _: Knowing(-1)))
    assert answer.tokens == whole[:max_tokens] and answer.ended and answer.ended.reason is FinishReason.LENGTH
    stopped = msgspec.structs.replace(record, stop_token_ids=(whole[max_tokens],))
    end = whole.index(whole[max_tokens])
    (answer,), _ = _run([stopped], EachAlone(lambda _: Knowing(-1)))
    assert answer.tokens == whole[: end + 1] and answer.ended and answer.ended.reason is FinishReason.STOP
    assert answer.ended.stats.output_tokens == end + 1


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("host_blocks", "mode"), [(0, "recompute"), (64, "swap")])
@MADE_BY
def test_who_has_drafts_gives_way_and_comes_back(made_by: MadeBy, ahead: bool, host_blocks: int, mode: str) -> None:
    """Guards KV of guesses that is cached, copied out or found again, in pools that are too small for all."""
    plain, _ = _run(_crowd(), None)
    answers = {a.record.request: a.tokens for a in plain}
    preempted = 0
    for blocks in (28, 33, 39):
        made = small_cluster(
            blocks, host_blocks, ahead, True, made_by(answers, blocks), max_batch=6, preemption=mode
        )
        told = [made.submit(record) for record in _crowd()]
        finish(made, told)
        assert _told(told) == _told(plain)
        preempted += made.decode.preemption.preempted.total()
    assert preempted > 0


def test_drafts_preempt_nobody() -> None:
    """Guards guesses that cost others their blocks: where there is no room for them, there are none."""
    for blocks in range(10, 16):
        records = [record_of(f"r{i}", prompt_of(i, 7), 12) for i in range(3)]
        counts = []
        for drafter in (None, EachAlone(lambda _: Knowing(0))):
            made = small_cluster(blocks, 0, drafter=drafter, growth_tokens=4)
            finish(made, [made.submit(record) for record in records])
            counts.append(made.decode.preemption.preempted.total())
        assert counts[1] <= counts[0], blocks


def test_samples_that_fork_share_no_guess() -> None:
    prompt = prompt_of(7, 22)
    records = [record_of(f"s{i}", prompt, 16, sample_index=i, group="s") for i in range(3)]
    for ahead in (False, True):
        made = small_cluster(200, 0, ahead, drafter=EachAlone(lambda _: Knowing(2)))
        answers = [made.submit(r, records[0].request if i else None) for i, r in enumerate(records)]
        finish(made, answers)
        assert made.decode.prefills.forks.forked == 2
        assert [a.tokens for a in answers] == [wanted(record) for record in records]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("turns", range(2, 16, 3))
@MADE_BY
def test_a_lost_prefill_worker_changes_nothing(made_by: MadeBy, turns: int, ahead: bool) -> None:
    plain, _ = _run(_crowd(), None)
    answers = {a.record.request: a.tokens for a in plain}
    made = small_cluster(200, 0, ahead, drafter=made_by(answers, turns))
    told = [made.submit(record) for record in _crowd()]
    for _ in range(turns):
        made.turn()
    made.lose_prefill()
    while not all(answer.ended for answer in told):
        assert made.turn()
    assert _told(told) == _told(plain)


@pytest.mark.parametrize("at", range(0, 40, 3))
def test_it_goes_on_behind_any_part_of_a_run(at: int) -> None:
    """A frame with half of what a step drew is all that a router has of it when it places the request again."""
    record = record_of("r", prompt_of(4, 9), 41)
    whole = wanted(record)
    again = msgspec.structs.replace(record, tokens=record.tokens + whole[:at])
    made = small_cluster(200, drafter=EachAlone(lambda _: Knowing(-1)))
    answer = made.submit(again)
    answer.tokens += whole[:at]
    finish(made, [answer])
    assert answer.tokens == whole


@MADE_BY
def test_random_stories(made_by: MadeBy) -> None:
    """Small pools and batches, planned ahead or not, requests that come at any time, every kind of error."""
    plain, _ = _run(_crowd(), None)
    answers = {a.record.request: a.tokens for a in plain}
    drawn = rejected = 0
    for seed in range(24):
        chosen = random.Random(seed)
        made = small_cluster(
            chosen.randrange(28, 60), 48, chosen.random() < 0.5, chosen.random() < 0.5,
            made_by(answers, seed), max_batch=chosen.randrange(1, 6),
            preemption=chosen.choice(("recompute", "swap", "auto", "off")), growth_tokens=chosen.choice((1, 4, 30)),
            local_chunk_tokens=chosen.choice((2, 8, 64)),
        )  # fmt: skip
        told = []
        for record in _crowd():
            told.append(made.submit(record))
            for _ in range(chosen.randrange(5)):
                made.turn()
        finish(made, told)
        assert _told(told) == _told(plain), seed
        drafting = made.decode.batch.drafting
        drawn, rejected = drawn + drafting.drawn_tokens, rejected + drafting.drafted_tokens - drafting.drawn_tokens
    assert drawn > 200 and rejected > 200


@pytest.mark.parametrize("blocks", [30, 60, 300])
def test_a_draft_model_that_is_the_model_is_always_right(blocks: int) -> None:
    """Guards its KV: a block of another sequence becomes a wrong draft. Requests give way and come back, fork, and
    share a pool that is too small for all of them."""
    drafter = modelled(blocks)
    made = small_cluster(40, 0, drafter=drafter, max_batch=6)
    told = [made.submit(record_of(f"r{i}", prompt_of(i, 3 + 4 * i), 9 + 5 * i)) for i in range(7)]
    prompt = prompt_of(20, 22)
    samples = [record_of(f"s{i}", prompt, 16, sample_index=i, group="s") for i in range(3)]
    told += [made.submit(record, samples[0].request if at else None) for at, record in enumerate(samples)]
    finish(made, told)
    assert all(answer.tokens == wanted(answer.record) for answer in told)
    drafting = made.decode.batch.drafting
    assert made.decode.preemption.preempted.total() > 0 and made.decode.prefills.forks.forked > 0
    assert drafting.drafted_tokens == drafting.drawn_tokens > 60
    drafter.check()
    assert len(drafter._free) == blocks, "nothing of a request outlives it"

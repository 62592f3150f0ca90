"""Log probabilities, biases and allowed tokens on the GPU kernels as on the CPU's: in the interpreter where there is no
GPU, and with steps that are queued, recorded, and not waited for."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from engine.logprobs import QueuedDraws
from engine.runner import ModelRunner, Queued
from engine.step import Drawn, Row, StepPlan
from engine.types import SamplingParams, TokenLogprobs
from tests.engine.backends.gpu.test_following import TABLES, _behind
from tests.engine.backends.gpu.test_graphs import recorded
from tests.engine.backends.gpu.test_step import DRAWN, FIRST, GREEDY, SECOND, THIRD, Side, folder, prompt, row

__all__ = ["folder"]


def asking(one: Row, **more: object) -> Row:
    return msgspec.structs.replace(one, record=msgspec.structs.replace(one.record, **more))


def near(one: Drawn, other: Drawn) -> None:
    assert isinstance(one, TokenLogprobs) and isinstance(other, TokenLogprobs)
    assert one.token == other.token and len(one.top) == len(other.top)
    assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


def test_a_mixed_step_says_what_the_cpu_says(folder: Path) -> None:
    """Guards values of another row: rows stand in another order on the device than in the plan, and not all ask."""
    cpu, gpu = Side(folder, "torch"), Side(folder, "triton")
    a, b, c = prompt(1, 21), prompt(2, 40), prompt(3, 17)
    steps: list[list[Row]] = [
        [row(1, a, 0, FIRST), row(2, b[:19], 0, SECOND, draw=False)],
        [
            asking(row(2, b, 19, SECOND, DRAWN), logprobs=3),
            row(1, [*a, 7], 21, FIRST, DRAWN),
            asking(row(3, c, 0, THIRD), logprobs=0),
        ],
        [asking(row(n, [*t, 5], len(t), TABLES[n]), logprobs=n) for n, t in ((1, [*a, 7]), (2, b), (3, c))],
    ]
    for plan in steps:
        for want, got, one in zip(cpu.run(*plan), gpu.run(*plan), [r for r in plan if r.draw], strict=True):
            if one.record.logprobs is None:
                assert want == got
            else:
                near(got, want)
                assert len(got.top) == one.record.logprobs  # type: ignore[union-attr]


def test_they_are_of_the_logits_as_they_are_whatever_is_drawn_from(folder: Path) -> None:
    """Guards the same order as on the CPU: a biased token is drawn, and its own small probability is said."""
    cpu, gpu = Side(folder, "torch"), Side(folder, "triton")
    text = prompt(4, 18)
    (plain,) = cpu.run(asking(row(1, text, 0, FIRST), logprobs=1))
    assert isinstance(plain, TokenLogprobs)
    other = (plain.token + 1) % 320
    for changes in (
        {"logit_bias": ((other, 100.0),)},
        {"allowed_token_ids": (other,)},
        {"logit_bias": ((plain.token, -100.0),)},
        {"allowed_token_ids": (other, plain.token), "logit_bias": ((plain.token, -100.0),)},
    ):
        for params in (GREEDY, SamplingParams(temperature=0.7, top_k=9, repetition_penalty=1.2)):
            plan = asking(row(1, text, 0, FIRST, params), logprobs=2, **changes)
            (want,), (got,) = cpu.run(plan), gpu.run(plan)
            near(got, want)
            assert isinstance(got, TokenLogprobs) and got.token != plain.token and got.top[0][0] == plain.token
            if len(changes) > 1 or (changes.get("logit_bias") or ((0, 1.0),))[0][1] > 0:
                assert got.token == other


def _decode(runner: ModelRunner, texts: dict[int, list[int]], *, ahead: bool) -> list[list[Drawn]]:
    """Six steps of rows that all ask but one, each launched before the one before it is waited for, or not."""
    drawn: list[list[Drawn]] = []
    step: Queued | None = None
    for number in range(7):
        rows = []
        for name in texts:
            known = not (ahead and step is not None)
            one = _behind(name, texts[name], known=known)
            rows.append(one if name == 2 else asking(one, logprobs=name))
        launched = runner.launch(StepPlan(tuple(rows))) if number < 6 else None
        for finished in (step,) if ahead else (launched,):
            if finished is None:
                continue
            tokens: Sequence[Drawn] = finished.wait()
            drawn.append(list(tokens))
            for name, token in zip(texts, tokens, strict=True):
                assert not isinstance(token, tuple)
                texts[name] = [*texts[name], token if isinstance(token, int) else token.token]
        step = launched  # type: ignore[assignment]
    return drawn


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["triton", "recorded"])
def test_rows_that_follow_have_them_too(folder: Path, kind: str) -> None:
    """Guards asynchronous scheduling: the values belong to the step that draws, and leave the logits' memory before the
    next step is in it."""
    sides = [recorded(folder, [3])[0] if kind == "recorded" else Side(folder, kind) for _ in range(2)]
    texts = {1: [*prompt(1, 15), 3], 2: [*prompt(2, 30), 4], 3: [*prompt(3, 16), 5]}
    for side in sides:
        side.run(*(row(n, text[:-1], 0, TABLES[n], draw=False) for n, text in texts.items()))
    one, other = dict(texts), dict(texts)
    ahead, in_turn = _decode(sides[0].runner, one, ahead=True), _decode(sides[1].runner, other, ahead=False)
    assert one == other and len(ahead) == len(in_turn) == 6
    for first, second in zip(ahead, in_turn, strict=True):
        assert [type(token) for token in first] == [TokenLogprobs, int, TokenLogprobs]
        near(first[0], second[0])
        near(first[2], second[2])


def test_a_prompt_is_scored_as_on_the_cpu(folder: Path) -> None:
    """Guards which row of a mixed step says which prompt token's: chunks stand behind a decoding row that is first in
    none of the plans, one of a single token among them."""
    cpu, gpu = Side(folder, "torch"), Side(folder, "triton")
    a, b, c = prompt(1, 21), prompt(2, 40), prompt(3, 9)
    for side in (cpu, gpu):
        side.run(row(1, a, 0, FIRST, draw=False), row(3, c[:1], 0, THIRD, draw=False))

    def scored(name: int, tokens: list[int], start: int, end: int, draw: bool) -> Row:
        one = asking(row(name, tokens, start, TABLES[name], draw=draw), prompt_logprobs=name, prompt_tokens=len(tokens))
        return msgspec.structs.replace(one, end=end, scored=min(end, len(tokens) - 1) - start)

    for plan in (
        (scored(2, b, 0, 17, False), row(1, [*a, 7], 21, FIRST), scored(3, c, 1, 2, False)),
        (scored(3, c, 2, 9, True), scored(2, b, 17, 40, True)),
    ):
        launches = [side.runner.launch(StepPlan(plan, is_scored=True)) for side in (cpu, gpu)]
        want, got = ((launched.wait(), launched.scores()) for launched in launches)
        assert want[0] == got[0]
        assert [len(said) for said in got[1]] == [one.scored for one in plan if one.scored]
        for one, parts in zip([one for one in plan if one.scored], zip(want[1], got[1], strict=True), strict=True):
            for first, second in zip(*parts, strict=True):
                near(second, first)
            said = [each.token for each in parts[1]]
            assert said == list(one.tokens[one.start + 1 : one.start + 1 + one.scored])
            assert all(len(each.top) == one.record.prompt_logprobs for each in parts[1])


def test_a_step_in_which_nobody_asks_draws_tokens_and_nothing_else(folder: Path) -> None:
    gpu = Side(folder, "triton")
    plain = row(1, prompt(1, 9), 0, FIRST)
    gpu.run(plain)
    assert isinstance(gpu.attention.sample(gpu.logits, [plain]), torch.Tensor)
    assert isinstance(gpu.attention.sample(gpu.logits, [asking(plain, logprobs=0)]), QueuedDraws)

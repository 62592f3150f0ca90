"""Rows that follow a step which has not been waited for: on the GPU kernels, recorded or not, as on the CPU."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.runner import Done, ModelRunner, Queued
from engine.step import Row, StepPlan
from engine.types import BlockId
from tests.engine.backends.gpu.test_graphs import recorded
from tests.engine.backends.gpu.test_step import DRAWN, FIRST, GREEDY, SECOND, THIRD, Side, folder, prompt, row

__all__ = ["folder"]

PARAMS = {1: GREEDY, 2: DRAWN, 3: GREEDY}
TABLES = {1: FIRST, 2: SECOND, 3: THIRD}


def _behind(name: int, tokens: list[int], known: bool) -> Row:
    """The row that computes the token after `tokens`: known, as the last of them, or still to be drawn."""
    if known:
        return row(name, tokens, len(tokens) - 1, TABLES[name], PARAMS[name])
    held = row(name, tokens, len(tokens), TABLES[name], PARAMS[name])
    return replace(held, end=len(tokens) + 1, follows=True)


def _in_turn(runner: ModelRunner, texts: dict[int, list[int]], steps: list[list[int]]) -> list[list[object]]:
    """Decode one step at a time."""
    drawn = []
    for names in steps:
        tokens = runner.run(StepPlan(tuple(_behind(n, texts[n], known=True) for n in names)))
        drawn.append(list(tokens))
        for name, token in zip(names, tokens, strict=True):
            assert isinstance(token, int)
            texts[name] = [*texts[name], token]
    return drawn


def _ahead(runner: ModelRunner, texts: dict[int, list[int]], steps: list[list[int]]) -> list[list[object]]:
    """Decode with each step launched before the one before it is waited for."""
    drawn, before, step = [], list[int](), None
    for names in [*steps, []]:
        rows = tuple(_behind(n, texts[n], known=n not in before) for n in names)
        launched = runner.launch(StepPlan(rows)) if rows else None
        if step is not None:
            tokens = step.wait()
            drawn.append(list(tokens))
            for name, token in zip(before, tokens, strict=True):
                assert isinstance(token, int)
                texts[name] = [*texts[name], token]
        before, step = names, launched
    return drawn


STEPS = [[1, 2], [2, 1], [1, 2, 3], [3, 2], [1, 2, 3]]
"""Rows change their places, one pauses, one joins late."""


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["torch", "triton", "recorded"])
def test_a_row_goes_on_with_what_the_step_before_draws(folder: Path, kind: str) -> None:
    """Guards each row's own token among those of the step before, in an order of their own; one drawn with penalties
    needs it on the host too."""
    sides = [recorded(folder, [3])[0] if kind == "recorded" else Side(folder, kind) for _ in range(2)]
    texts = {1: [*prompt(1, 15), 3], 2: [*prompt(2, 30), 4], 3: [*prompt(3, 16), 5]}
    for side in sides:
        side.run(*(row(n, text[:-1], 0, TABLES[n], draw=False) for n, text in texts.items()))
    one, other = dict(texts), dict(texts)
    assert _ahead(sides[0].runner, one, STEPS) == _in_turn(sides[1].runner, other, STEPS)
    assert one == other


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_chunks_beside_rows_that_follow_keep_their_own_tokens(folder: Path, kind: str) -> None:
    """Guards the places of a mixed step, in which rows stand in another order than in the plan; a chunk of one token
    among them."""
    side, plain = Side(folder, kind), Side(folder, kind)
    text, long, short = [*prompt(1, 15), 3], prompt(4, 20), prompt(5, 9)
    for one in (side, plain):
        one.run(row(1, text[:-1], 0, FIRST, draw=False), row(3, short[:8], 0, THIRD, draw=False))
    chunks = (row(2, long, 0, SECOND, draw=False), row(3, short, 8, THIRD))
    first = side.runner.launch(StepPlan((row(1, text, 15, FIRST),)))
    second = side.runner.launch(StepPlan((chunks[0], _behind(1, text, known=False), chunks[1])))
    (token,) = first.wait()
    assert plain.run(row(1, text, 15, FIRST)) == [token]
    wanted = plain.run(chunks[0], row(1, [*text, token], 16, FIRST), chunks[1])  # type: ignore[list-item]
    assert second.wait() == wanted


@torch.inference_mode()
def test_a_queued_step_tells_how_long_the_device_was_idle_before_it(folder: Path) -> None:
    gpu, cpu = Side(folder, "triton"), Side(folder, "torch")
    for side, kind in ((gpu, Queued), (cpu, Done)):
        first = side.runner.launch(StepPlan((row(1, prompt(1, 8), 0, FIRST),)))
        second = side.runner.launch(StepPlan((row(2, prompt(2, 8), 0, SECOND),)))
        first.wait(), second.wait()
        assert isinstance(second, kind) and 0.0 <= second.idle_s(first) < 0.5
    assert side.runner.launch(StepPlan((), ((BlockId(1), BlockId(2)),))).wait() == []

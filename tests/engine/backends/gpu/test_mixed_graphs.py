"""Recorded mixed steps: which steps replay, what a replay reads, what padding writes."""

from pathlib import Path

import pytest
import torch

from engine.backends.gpu.attention import CHUNKS, TritonAttention
from engine.backends.gpu.mixed_graphs import MixedGraphs, mixed_sizes
from engine.backends.gpu.runner import TritonOpener
from engine.config import StepLimits
from engine.runner import ModelRunner
from engine.step import StepPlan
from engine.types import SamplingParams
from tests.engine.backends.gpu.recording import FakeRecorder
from tests.engine.backends.gpu.test_following import _behind
from tests.engine.backends.gpu.test_graphs import recorder
from tests.engine.backends.gpu.test_step import (
    DRAWN,
    FIRST,
    GREEDY,
    SECOND,
    THIRD,
    Side,
    folder,
    prompt,
    row,
)
from tests.kernels.cases import DEVICE

__all__ = ["folder"]

HOT = SamplingParams(temperature=1.5)


def mixed(folder: Path, sizes: list[int], share_tokens: int = 256) -> tuple[Side, MixedGraphs]:
    """Two decoding rows and two chunks at most, as the attention has room for."""
    side = Side(folder, "triton", share_tokens=share_tokens)
    assert isinstance(side.attention, TritonAttention)
    side.attention.keep_chunks(sizes[-1], 2)
    graphs = MixedGraphs(side.model, side.kv, side.attention, recorder(), sizes, 2, 2)
    with torch.inference_mode():
        graphs.prepare()
    side.runner = ModelRunner(side.model, side.kv, side.attention, mixed=graphs)
    return side, graphs


@torch.inference_mode()
def test_replayed_steps_give_the_tokens_of_steps_that_are_not(folder: Path) -> None:
    """Guards a value frozen into a recording, and what an earlier step has left in the buffers: chunks alone and beside
    decoding rows, their lengths, tables and places, who draws and how, change from step to step. Steps without a chunk,
    with too many, or of too many tokens, are not replayed."""
    cpu, (gpu, graphs) = Side(folder, "torch"), mixed(folder, [8, 20])
    a, b, c = prompt(1, 33), prompt(2, 40), prompt(3, 20)
    steps = [
        [row(1, a[:7], 0, FIRST)],
        [row(2, b[:19], 0, SECOND, draw=False), row(1, a[:8], 7, FIRST, HOT)],
        [row(1, a[:12], 8, FIRST), row(2, b[:21], 19, SECOND, HOT)],
        [row(3, c[:3], 0, THIRD, draw=False), row(2, b[:22], 21, SECOND), row(1, a[:13], 12, FIRST, DRAWN)],
        [row(1, a[:33], 13, FIRST, HOT)],
        [row(2, b[:24], 22, SECOND, draw=False)],
        [row(1, [*a, 5], 33, FIRST)],
        [row(2, b, 24, SECOND), row(3, c, 3, THIRD)],
    ]
    for number, rows in enumerate(steps):
        assert gpu.run(*rows) == cpu.run(*rows), number
    assert graphs.replays == {(CHUNKS, 8): 3, ("decode", 20): 1, ("decode", 8): 1, (CHUNKS, 20): 1}


@torch.inference_mode()
def test_a_replay_of_a_smaller_step_writes_no_kv_beside_its_own(folder: Path) -> None:
    """Guards tokens and tiles beyond the step's own, behind a step that filled both."""
    gpu, graphs = mixed(folder, [16])
    gpu.run(row(1, prompt(1, 8), 0, FIRST), row(2, prompt(2, 8), 0, SECOND))
    before = gpu.kv.tensor.clone()
    gpu.run(row(3, prompt(3, 2), 0, THIRD))
    changed = (gpu.kv.tensor != before) & ~(gpu.kv.tensor.isnan() & before.isnan())
    assert changed.any(-1).any(3).any(2).any(1).nonzero().tolist() == [[THIRD[0], 0], [THIRD[0], 1]]
    assert graphs.replays == {(CHUNKS, 16): 2}


@torch.inference_mode()
def test_rows_that_follow_and_rows_that_share_are_replayed_beside_chunks(folder: Path) -> None:
    """Guards the tokens that are taken on the device, and the second kind of work list."""
    cpu, (gpu, graphs) = Side(folder, "torch"), mixed(folder, [12], share_tokens=16)
    stem, text = prompt(4, 16), prompt(5, 15)
    for side in (cpu, gpu):
        side.run(row(0, stem, 0, [4], draw=False), row(1, text, 0, FIRST, draw=False))
    shared = [row(n, [*stem, 7 + n], 16, [4, 20 + n]) for n in (2, 3)]
    chunk = row(4, prompt(6, 9), 0, THIRD, draw=False)
    assert gpu.run(*shared, chunk) == cpu.run(*shared, chunk)
    text = [*text, 3]
    first = gpu.runner.launch(StepPlan((row(1, text, 15, FIRST), row(4, prompt(6, 11), 9, THIRD))))
    second = gpu.runner.launch(StepPlan((row(5, prompt(7, 5), 0, SECOND), _behind(1, text, known=False))))
    token, other = first.wait()
    assert isinstance(token, int)
    assert cpu.run(row(1, text, 15, FIRST), row(4, prompt(6, 11), 9, THIRD)) == [token, other]
    assert second.wait() == cpu.run(row(5, prompt(7, 5), 0, SECOND), row(1, [*text, token], 16, FIRST))
    assert graphs.replays == {("decode_shared", 12): 1, ("decode", 12): 2}


@pytest.mark.skipif(DEVICE == "cuda", reason="about the fake device")
def test_a_worker_s_pool_comes_with_its_recordings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what is opened for a GPU worker: recordings of decode steps and of mixed ones, for its limits."""
    side, fake = Side(folder, "triton"), FakeRecorder()
    monkeypatch.setattr("engine.backends.gpu.runner.warm_up", lambda *given: None)
    layout = side.model.config.kv_layout(16, "float32")
    limits = StepLimits(chunk_tokens=8, batch=1, prompts=1)
    opened = TritonOpener(side.model, layout, limits, lambda: fake, mixed_tokens=64).open(8)
    assert fake.recorded == 1 + 2
    tokens = opened.runner.run(StepPlan((row(1, prompt(1, 7), 0, [3], GREEDY), row(2, prompt(2, 1), 0, [4], HOT))))
    assert len(tokens) == 2 and fake.replayed == 1


def test_sizes_go_up_to_what_a_worker_asks_for() -> None:
    assert mixed_sizes(9) == [9] and mixed_sizes(100) == [64, 100]
    assert mixed_sizes(4000) == [64, 128, 256, 512]

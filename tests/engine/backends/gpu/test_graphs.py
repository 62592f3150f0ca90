"""Recorded decode steps: which steps replay, what a replay reads, what padding writes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.backends.gpu.attention import TritonAttention
from engine.backends.gpu.graphs import CudaRecorder, DecodeGraphs, Recorder, Recording, recorded_sizes
from engine.runner import ModelRunner
from engine.step import StepPlan
from engine.types import SamplingParams
from tests.engine.backends.gpu.recording import FakeRecorder
from tests.engine.backends.gpu.test_step import (
    DRAWN,
    FIRST,
    SECOND,
    THIRD,
    Side,
    folder,
    prompt,
    row,
)
from tests.kernels.cases import DEVICE

__all__ = ["folder"]


def recorder() -> Recorder:
    return CudaRecorder(torch.device(DEVICE)) if DEVICE == "cuda" else FakeRecorder()


def recorded(folder: Path, sizes: list[int], share_tokens: int = 256) -> tuple[Side, DecodeGraphs]:
    side = Side(folder, "triton", share_tokens=share_tokens)
    assert isinstance(side.attention, TritonAttention)
    graphs = DecodeGraphs(side.model, side.kv, side.attention, recorder(), sizes)
    with torch.inference_mode():
        graphs.prepare()
    side.runner = ModelRunner(side.model, side.kv, side.attention, graphs)
    return side, graphs


@torch.inference_mode()
def test_replayed_steps_give_the_tokens_of_steps_that_are_not(folder: Path) -> None:
    """Guards a value frozen into a recording: batches grow and shrink, tables and contexts change from step to step, a
    row moves to another place of the batch. Mixed steps and too large ones are not replayed."""
    cpu, (gpu, graphs) = Side(folder, "torch"), recorded(folder, [1, 3])
    texts = {1: prompt(1, 15), 2: prompt(2, 30), 3: prompt(3, 16), 4: prompt(4, 3)}
    tables = {1: FIRST, 2: SECOND, 3: THIRD, 4: [15]}
    assert not graphs.replays
    for side in (cpu, gpu):
        for n in (1, 2):
            side.run(row(n, texts[n], 0, tables[n], draw=False))
    steps = [[1], [1, 2], [2, 1], [1, 2, 3], [3, 1, 2], [3, 2], [2], [1, 2, 3, 4], [1, 2, 3]]
    starts = {3: 0, 4: 0}
    for names in steps:
        rows = []
        for n in names:
            texts[n] = [*texts[n], 3 + n]
            rows.append(row(n, texts[n], starts.pop(n, len(texts[n]) - 1), tables[n], DRAWN if n == 2 else row_greedy))
        assert gpu.run(*rows) == cpu.run(*rows), names
    # The fourth step has a chunk of sequence 3, the eighth is mixed too.
    assert graphs.replays == {("decode", 1): 2, ("decode", 3): 5}


row_greedy = row(0, [1], 0, [0]).record.sampling


@torch.inference_mode()
def test_tokens_are_drawn_within_the_recording(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a draw that is launched behind each step, and parameters that are frozen into the recording: seeds, places
    and filters change from step to step, a greedy row stands beside a drawn one, one row draws nothing; a row with a
    penalty, and with it its whole step, is drawn behind the recording."""
    cpu, (gpu, graphs) = Side(folder, "torch"), recorded(folder, [3])
    texts = {1: prompt(1, 15), 2: prompt(2, 30), 3: prompt(3, 16)}
    tables = {1: FIRST, 2: SECOND, 3: THIRD}
    for side in (cpu, gpu):
        side.run(*(row(n, text, 0, tables[n], draw=False) for n, text in texts.items()))
    behind, plain = list[int](), gpu.attention.sample
    monkeypatch.setattr(gpu.attention, "sample", lambda *given: behind.append(len(given[1])) or plain(*given))
    hot = SamplingParams(temperature=1.5)
    narrow = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01)
    penalized = SamplingParams(temperature=0.9, frequency_penalty=1.5)
    steps: list[dict[int, SamplingParams]] = [
        {1: hot, 2: narrow}, {3: narrow, 1: row_greedy, 2: hot}, {2: hot}, {1: narrow, 2: penalized},
        {2: narrow, 1: hot},
    ]  # fmt: skip
    for number, step in enumerate(steps):
        rows = []
        for n, params in step.items():
            texts[n] = [*texts[n], 3 + n + number]
            rows.append(row(n, texts[n], len(texts[n]) - 1, tables[n], params, draw=(number, n) != (1, 1)))
        assert gpu.run(*rows) == cpu.run(*rows), step
    assert graphs.replays == {("decode", 3): 5} and behind == [2]


@torch.inference_mode()
def test_a_replay_of_a_smaller_step_writes_no_kv_beside_its_own(folder: Path) -> None:
    """Guards padding rows and what an earlier, larger step has left in the buffers: one row on a recording of three
    changes one slot of the pool."""
    gpu, graphs = recorded(folder, [3])
    texts = {1: prompt(1, 15), 2: prompt(2, 30), 3: prompt(3, 17)}
    tables = {1: FIRST, 2: SECOND, 3: THIRD}
    for n in (1, 2, 3):
        gpu.run(row(n, texts[n], 0, tables[n], draw=False))
    gpu.run(*(row(n, [*texts[n], 5], len(texts[n]), tables[n]) for n in (1, 2, 3)))
    before = gpu.kv.tensor.clone()
    gpu.run(row(1, [*texts[1], 5, 6], 16, tables[1]))
    changed = (gpu.kv.tensor != before) & ~(gpu.kv.tensor.isnan() & before.isnan())
    where = changed.any(-1).any(3).any(2).any(1).nonzero().tolist()
    assert where == [[FIRST[1], 0]]
    assert graphs.replays == {("decode", 3): 2}


@torch.inference_mode()
def test_steps_with_shared_prefixes_replay_recordings_of_their_own(folder: Path) -> None:
    """Guards the two kinds of work list: each reads its own buffers."""
    cpu, (gpu, graphs) = Side(folder, "torch"), recorded(folder, [2], share_tokens=16)
    stem = prompt(4, 16)
    for side in (cpu, gpu):
        side.run(row(0, stem, 0, [4], draw=False))
    for at in range(2):
        texts = [stem + prompt(7, at), stem + prompt(8, at)]
        rows = [row(n, [*text, 9], 16 + at, [4, 20 + n]) for n, text in enumerate(texts)]
        assert gpu.run(*rows) == cpu.run(*rows)
    lone = [row(1, prompt(9, 1), 0, [5]), row(2, prompt(10, 1), 0, [6])]
    assert gpu.run(*lone) == cpu.run(*lone)
    assert graphs.replays == {("decode_shared", 2): 2, ("decode", 2): 1}


@pytest.mark.skipif(DEVICE == "cuda", reason="about the fake device")
def test_no_step_waits_for_a_recording(folder: Path) -> None:
    """Guards a kind or a size that is recorded when it first comes, while requests wait; one row shares with nobody."""
    fake = FakeRecorder()
    gpu = Side(folder, "triton", share_tokens=16)
    assert isinstance(gpu.attention, TritonAttention)
    graphs = DecodeGraphs(gpu.model, gpu.kv, gpu.attention, fake, [1, 2, 3])
    with torch.inference_mode():
        graphs.prepare()
    assert fake.recorded == 5
    gpu.kv.memory.zero_()  # nobody has filled what the steps read
    gpu.runner = ModelRunner(gpu.model, gpu.kv, gpu.attention, graphs)
    for batch in (1, 2, 3):
        gpu.run(*(row(n, prompt(n, 17), 16, [4, 20 + n]) for n in range(batch)))
        gpu.run(*(row(n, prompt(n, 17), 16, [7 + n, 20 + n]) for n in range(batch)))
    kinds = ("decode", 1), ("decode_shared", 2), ("decode", 2), ("decode_shared", 3), ("decode", 3)
    assert graphs.replays == dict.fromkeys(kinds, 1) | {("decode", 1): 2}
    assert fake.recorded == 5


@pytest.mark.skipif(DEVICE == "cuda", reason="about the fake device")
@torch.inference_mode()
def test_recordings_share_one_buffer_of_logits(folder: Path) -> None:
    """Guards the memory of a card: with a buffer for each size, those up to 256 are five times the largest."""
    gpu = Side(folder, "triton")
    assert isinstance(gpu.attention, TritonAttention)
    results: list[torch.Tensor] = []

    class Keeping(FakeRecorder):
        def record(self, work: Callable[[], torch.Tensor]) -> Recording:
            results.append(super().record(work).result)
            return Recording(lambda: None, results[-1])

    DecodeGraphs(gpu.model, gpu.kv, gpu.attention, Keeping(), [1, 2, 4]).prepare()
    vocab = gpu.model.config.vocab
    assert [tuple(result.shape) for result in results] == [(n, vocab) for n in (4, 4, 2, 2, 1)]
    assert len({result.data_ptr() for result in results}) == 1
    assert results[0].untyped_storage().nbytes() == 4 * vocab * 4


@pytest.mark.skipif(DEVICE == "cuda", reason="about the fake device")
def test_the_fake_device_freezes_what_a_graph_freezes() -> None:
    """Guards the tests above against a fake that simply runs the work again: numbers stay, memory is read anew."""
    x, number = torch.zeros(4), [1.0]

    def work() -> torch.Tensor:
        y = x
        for _ in range(30):
            y = y + number[0]
        return y

    recording = FakeRecorder().record(work)
    assert recording.result.tolist() == [30.0] * 4
    number[0] = 5.0
    x.fill_(100.0)
    recording.replay()
    assert recording.result.tolist() == [130.0] * 4


def test_sizes_are_bounded(folder: Path) -> None:
    with pytest.raises(ValueError, match="largest"):
        recorded(folder, [1, 5])
    assert recorded_sizes(1) == [1] and recorded_sizes(6) == [1, 2, 4, 6] and recorded_sizes(8) == [1, 2, 4, 8]
    assert recorded_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 100]


def test_an_empty_plan_runs_nothing(folder: Path) -> None:
    gpu, graphs = recorded(folder, [1])
    assert gpu.runner.run(StepPlan(())) == [] and not graphs.replays

"""`benchmarks.gpu` without a GPU: what it says, and that every part runs, on tiny shapes in the interpreter."""

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import decode, steps
from benchmarks.gpu.card import Card, Sizes
from tests.engine.recording import FakeRecorder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures the real card instead")
TINY = Sizes(
    heads=4, kv_heads=2, head_dim=16, batch=2, unit=256, layers=1, pool_bytes=1 << 16, rounds=1, programs_per_sm=1
)


class Clock:
    """Runs work once and looks at the clock: the figures mean nothing, their being there does."""

    def __init__(self) -> None:
        self.calls = 0

    def seconds(self, work: Callable[[], object]) -> float:
        self.calls += 1
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    busy_seconds = seconds


def tiny() -> Card:
    return Card(torch.device("cpu"), Clock(), torch.float16, 90, 2, TINY)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """Guards an empty file of results, and a traceback where a sentence is wanted."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "no NVIDIA GPU" in ended.stderr and "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


def test_every_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the one command: parts that only a GPU has ever run would fail there first. All but the measuring itself
    is the same code."""
    card = tiny()
    monkeypatch.setattr(steps, "steps", partial(steps.steps, recorder=lambda device: FakeRecorder()))
    # The transports' part has processes and a test of its own.
    parts = [part for part in program.PARTS if part != "transport"]
    results, failures = program.run(card, parts)
    assert not failures
    assert all(line["right"] for line in results["correct"])
    assert {line["id"] for line in results["decode"]} == {"K1", "K2", "K3", "split"}
    assert [line["order"] for line in results["orders"]] == list(decode.ORDERS)
    replayed = {line["what"]: line["replayed"] for line in results["steps"]}
    assert replayed["batch 2, recorded"] > 0 and replayed["batch 2, not recorded"] == 0
    assert all(line["planned_ahead"] > line["planned_at_once"] for line in results["steps"])


def test_a_wrong_kernel_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check: values that are a fiftieth off must not pass."""
    from benchmarks.gpu import correct

    real = correct.decode_attention

    def off(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = real(*args, **options)  # type: ignore[arg-type]
        return out + 0.02, lse

    monkeypatch.setattr(correct, "decode_attention", off)
    wrong = [line["what"] for line in correct.correct(tiny()) if not line["right"]]
    assert len(wrong) == 1 and str(wrong[0]).startswith("decode")


def test_a_part_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(program.PARTS, "copies", "benchmarks.gpu.nowhere:copies")
    results, failures = program.run(tiny(), ["copies", "copy_rate"])
    assert list(results) == ["copy_rate"] and "nowhere" in failures["copies"]

"""`benchmarks.gpu` without a GPU: what it says, and parts of it on tiny shapes in the interpreter. All of it, on a
machine that has little, is run by `test_gpu_bundle.py`."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import decode, engine, others, sampling, weights
from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.dry import Clock, dry_card
from benchmarks.gpu.parts import LIMIT_S, PARTS, within
from tests.engine.backends.gpu.recording import FakeRecorder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures the real card instead")


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """Guards an empty file of results, and a traceback where a sentence is wanted."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "no NVIDIA GPU" in ended.stderr and "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


def test_the_engine_runs_recorded_and_not() -> None:
    """Guards the lines of recorded steps, which only a GPU has, and that both are of the same requests."""
    lines = list(engine.engine(dry_card(), lambda device: FakeRecorder()))
    whats = [f"batch {n}" for n in (1, 4)] + ["a chunk of 2 tokens"]
    assert [line["what"] for line in lines] == [
        f"{what}, {how}" for what in whats for how in ("not recorded", "recorded")
    ]
    assert [line["replayed"] > 0 for line in lines[:4]] == [False, True, False, True]
    assert all(float(line["tokens_per_s"]) > 0 < float(line["bound_ms"]) for line in lines[:4])
    assert all(0 < float(line["launch_ms"]) <= float(line["ms"]) for line in lines[4:])


@pytest.mark.parametrize(
    "part",
    [
        decode.orders,
        decode.shapes,
        decode.eight_bits,
        decode.blocks,
        others.prefill,
        others.copies,
        sampling.sampling,
        weights.products,
        weights.experts,
    ],
)
def test_a_part_that_fails_has_told_what_it_had(part: Callable[[Card], Iterator[Line]]) -> None:
    """Guards figures that are lost with the one that could not be had."""

    class Failing(Clock):
        left = 2

        def seconds(self, work: Callable[[], object]) -> float:
            self.left -= 1
            if self.left < 0:
                raise InterruptedError
            return super().seconds(work)

    told: list[Line] = []
    with pytest.raises(InterruptedError):
        for line in part(replace(dry_card(), timer=Failing())):
            told.append(line)
    assert told


def test_all_parts_together_are_under_eight_minutes() -> None:
    assert sum(part.budget_s for part in PARTS.values()) <= LIMIT_S < 480


def test_parts_that_are_asked_for_have_all_the_time() -> None:
    """Guards `--only transport`, whose four ways of three processes each had the part's own 30 seconds."""
    assert within(["transport"], LIMIT_S)["transport"].budget_s == LIMIT_S
    some = within(["transport", "correct"], 280.0)
    assert list(some) == ["correct", "transport"]
    assert [part.budget_s for part in some.values()] == pytest.approx([180.0, 100.0])
    assert within(list(PARTS), LIMIT_S) == PARTS


def test_a_wrong_kernel_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check: values that are a fiftieth off must not pass."""
    from benchmarks.gpu import correct

    real = correct.decode_attention

    def off(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = real(*args, **options)  # type: ignore[arg-type]
        return out + 0.02, lse

    monkeypatch.setattr(correct, "decode_attention", off)
    found = {case.kind: correct.check(dry_card(), case) for case in correct.CASES[correct.IN_DRY_RUN]}
    assert {kind: line["right"] for kind, line in found.items()} == {"decode": 0, "prefill": 1}

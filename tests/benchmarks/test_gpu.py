"""`benchmarks.gpu` without a GPU: what it says, and that every part runs, on tiny shapes in the interpreter."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import decode, peers, steps, transport
from benchmarks.gpu.dry import dry_card
from benchmarks.gpu.goals import judged
from tests.engine.recording import FakeRecorder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures the real card instead")


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
    monkeypatch.setattr(steps, "on_card", partial(steps.steps, recorder=lambda device: FakeRecorder()))
    results, failures = program.run(dry_card(), list(program.PARTS))
    assert not failures
    assert all(line["right"] for line in results["correct"])
    assert {line["id"] for line in results["decode"]} == {"K1", "K2", "K3", "split"}
    assert [line["what"] for line in results["orders"]] == list(decode.ORDERS)
    asked = judged(results)
    assert {line["id"] for line in asked} == {*(f"K{n}" for n in range(9)), "T1"}
    missing = {line["id"] for line in asked if line["met"] == "not measured"}
    assert missing == {"T1"}, "shared memory stands in for the transports of a card"
    replayed = {line["what"]: line["replayed"] for line in results["steps"]}
    assert replayed["batch 2, recorded"] > 0 and replayed["batch 2, not recorded"] == 0
    assert all(line["planned_ahead"] > line["planned_at_once"] for line in results["steps"])
    absent = {line["what"] for line in results["peers"] if "absent" in line}
    assert absent == {*peers.PEERS, *peers.CASCADES}, "a package is installed here, or its absence was not told"
    assert [line["blocks"] for line in results["transport"] if "blocks" in line] == list(transport.CHUNKS)


def test_a_dry_run_is_one_command(tmp_path: Path) -> None:
    """Guards the command line, which nothing else calls where there is no GPU, and figures of a dry run that pass for
    measured ones."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(tmp_path)]
    command += ["--only", "copy_rate", "--only", "peers", "--only", "transport"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert set(told["results"]) == {"copy_rate", "peers", "transport"} and not told["failures"]
    assert "mean nothing" in told["card"]["gpu"]


def test_a_wrong_kernel_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check: values that are a fiftieth off must not pass."""
    from benchmarks.gpu import correct

    real = correct.decode_attention

    def off(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = real(*args, **options)  # type: ignore[arg-type]
        return out + 0.02, lse

    monkeypatch.setattr(correct, "decode_attention", off)
    wrong = [line["what"] for line in correct.correct(dry_card()) if not line["right"]]
    assert len(wrong) == 1 and str(wrong[0]).startswith("decode")


def test_a_part_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(program.PARTS, "copies", "benchmarks.gpu.nowhere:copies")
    results, failures = program.run(dry_card(), ["copies", "copy_rate"])
    assert list(results) == ["copy_rate"] and "nowhere" in failures["copies"]

"""`benchmarks.gpu` without a GPU: what it says, and that every part runs, on tiny shapes in the interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import decode, engine, others, peers, transport
from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.dry import Clock, dry_card
from benchmarks.gpu.parts import LIMIT_S, PARTS
from tests.benchmarks import slim
from tests.engine.recording import FakeRecorder

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures the real card instead")


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """Guards an empty file of results, and a traceback where a sentence is wanted."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "no NVIDIA GPU" in ended.stderr and "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_all_of_it_runs_on_a_machine_that_has_little(tmp_path: Path) -> None:
    """Guards the one command, each of whose parts would else fail first on a card: a package that such a machine does
    not have, a part that breaks, figures of a dry run that pass for measured ones. All but the measuring itself is the
    same code."""
    python = slim.make(tmp_path / "venv")
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    for absent in ("msgspec", "xxhash", "ray", "gguf"):
        asked = subprocess.run([python, "-c", f"import {absent}"], capture_output=True, cwd=ROOT)
        assert b"ModuleNotFoundError" in asked.stderr, f"{absent} is there: nothing would be proven"
    command = [python, "-m", "benchmarks.gpu", "--dry-run", "--out", tmp_path]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads((tmp_path / "gpu.json").read_text())
    results = told["results"]
    assert "mean nothing" in told["card"]["gpu"] and told["environment"]["msgspec"] == "not installed"
    assert list(results) == list(PARTS) and not told["failures"]
    assert all(results.values())
    assert all(line["right"] for line in [*results["correct"], *results["cluster"]])
    assert {line["id"] for line in results["decode"]} == {"K1", "K2", "K3", "split"}
    assert [line["what"] for line in results["orders"]] == list(decode.ORDERS)
    assert {line["id"] for line in told["goals"]} == {*(f"K{n}" for n in range(9)), "T1"}
    missing = {line["id"] for line in told["goals"] if line["met"] == "not measured"}
    assert missing == {"T1"}, "shared memory stands in for the transports of a card"
    assert all(line["planned_ahead"] > line["planned_at_once"] for line in results["engine"])
    absent_peers = {line["what"] for line in results["peers"] if "absent" in line}
    every = {*peers.PEERS, *peers.CASCADES}
    assert absent_peers == every, "a package is installed here, or its absence was not told"
    assert [line["blocks"] for line in results["transport"] if "blocks" in line] == list(transport.CHUNKS)
    assert "absent" in results["demo"][0]


def test_the_engine_runs_recorded_and_not() -> None:
    """Guards the lines of recorded steps, which only a GPU has, and that both are of the same requests."""
    lines = list(engine.engine(dry_card(), lambda device: FakeRecorder()))
    assert [line["what"] for line in lines] == [
        f"batch {n}, {how}" for n in (1, 4) for how in ("not recorded", "recorded")
    ]
    assert [line["replayed"] > 0 for line in lines] == [False, True, False, True]
    assert all(float(line["tokens_per_s"]) > 0 < float(line["bound_ms"]) for line in lines)


@pytest.mark.parametrize(
    "part", [decode.orders, decode.shapes, decode.eight_bits, decode.blocks, others.prefill, others.copies]
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

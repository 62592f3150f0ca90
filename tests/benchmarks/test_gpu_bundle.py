"""The bundle for a machine with a GPU, and its one command: unpacked elsewhere, on a machine that has little."""

import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from benchmarks.gpu import bundle, decode, peers, transport
from benchmarks.gpu.first_run import STAGES
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.wheels import PACKAGES, normal
from tests.benchmarks import slim

TESTS = ("pytest", "hypothesis", "iniconfig", "packaging", "pluggy", "pygments", "sortedcontainers")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A bundle with the wheels that a test can have without a network."""
    folder = tmp_path_factory.mktemp("bundle")
    slim.pack(folder / "wheels", "msgspec", "xxhash", *TESTS)
    out = folder / "headrace-gpu.tar.gz"
    assert bundle.main(["--out", str(out), "--wheels", str(folder / "wheels")]) == 0
    yield out


def unpacked(packed: Path, folder: Path) -> Path:
    with tarfile.open(packed) as tar:
        tar.extractall(folder, filter="data")
    return folder / bundle.TOP


def test_it_holds_the_project_and_wheels_and_nothing_built(packed: Path) -> None:
    """Guards a file that a run needs and git does not know, what belongs to this machine, and results without a
    revision."""
    with tarfile.open(packed) as tar:
        names = {member.name.partition("/")[2] for member in tar}
        owners = {(member.uid, member.uname) for member in tar}
    for needed in ("benchmarks/gpu/first_run.py", "tests/conftest.py", "pyproject.toml", "kernels/configs.py"):
        assert needed in names
    assert {normal(name.split("/")[1].split("-")[0]) for name in names if name.startswith("wheels/")} == {
        "msgspec", "xxhash", *TESTS,
    }  # fmt: skip
    assert "telemetry/REVISION" in names
    assert owners == {(0, "")}
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith((".git/", ".venv/"))]


def test_a_bundle_of_a_bundle_is_the_same(packed: Path, tmp_path: Path) -> None:
    """Guards a machine that has no git, where everything that lies about would be taken along."""
    there = unpacked(packed, tmp_path)
    (there / "kernels" / "__pycache__").mkdir()
    (there / "kernels" / "__pycache__" / "x.cpython-312.pyc").touch()
    (there / "kernels" / "_native_avx2.so").touch()
    files = {str(path) for path in bundle.project_files(there)}
    git = {str(path) for path in bundle.project_files(bundle.ROOT)}
    hidden = {path for path in git if any(part.startswith(".") for part in Path(path).parts)}
    assert files == git - hidden | {"telemetry/REVISION"}


def test_one_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards half an hour of a card that passes while a file is not accepted."""
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 1 << 16)
    assert bundle.main(["--out", str(tmp_path / "b.tar.gz"), "--wheels", str(tmp_path)]) == 1
    assert "are allowed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_its_packages_need_no_others() -> None:
    """Guards an import that fails on the card, of a package that one of ours needs."""
    known = {*PACKAGES, *slim.closure("torch")}
    for name in PACKAGES:
        for text in slim.requirements(name):
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                # `tokenizers` asks the hub for nothing where files are given.
                assert normal(needed.name) in {*known, "huggingface-hub"}, f"{name} needs {text}"


def run(there: Path, python: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    environment["PATH"] = str(python.parent)
    command = ["python3", "-m", "benchmarks.gpu.first_run", "--dry-run", "--out", str(out), *options]
    with out.with_suffix(".said").open("wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, cwd=there, env=environment)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the real card instead")
def test_its_one_command_runs_on_a_machine_that_has_little(packed: Path, tmp_path: Path) -> None:
    """Guards the first contact with a card: a package that such a machine lacks, a `python` that is not there, a part
    that breaks, an import that only works in this checkout, figures of a dry run that pass for measured ones. Once with
    the stand-ins and once with the wheels beside it; all but the measuring itself is the same code."""
    python = slim.make(tmp_path / "venv")
    for absent in slim.ABSENT:
        asked = subprocess.run([python, "-c", f"import {absent}"], capture_output=True, cwd=tmp_path)
        assert b"ModuleNotFoundError" in asked.stderr, f"{absent} is there: nothing would be proven"
    bare, whole = unpacked(packed, tmp_path / "bare"), unpacked(packed, tmp_path / "whole")
    few, all_ = tmp_path / "few", tmp_path / "all"
    some = [name for name in STAGES if name != "whole"]
    runs = [
        run(bare, python, few, f"--wheels={tmp_path}", "--only=whole"),
        run(whole, python, all_, *(f"--only={name}" for name in some)),
    ]
    try:
        for process, out in zip(runs, (few, all_), strict=True):
            assert process.wait(timeout=400) == 0, out.with_suffix(".said").read_text()
    finally:
        for process in runs:
            process.terminate()
            process.wait()

    stands_in, real = (json.loads((out / "first-run.json").read_text()) for out in (few, all_))
    assert stands_in["versions"]["msgspec"] == "not installed" and not stands_in["packages"]
    assert "of its wheel" in real["packages"]["msgspec"] and real["versions"]["msgspec"] != "not installed"
    assert list(stands_in["stages"]) == ["whole"] and list(real["stages"]) == some
    assert {path.name for path in few.iterdir()} == {"first-run.json", "first-run.log", "gpu.json"}
    assert {path.name for path in all_.iterdir()} == {
        "first-run.json", "first-run.log", "gpu-check.json", "gpu-tuned.json", "measured.json",
    }  # fmt: skip
    everything(json.loads((few / "gpu.json").read_text()))
    tuned = json.loads((all_ / "gpu-tuned.json").read_text())
    assert not tuned["failures"] and tuned["environment"]["msgspec"] != "not installed"
    assert tuned["revision"] == stands_in["versions"]["revision"] != "unknown"
    log = (all_ / "first-run.log").read_text()
    assert re.search(r"\d+ skipped", log) and "decode: launched" in log
    table = "kernels/measured.json"
    assert (whole / table).read_bytes() == (bundle.ROOT / table).read_bytes(), "the bundle itself was changed"


def everything(told: dict[str, object]) -> None:
    """Check that nothing is missing from a whole dry run without a single package more."""
    results = told["results"]
    assert isinstance(results, dict)
    assert "mean nothing" in str(told["card"]) and "'msgspec': 'not installed'" in str(told["environment"])
    assert list(results) == list(PARTS) and not told["failures"]
    assert all(results.values())
    assert all(line["right"] for line in [*results["correct"], *results["cluster"]])
    assert {line["id"] for line in results["decode"]} == {"K1", "K2", "K3", "split"}
    assert [line["what"] for line in results["orders"]] == list(decode.ORDERS)
    goals = told["goals"]
    assert isinstance(goals, list)
    assert {line["id"] for line in goals} == {
        *(f"K{n}" for n in range(9)), "K6 beside", "T1", "E1", "E1 idle", "E2",
    }  # fmt: skip
    missing = {line["id"] for line in goals if line["met"] == "not measured"}
    assert missing == {"T1", "E1", "E1 idle"}, "shared memory stands in for transports, and nothing is recorded"
    assert all(line["planned_ahead"] > line["planned_at_once"] for line in results["engine"] if "context" in line)
    absent_peers = {line["what"] for line in results["peers"] if "absent" in line}
    every = {*peers.PEERS, *peers.CASCADES}
    assert absent_peers == every, "a package is installed here, or its absence was not told"
    assert [line["blocks"] for line in results["transport"] if "blocks" in line] == list(transport.CHUNKS)
    assert "absent" in results["demo"][0]



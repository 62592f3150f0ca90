"""The table of configurations is measured by one command, and read where it is put."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.configs import MEASURED, TABLE, ConfigKey, KernelConfig, read_measured

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures the real card instead")
SOURCE = Path(__file__).parents[2]


def tune(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.tune", "--out", str(out), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=SOURCE
    )


def test_a_dry_run_measures_every_kernel_and_is_not_taken(tmp_path: Path) -> None:
    """Guards a program that only a card has ever run, and figures of the interpreter in the table of a worker."""
    ended = tune(tmp_path, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    file = tmp_path / MEASURED.name
    told = json.loads(file.read_text())
    assert [entry["kernel"] for entry in told["entries"]] == ["decode", "decode_shared", "prefill", "copy_blocks"]
    assert all(entry["us"] <= entry["present_us"] for entry in told["entries"])
    with pytest.raises(ValueError, match="dry run"):
        read_measured(file)
    file.write_text(json.dumps({**told, "gpu": "a card"}))
    found = read_measured(file)
    assert set(found) < set(TABLE) and len(found) == 4
    assert all(config.origin == "measured" for config in found.values())


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    ended = tune(tmp_path)
    assert ended.returncode == 2 and "no NVIDIA GPU" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_what_was_measured_is_what_a_worker_runs_with(tmp_path: Path) -> None:
    """Guards a table that is measured and never looked at."""
    key = ConfigKey("decode", 128, 4, 64, "bfloat16", 90)
    entry = {"kernel": "decode", "head_dim": 128, "group": 4, "block_size": 64, "dtype": "bfloat16", "arch": 90}
    entry |= {"tile": 128, "warps": 8, "stages": 2, "rows": 16, "us": 1.0, "present_us": 2.0}
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "configs.py").write_text((SOURCE / "kernels" / "configs.py").read_text())
    (package / "__init__.py").touch()
    (package / MEASURED.name).write_text(json.dumps({"gpu": "a card", "entries": [entry]}))
    asked = f"from kernels.configs import *; print(config_for({key!r}))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    assert told.stdout.strip() == repr(KernelConfig(128, 8, 2, 16, "measured"))


def test_an_unknown_kernel_is_refused(tmp_path: Path) -> None:
    file = tmp_path / MEASURED.name
    assert read_measured(file) == {}
    entry = {"kernel": "sort", "head_dim": 0, "group": 0, "block_size": 0, "dtype": "float32", "arch": 90}
    file.write_text(json.dumps({"gpu": "a card", "entries": [entry]}))
    with pytest.raises(ValueError, match="sort"):
        read_measured(file)


def test_a_wrong_candidate_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a fast configuration that computes something else."""
    from benchmarks.gpu import tuning
    from benchmarks.gpu.dry import dry_card

    real = tuning._step

    def off(card, key):  # type: ignore[no-untyped-def]
        step = real(card, key)
        return lambda config: step(config) if config == TABLE[key] else lambda: step(config)() + 0.1

    monkeypatch.setattr(tuning, "_step", off)
    lines, wrong = tuning.tuned(dry_card(), ["decode"])
    assert len(wrong) == tuning.IN_DRY_RUN and "apart" in wrong[0]
    key = next(key for key in TABLE if key.kernel == "decode" and key.arch == 90)
    assert lines[0]["tile"] == TABLE[key].tile and lines[0]["us"] == lines[0]["present_us"]

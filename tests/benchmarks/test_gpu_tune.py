"""The table of configurations is measured by one command, and read where it is put."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu import tuning
from benchmarks.gpu.card import Card, Line, Sizes
from benchmarks.gpu.dry import dry_card
from benchmarks.gpu.tune import main
from kernels.configs import MEASURED, TABLE, ConfigKey, KernelConfig, read_measured

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures the real card instead")
SOURCE = Path(__file__).parents[2]
KEY = ConfigKey("decode", 64, 3, 16, "bfloat16", 90)
PRESENT = TABLE[KEY]
FATES = tuning.candidates(KEY)[:7]
"""What becomes of each candidate, by its place: kills its process, poisons it, is refused, is wrong, is the fastest, is
slow, does not fit."""


def tune(out: Path, *options: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.tune", "--out", str(out), *options]
    said = subprocess.PIPE
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, text=True, env=environment, cwd=SOURCE)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    with tune(tmp_path) as process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 2 and "no NVIDIA GPU" in said
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


class Faked:
    """A timer whose process has a fate for each configuration, as a card's may."""

    def __call__(self, card: Card, task: tuple[ConfigKey, KernelConfig]) -> Line:
        _, config = task
        if config == FATES[0]:
            os.kill(os.getpid(), signal.SIGSEGV)
        if config == FATES[1]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if config == FATES[2]:
            raise OutOfResources(4096, 1024, "threads")
        apart = 1.0 if config == FATES[3] else 0.0
        return {"apart": apart, "us": 10.0 if config in (PRESENT, FATES[5]) else 4.0 if config == FATES[4] else 1.0}


class Compiled:
    """A pool of processes that is done at once, and refuses one configuration."""

    def __init__(self, target: object) -> None:
        pass

    def ask(self, key: ConfigKey, configs: Sequence[KernelConfig]) -> dict[KernelConfig, Future[str]]:
        answers = {config: Future[str]() for config in configs}
        for config, answer in answers.items():
            answer.set_result("OutOfResources: 262144" if config == FATES[6] else "")
        return answers

    def close(self) -> None:
        pass


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "CompilePool", Compiled)
    monkeypatch.setattr(tuning, "IN_DRY_RUN", len(FATES))


@pytest.mark.slow
@pytest.mark.usefixtures("faked")
def test_a_candidate_costs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the figures of a card: an illegal access, a process that dies and a wrong answer cost one candidate each,
    and one that was refused is never timed, though it would have been the fastest."""
    (found,) = tuning.tuned(dry_card(), [KEY], math.inf, Faked())
    assert found.key == KEY and found.line is not None
    assert KernelConfig(*(int(found.line[name]) for name in ("tile", "warps", "stages", "rows"))) == FATES[4]
    assert (found.line["us"], found.line["present_us"], found.line["timed"]) == (4.0, 10.0, 3)
    assert found.line["of"] == len(FATES)
    (wrong,), (died, poisoned) = found.wrong, sorted(found.broken, key=lambda told: "illegal" in told)
    assert str(FATES[3]) in wrong and "1.0 apart" in wrong
    assert str(FATES[0]) in died and "SIGSEGV" in died
    assert str(FATES[1]) in poisoned and "illegal memory access" in poisoned
    assert f"refused: {FATES[6]}" in capsys.readouterr().out


@pytest.mark.usefixtures("faked")
def test_nothing_is_begun_when_the_time_is_over() -> None:
    """Guards the budget: an entry whose time is over is told with what was timed, and those behind it are left."""
    keys = [KEY, ConfigKey("decode", 128, 4, 64, "bfloat16", 90)]
    assert not list(tuning.tuned(dry_card(), keys, 0.0, Faked()))
    (found,) = tuning.tuned(dry_card(), keys, 0.5, Faked())
    assert found.key == KEY and found.line is not None
    assert found.line["timed"] == 1 and found.line["us"] == found.line["present_us"] == 10.0


def test_an_answer_is_held_against_that_of_the_present_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a fast configuration that computes something else."""
    real = tuning.step_of

    def off(card: Card, key: ConfigKey) -> tuning.Step:
        step = real(card, key)
        return lambda config: step(config) if config == PRESENT else lambda: step(config)() + 0.1

    monkeypatch.setattr(tuning, "step_of", off)
    timer, card = tuning.CandidateTimer(), dry_card()
    assert timer(card, (KEY, PRESENT))["apart"] == 0.0
    assert float(timer(card, (KEY, FATES[0]))["apart"]) > tuning.APART


def test_keys_are_chosen_by_words_of_their_names() -> None:
    card = replace(dry_card(), sizes=Sizes())
    every = tuning.keys_for(card, [])
    assert {key.kernel for key in every} == set(tuning.KERNELS) and len(every) == 20
    assert {key.arch for key in every} == {90}
    some = tuning.keys_for(card, ["decode* 128/4/64 bfloat16", "prefill 128/4/64"])
    assert [tuning.key_name(key) for key in some] == [
        "decode 128/4/64 bfloat16",
        "decode_shared 128/4/64 bfloat16",
        "prefill 128/4/64 bfloat16",
        "prefill 128/4/64 int8",
    ]
    assert not tuning.keys_for(card, ["8/4/64"]), "a word that is part of another"


@pytest.mark.usefixtures("faked")
def test_every_entry_is_written_when_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the entries of a run that is cut short, and those of an earlier run for other keys."""
    file = tmp_path / MEASURED.name
    entries: list[list[str]] = []

    def some(card: Card, keys: Sequence[ConfigKey], seconds: float) -> Iterator[tuning.Tuned]:
        assert seconds == 330
        for key in keys:
            if file.exists():
                entries.append([entry["kernel"] for entry in json.loads(file.read_text())["entries"]])
            yield tuning.Tuned(key, {**asdict(key), **asdict(PRESENT), "us": 1.0, "present_us": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tuned", some)
    for pattern, known in (("prefill", []), ("decode*", ["prefill"])):
        entries.clear()
        with pytest.raises(KeyboardInterrupt):
            main(["--dry-run", "--out", str(tmp_path), "--seconds", "330", "--keys", pattern])
        assert entries == ([known, [*known, "decode"]] if known else [])
    told = json.loads(file.read_text())
    assert [entry["kernel"] for entry in told["entries"]] == ["prefill", "decode", "decode_shared"]
    file.write_text(json.dumps({**told, "triton": "of another"}))
    with pytest.raises(KeyboardInterrupt):
        main(["--dry-run", "--out", str(tmp_path), "--seconds", "330", "--keys", "copy_blocks"])
    assert [entry["kernel"] for entry in json.loads(file.read_text())["entries"]] == ["copy_blocks"]
    assert main(["--dry-run", "--out", str(tmp_path), "--keys", "sort"]) == 2


@pytest.mark.slow
def test_a_dry_run_measures_every_kernel_and_is_not_taken(tmp_path: Path) -> None:
    """Guards a program that only a card has ever run, and figures of the interpreter in the table of a worker."""
    with tune(tmp_path, "--dry-run") as process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    file = tmp_path / MEASURED.name
    told = json.loads(file.read_text())
    assert [entry["kernel"] for entry in told["entries"]] == ["decode", "decode_shared", "prefill", "copy_blocks"]
    assert all(entry["us"] <= entry["present_us"] for entry in told["entries"])
    assert all(entry["timed"] == entry["of"] == 3 for entry in told["entries"]), "not all of what was compiled ahead"
    with pytest.raises(ValueError, match="dry run"):
        read_measured(file)
    file.write_text(json.dumps({**told, "gpu": "a card"}))
    found = read_measured(file)
    assert set(found) < set(TABLE) and len(found) == 4
    assert all(config.origin == "measured" for config in found.values())

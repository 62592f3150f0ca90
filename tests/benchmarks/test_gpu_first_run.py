"""The one command of a first half hour: stages that fail, hang or leave processes, and packages that come as wheels."""

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import first_run, wheels
from benchmarks.gpu.first_run import STAGES, Run, RunStage
from benchmarks.gpu.wheels import parsed, unpack

ROOT = Path(__file__).parents[2]
LIMIT_S = 2.0


HANGS = """
import os, time
print("said before it hung", flush=True)
for _ in range(2):
    if not os.fork():
        os.setsid()
    open(f"{os.environ['FOUND']}/{os.getpid()}", "w")
time.sleep(600)
"""
LEAVES = """
import os, time
if not os.fork():
    os.setsid()
    open(f"{os.environ['FOUND']}/{os.getpid()}", "w")
    time.sleep(600)
time.sleep(0.5)
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict[str, object]]]:
    """Runs stages in a process of its own, as `first_run` does; what `first-run.json` says of them."""
    monkeypatch.setenv("FOUND", str(tmp_path))

    def run(*options: str, **stages: str) -> dict[str, dict[str, object]]:
        script = f"""
import sys
from benchmarks.gpu import first_run
first_run.SLOWER, first_run._versions = 1.0, lambda here: {{}}
first_run.STAGES = {{
    name: first_run.RunStage({LIMIT_S}, lambda run, text=text: [[sys.executable, "-c", text]])
    for name, text in {stages!r}.items()
}}
sys.exit(first_run.main({["--dry-run", "--out", str(tmp_path / "out"), *options]!r}))
"""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        found = json.loads((tmp_path / "out" / "first-run.json").read_text())["stages"]
        ran = [option.removeprefix("--only=") for option in options] or stages
        assert ended.returncode == int(any(found[name]["failure"] for name in ran)), ended.stderr
        return dict(found)

    return run


def test_a_stage_that_fails_costs_the_others_nothing(
    told: Callable[..., dict[str, dict[str, object]]], tmp_path: Path
) -> None:
    """Guards the rest of the half hour, and what earlier calls have written into the same folder."""
    found = told(fails="import sys; print('one'); sys.exit(3)", dies="import os; os.abort()", goes="print('two')")
    assert [stage["failure"] for stage in found.values()] == ["status 3", "SIGABRT", ""]
    found = told("--only=goes", goes="print('three')", hangs=HANGS)
    assert list(found) == ["fails", "dies", "goes"]
    log = (tmp_path / "out" / "first-run.log").read_text()
    assert all(f"\n{word}\n" in log for word in ("one", "two", "three"))


def test_a_stage_that_hangs_is_ended_with_all_it_started(
    told: Callable[..., dict[str, dict[str, object]]], tmp_path: Path
) -> None:
    """Guards the card's memory: parts lead sessions of their own, and outlive a parent that is killed."""
    found = told(hangs=HANGS, leaves=LEAVES, goes="print('two')")
    assert found["hangs"]["failure"] == "it was not over in time" and not found["goes"]["failure"]
    assert LIMIT_S <= float(str(found["hangs"]["took_s"])) < LIMIT_S + 5
    assert "said before it hung" in (tmp_path / "out" / "first-run.log").read_text()
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(pids) == 5
    assert not [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


def test_a_command_that_is_cut_short_has_said_what_it_had(tmp_path: Path) -> None:
    """Guards a call that ends when its ten minutes do."""
    command = [sys.executable, "-m", "benchmarks.gpu.first_run", "--dry-run", "--out", str(tmp_path), "--only=check"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 60
    log = tmp_path / "first-run.log"
    while not (log.exists() and "copy_rate:" in log.read_text()):
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(30) == 128 + 15
    stage = json.loads((tmp_path / "first-run.json").read_text())["stages"]["check"]
    assert stage["failure"] == "it was cut short" and stage["took_s"] > 0
    assert json.loads((tmp_path / "gpu-check.json").read_text())["results"]["copy_rate"]


def test_the_measured_table_is_in_place_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a second run that has the table of the first; one that has none says where it may come from."""
    # Whatever runs below this process would be ended, the tests' own helpers included.
    monkeypatch.setattr(first_run, "_end_all", lambda: None)
    script = "from kernels import configs; print(sorted({one.origin for one in configs.TABLE.values()}))"
    stage = RunStage(60, lambda run: [[sys.executable, "-c", script]], is_tuned=True)
    run = Run(tmp_path, tmp_path / "measured.json")
    table = (ROOT / "kernels" / "measured.json").read_bytes()
    (tmp_path / "log").touch()
    with (tmp_path / "log").open("ab") as log:
        assert "--measured" in first_run._run(stage, run, 60, tmp_path, os.environ, log)
        shape = {"kernel": "decode", "head_dim": 128, "group": 4, "block_size": 64, "dtype": "bfloat16", "arch": 90}
        entry = {**shape, "tile": 64, "warps": 8, "stages": 2, "rows": 16}
        run.measured.write_text(json.dumps({"gpu": "a card", "entries": [entry]}))
        assert first_run._run(stage, run, 60, tmp_path, os.environ, log) == ""
    assert "['contract', 'measured']" in (tmp_path / "log").read_text()
    assert (ROOT / "kernels" / "measured.json").read_bytes() == table


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the real card instead")
def test_without_a_gpu_it_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.first_run", "--out", str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT).returncode == 2
    assert "no NVIDIA GPU" in capfd.readouterr().err
    told = json.loads((tmp_path / "first-run.json").read_text())
    assert not told["stages"] and "libcuda" in told["versions"]["driver"]


def test_it_fits_half_an_hour_and_each_stage_a_call_of_ten_minutes() -> None:
    limits = [stage.limit_s for stage in STAGES.values()]
    assert sum(limits) + first_run.VERSIONS_S < 1800 and max(limits) + first_run.VERSIONS_S < 600


def test_what_a_command_is_given_is_less_than_its_stage_has() -> None:
    """Guards results that are lost with a process which is killed before it is at its end."""
    for name in ("check", "whole", "tune", "tuned"):
        stage = STAGES[name]
        (command,) = stage.commands(Run(Path(), Path()))
        given = float(command[command.index("--seconds") + 1])
        assert stage.limit_s - 30 <= given <= stage.limit_s - 10, name


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("a-1.0-py3-none-any", True),
        ("a-1.0-py2.py3-none-any", True),
        ("a-1.0-cp39-abi3-manylinux2014_x86_64", True),
        ("a-1.0-cp313-abi3-manylinux2014_x86_64", False),
        ("a-1.0-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64", True),
        ("a-1.0-cp311-cp311-manylinux2014_x86_64", False),
        ("a-1.0-cp312-cp312t-manylinux2014_x86_64", False),
        ("a-1.0-cp312-cp312-manylinux2014_aarch64", False),
        ("a-1.0-cp312-cp312-win_amd64", False),
        ("a-1.0-py2-none-any", False),
    ],
)
def test_a_wheel_is_for_an_interpreter(name: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "MINOR", 12)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert parsed(Path(f"{name}.whl")).fits() is fits


def made(folder: Path, name: str, version: str, text: str) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", text)
        file.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
    return path


def test_only_what_is_missing_or_too_old_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the machine's own packages, which were built for its driver, and a wheel that cannot be imported: where
    msgspec's cannot, its stand-in must be found."""
    monkeypatch.setattr(wheels, "least_versions", lambda: {"xxhash": "99.0"})
    given = [
        made(tmp_path, "msgspec", "99.0", "raise ImportError('newer than ours')"),
        made(tmp_path, "xxhash", "99.0", "VERSION = 99"),
        made(tmp_path, "headrace_new", "1.0", "import xxhash; assert xxhash.VERSION == 99"),
        made(tmp_path, "headrace_broken", "1.0", "import headrace_nowhere"),
    ]
    into = tmp_path / "into"
    told = unpack(given, into)
    assert told["msgspec"].endswith("of this machine")
    assert told["xxhash"] == "99.0, of its wheel" and told["headrace-new"] == "1.0, of its wheel"
    assert "headrace_nowhere" in told["headrace-broken"]
    left = {path.parts[len(into.parts)] for path in into.rglob("*") if path.is_file()}
    assert left == {"xxhash", "xxhash-99.0.dist-info", "headrace_new", "headrace_new-1.0.dist-info"}
    assert unpack([], tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("driver", "card", "found"), [(False, True, False), (True, False, False), (True, True, True)]
)
def test_tests_run_compiled_where_torch_has_a_gpu(
    driver: bool, card: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards `tests/gpu` on a card whose device files nobody has made yet, and kernels on a card that is hidden."""
    from tests import conftest

    def load(name: str) -> None:
        if not driver:
            raise OSError(name)

    monkeypatch.setattr(conftest.ctypes, "CDLL", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    assert conftest.has_gpu() is found

"""The first half hour on a card, in one command: `python3 -m benchmarks.gpu.first_run --out DIR`

Runs the stages of STAGES in order, each in processes of its own and within a limit of its own; one that fails or takes
too long costs the others nothing. `--only STAGE` runs some, so that the half hour may be taken in several calls.
Nothing is installed: packages that the machine lacks are taken from the folder `wheels` of a bundle
(`benchmarks.gpu.bundle`) for as long as this runs.

`DIR` gets a few files and no folder, written as it goes: `first-run.json` (versions, packages, how each stage ended),
`first-run.log` (all that the stages said), and the results of each. This itself needs nothing but the standard library.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.gpu.wheels import ROOT, environment, unpack
from cluster.processes.leftovers import descendants
from telemetry.build import NOTE, revision

TOLD, LOG = "first-run.json", "first-run.log"
MEASURED = "measured.json"
WHEELS = "wheels"
TUNED_KEYS = "128/4/64"
"""Head size, group and block of the keys that are tuned: those of the goals."""
VERSIONS_S = 60.0
SLOWER = 4.0
"""How many times longer a dry run may take."""
PIPE_S, KILL_S = 5.0, 10.0
_SUBREAPER = 36

Command = list[str]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command. `out` gets the results; `measured` is the table that `tuned` stages run with."""

    out: Path
    measured: Path
    is_dry: bool = False

    def module(self, name: str, *options: object) -> Command:
        dry = ["--dry-run"] if self.is_dry else []
        return [sys.executable, "-m", f"benchmarks.gpu{name}", *map(str, options), *dry]

    def parts(self, file: str, seconds: float, *names: str) -> Command:
        some = [f"--only={name}" for name in names]
        return self.module("", "--out", self.out, "--file", file, "--seconds", seconds, *some)


@dataclass(frozen=True, slots=True)
class RunStage:
    """One stage. `commands` run one after the other; if `is_tuned`, in a copy of the project with the measured table in
    place."""

    limit_s: float
    commands: Callable[[Run], list[Command]]
    is_tuned: bool = False


def _check(run: Run) -> list[Command]:
    return [run.parts("gpu-check.json", 150, "copy_rate", "correct", "transport")]


def _tests(run: Run) -> list[Command]:
    # The machine's pytest may bring plugins along, and packages that warn.
    options = ["-v", "-W", "default", "-p", "no:benchmark", "-p", "no:xdist", "-p", "no:cacheprovider"]
    return [[sys.executable, "-m", "pytest", "tests/gpu", *options, "-o", "faulthandler_timeout=60"]]


def _whole(run: Run) -> list[Command]:
    return [run.parts("gpu.json", 465)]


def _tune(run: Run) -> list[Command]:
    return [run.module(".tune", "--out", run.out, "--keys", TUNED_KEYS, "--seconds", 330)]


def _tuned(run: Run) -> list[Command]:
    names = ("copy_rate", "decode", "eight_bits", "shared", "prefill", "engine")
    return [run.parts("gpu-tuned.json", 285, *names)]


def _profile(run: Run) -> list[Command]:
    plain = run.module(".launches")
    ncu = None if run.is_dry else shutil.which("ncu")
    if ncu is None:
        return [plain]
    # The card's clocks are left as they are.
    options = ["--profile-from-start", "off", "--set", "full", "--clock-control", "none", "--force-overwrite"]
    report = str(run.out / "launches.ncu-rep")
    marked = [ncu, *options, "--export", report, *run.module(".launches", "--marked")]
    return [plain, marked, [ncu, "--import", report, "--page", "details"]]


STAGES = {
    "check": RunStage(160, _check),
    "tests": RunStage(170, _tests),
    "whole": RunStage(480, _whole),
    "tune": RunStage(350, _tune),
    "tuned": RunStage(295, _tuned, is_tuned=True),
    "profile": RunStage(120, _profile),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all stages. Returns 1 where a stage failed, 2 without a GPU."""
    options = _parser().parse_args(arguments)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    run = Run(out, options.measured or out / MEASURED, options.dry_run)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _adopt_orphans()
    told: dict[str, Any] = {"stages": {}}
    with suppress(FileNotFoundError):
        told = json.loads((out / TOLD).read_text(encoding="utf-8"))

    def save() -> None:
        (out / TOLD).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="headrace-gpu-") as scratch, (out / LOG).open("ab") as log:
        packages = Path(scratch, "packages")
        told["packages"] = unpack(options.wheels.glob("*.whl"), packages)
        here = environment(packages) | {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        told["versions"] = _versions(here)
        save()
        print(json.dumps(told, indent=1), flush=True)
        if not run.is_dry and not told["versions"].get("gpus"):
            print("benchmarks.gpu.first_run: torch sees no NVIDIA GPU", file=sys.stderr)
            return 2
        for name in options.only or STAGES:
            stage = STAGES[name]
            began_s = time.monotonic()
            limit_s = stage.limit_s * (SLOWER if run.is_dry else 1)
            told["stages"][name] = ending = {
                "began": datetime.now().isoformat(timespec="seconds"),
                "limit_s": limit_s,
                "failure": "it was cut short",
            }
            save()
            try:
                ending["failure"] = _run(stage, run, limit_s, Path(scratch), here, log)
            finally:
                _end_all()
                ending["took_s"] = round(time.monotonic() - began_s, 1)
                save()
    for name, ending in told["stages"].items():
        print(f"{name}: {ending.get('took_s', 0):.0f} of {ending['limit_s']:.0f} s, {ending['failure'] or 'done'}")
    return int(any(told["stages"][name]["failure"] for name in options.only or STAGES))


def _versions(here: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.versions"]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=here, timeout=VERSIONS_S
        )
        found: dict[str, Any] = json.loads(asked.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    return found


def _run(
    stage: RunStage, run: Run, limit_s: float, scratch: Path, here: Mapping[str, str], log: BinaryIO
) -> str:
    """Run all commands of a stage, whatever became of those before. Returns why the stage failed, or nothing."""
    folder = ROOT
    if stage.is_tuned:
        if not run.measured.exists():
            return f"there is no {run.measured}: tune first, or say with --measured where it is"
        folder = scratch / "project"
        _copy_with(run, folder)
    deadline_s = time.monotonic() + limit_s
    failures = []
    for command in stage.commands(run):
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        failures.append(_ended(command, folder, here, log, deadline_s))
        _end_all()
    return "; ".join(filter(None, failures))


def _ended(
    command: Command, folder: Path, here: Mapping[str, str], log: BinaryIO, deadline_s: float
) -> str:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder, env=here
    )
    assert process.stdout is not None

    said = process.stdout

    def hear() -> None:
        with said:
            for line in said:
                log.write(line)
                log.flush()
                sys.stdout.buffer.write(line)
                sys.stdout.flush()

    hearing = threading.Thread(target=hear, daemon=True)
    hearing.start()
    failure = ""
    try:
        status = process.wait(max(0.0, deadline_s - time.monotonic()))
        if status:
            failure = signal.Signals(-status).name if status < 0 else f"status {status}"
    except subprocess.TimeoutExpired:
        failure = "it was not over in time"
    finally:
        # What a stage leaves behind would hold the card's memory, and this pipe.
        _end_all()
        process.wait()
        hearing.join(PIPE_S)
    return failure


def _copy_with(run: Run, folder: Path) -> None:
    """Copy the project as it is here, with the measured table in place."""
    shutil.rmtree(folder, ignore_errors=True)
    hidden = shutil.ignore_patterns(".*", "__pycache__", WHEELS)
    shutil.copytree(ROOT, folder, ignore=hidden)
    table = json.loads(run.measured.read_text(encoding="utf-8"))
    if run.is_dry:
        # The table of a dry run is not taken anywhere; here nothing is measured, and the folder is thrown away.
        table["gpu"] = "a dry run"
    (folder / "kernels" / MEASURED).write_text(json.dumps(table), encoding="utf-8")
    # A copy is no checkout, but its results are of this revision.
    (folder / "telemetry" / NOTE).write_text(revision(), encoding="utf-8")


def _adopt_orphans() -> None:
    """Become the parent of processes whose own was killed: parts of a benchmark lead sessions of their own, and this
    process ends them."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _end_all() -> None:
    """End all processes below this one, but for such as the driver does not let go."""
    deadline_s = time.monotonic() + KILL_S
    while (left := descendants()) and time.monotonic() < deadline_s:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu.first_run", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for all results")
    parser.add_argument("--only", action="append", choices=list(STAGES), help="of these stages")
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help=f"what tune wrote (default: DIR/{MEASURED})"
    )
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / WHEELS, metavar="DIR", help="packages (default: those of the bundle)"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, no GPU: measures nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""`.ci/run`, with a `make` that says what it is told to: what ends it, what is tried again, and what it says last."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"

# Stands for every tool that the script calls beside those of a plain system. `setup` makes an interpreter, `demo` its
# figures. What a step says is in a file of its name; `step.status` holds the statuses of its runs, one a line; with
# `step.lasts` it goes on until the script is about to end.
MAKE = """#!/bin/bash
venv=${1#VENV=}
step=$2
echo "$@" >>"$SAID/called"
if [ "$step" = setup ]; then mkdir -p "$venv/bin"; ln -s "$(type -P true)" "$venv/bin/python"; fi
if [ "$step" = demo ]; then echo '{}' >"${3#ARGS=--json }"; fi
if [ -e "$SAID/$step" ]; then cat "$SAID/$step"; fi
if [ -e "$SAID/$step.lasts" ]; then while [ -e "$venv" ] && [ ! -e "${venv%/*}/ended" ]; do sleep 0.05; done; fi
if [ -s "$SAID/$step.status" ]; then
    status=$(head -1 "$SAID/$step.status")
    sed -i 1d "$SAID/$step.status"
    exit "$status"
fi
"""
NOTHING = "#!/bin/bash\nexit 0\n"
STEPS = {"check", "contract", "extras", "bundle", "test", "slow", "parity", "observe", "chaos", "clients", "sim"}
STEPS |= {"models", "rayup", "fuzz", "demo"}


class Steps:
    """A folder of stand-ins, first on PATH, and what each step is to say."""

    def __init__(self, folder: Path) -> None:
        self.said = folder / "said"
        self._tools = folder / "tools"
        # A copy: it works in the folder above its own, whose pytest cache is that of whoever runs this test.
        self._script = folder / ".ci" / "run"
        self._script.parent.mkdir()
        shutil.copy(SCRIPT, self._script)
        self.said.mkdir()
        self._tools.mkdir()
        # `find` lists shared memory, where other programs of this machine may have some.
        for name in ("make", "g++", "prometheus", "promtool", "chromium", "sshd", "rsync", "ip", "apt-get", "find"):
            tool = self._tools / name
            tool.write_text(MAKE if name == "make" else NOTHING)
            tool.chmod(0o755)
        for step in ("test", "slow", "parity", "observe", "chaos", "clients", "rayup"):
            self.says(step, "=== 10 passed in 1.00s ===")

    def says(self, step: str, *lines: str, statuses: tuple[int, ...] = ()) -> None:
        (self.said / step).write_text("".join(f"{line}\n" for line in lines))
        (self.said / f"{step}.status").write_text("".join(f"{status}\n" for status in statuses))

    def called(self, step: str) -> list[str]:
        """The options of each call of a step."""
        calls = [line.split(maxsplit=2) for line in (self.said / "called").read_text().splitlines()]
        return [" ".join(call[2:]) for call in calls if call[1] == step]

    def run(self, minutes: int = 80) -> tuple[int, list[str]]:
        environment = {**os.environ, "PATH": f"{self._tools}:{os.environ['PATH']}", "SAID": str(self.said)}
        environment["CI_MINUTES"] = str(minutes)
        done = subprocess.run(
            [self._script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
        )
        return done.returncode, done.stdout.splitlines()


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path)


def test_every_step_is_run_and_counted(steps: Steps) -> None:
    """Guards a step that nobody calls any more."""
    status, lines = steps.run()
    assert status == 0, lines
    assert lines[-2:] == ["== all passed", "70 passed, 0 failed"]
    assert "== skipped" not in lines
    at = lines.index("== left to make slow and make chaos")
    told = lines[at + 1 : lines.index("", at)]
    asked = {
        word.partition("=")[2]
        for step in ("slow", "chaos")
        for word in steps.called(step)[0].split()
        if "deselect" in word
    }
    assert set(told) == asked and len(told) > 5
    for step in STEPS - {"contract"}:
        assert len(steps.called(step)) == 1, step
    assert steps.called("contract") == ["", "TRITON=3.6.0 ARGS=--arch 90"]


def test_what_was_skipped_is_said_last(steps: Steps) -> None:
    """Guards a step that looks like one that passed, since no test of it could run here."""
    steps.says(
        "rayup",
        "SKIPPED [5] tests/deploy/test_ray_up.py: no hosts to try it on: needs root",
        "=== 5 skipped, 2900 deselected in 1.50s ===",
    )
    steps.says(
        "test",
        "SKIPPED [30] tests/gpu/test_gpu_graphs.py: needs a CUDA device",
        "SKIPPED [1] tests/gpu/test_gpu_loading.py:30: needs a CUDA device",
        "SKIPPED [2] tests/transfer/nccl/test_library.py:33: no libnccl is installed",
        "=== 2890 passed, 33 skipped, 9 deselected in 600.00s (0:10:00) ===",
    )
    steps.says("fuzz", "52 decoders, inputs changed at random: no atheris here", "52 held, 0 broken ")
    status, lines = steps.run()
    assert status == 0, lines
    assert lines[lines.index("== skipped") :] == [
        "== skipped",
        "inputs of make fuzz guided by atheris: it is not installed",
        "the whole of make rayup: no hosts to try it on: needs root",
        "31 of make test: needs a CUDA device",
        "2 of make test: no libnccl is installed",
        "",
        "== all passed, but for what was skipped",
        "2940 passed, 0 failed",
    ]


def test_what_would_not_end_in_time_is_left_out_and_said(steps: Steps) -> None:
    """Guards a slow machine, where a run that is cut off would say nothing, and a step that is gone unsaid."""
    status, lines = steps.run(minutes=6)
    assert status == 0, lines
    slow, chaos = lines[lines.index("== skipped") + 1 :][:2]
    assert slow.startswith("no time for make slow ARGS=--numprocesses 2 --deselect=")
    assert chaos.startswith("no time for make chaos ARGS=--numprocesses 2")
    assert lines[-2:] == ["== all passed, but for what was skipped", "50 passed, 0 failed"]
    assert not steps.called("slow") and not steps.called("chaos")
    assert all(steps.called(step) for step in STEPS - {"slow", "chaos"})

    (steps.said / "called").unlink()
    status, lines = steps.run(minutes=0)
    assert status == 0 and lines[-1] == "10 passed, 0 failed"
    assert {step for step in STEPS if steps.called(step)} == {"check", "test", "demo"}
    told = [line.split()[4] for line in lines if line.startswith("no time for make ")]
    assert set(told) == STEPS - {"check", "test", "demo"} and told.count("contract") == 2


def test_what_failed_is_tried_once_more_and_no_third_time(steps: Steps) -> None:
    failed = "=== 1 failed, 9 passed in 1.00s ==="
    steps.says("chaos", failed, statuses=(2, 0))
    status, lines = steps.run()
    assert status == 0, lines
    first, again = steps.called("chaos")
    assert again == f"{first} ARGS=--last-failed", "make takes the last of them"
    assert f"== what failed, once more: make chaos {first}" in lines

    (steps.said / "called").unlink()
    steps.says("chaos", failed, statuses=(2, 2, 0))
    status, lines = steps.run()
    assert status != 0 and not any("all passed" in line for line in lines)
    assert len(steps.called("chaos")) == 2 and not steps.called("rayup"), "it went on"


@pytest.mark.parametrize("step", ["check", "contract", "sim", "demo"])
def test_a_step_that_is_not_about_timing_gets_one_try(steps: Steps, step: str) -> None:
    """Guards a failure that is lost in the pipe to the log."""
    steps.says(step, "no", statuses=(1, 0))
    status, lines = steps.run()
    assert status != 0 and not any("all passed" in line for line in lines)
    assert len(steps.called(step)) == 1


def test_a_step_beside_others_says_all_that_it_says_and_counts(steps: Steps) -> None:
    """Guards what goes on beside others: its failure is not lost, no third try is made, and what it says does not
    stand amid what they say."""
    said = ["so it began", "=== 1 failed in 9.00s ==="]
    steps.says("rayup", *said, statuses=(2, 0))
    status, lines = steps.run()
    assert status == 0 and lines[-1] == "60 passed, 0 failed"
    begun = [at for at, line in enumerate(lines) if line.startswith("== make ")]
    at = lines.index("== make rayup ARGS=-p no:cacheprovider")
    assert lines[at + 2 : at + 4] == said, lines
    assert lines.index("== make parity") == begun[begun.index(at) - 1]
    assert steps.called("rayup") == ["ARGS=-p no:cacheprovider"] * 2

    (steps.said / "called").unlink()
    steps.says("rayup", *said, statuses=(2, 2, 0))
    status, lines = steps.run()
    assert status != 0 and not any("all passed" in line for line in lines)
    assert len(steps.called("rayup")) == 2 and not steps.called("demo"), "it went on"


def test_what_a_step_beside_others_said_is_not_lost_when_those_fail(steps: Steps) -> None:
    steps.says("rayup", "so it began")
    steps.says("fuzz", "no", statuses=(1, 0))
    status, lines = steps.run()
    assert status != 0 and lines.index("so it began") > lines.index("no")


def test_steps_beside_others_begin_no_more_when_those_fail(steps: Steps) -> None:
    """Guards a run that goes on for minutes after it has failed."""
    steps.says("slow", "no", statuses=(1, 1))
    steps.says("contract", "it held")
    (steps.said / "contract.lasts").touch()
    status, lines = steps.run()
    assert status != 0 and lines.index("it held") > lines.index("no")
    assert steps.called("contract") == [""] and not steps.called("sim")


def test_steps_beside_others_make_way_for_them(steps: Steps) -> None:
    """Guards tests that look at the clock while kernels are compiled."""
    steps.said.joinpath("contract").symlink_to("/proc/self/stat")
    _, lines = steps.run()
    nice = [line.rpartition(")")[2].split()[16] for line in lines if line.partition(" ")[2].startswith("(cat)")]
    assert nice == ["19", "19"]

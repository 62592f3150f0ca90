"""Every program of examples/, beside one cluster with the demo's model, as docs/client.md tells to run it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.processes.leftovers import descendants, running
from cluster.rundir import start_of
from tests.docs.test_commands import Place

ROOT = Path(__file__).parents[2]
SAYS: dict[str, Callable[[str], bool]] = {
    "stream.py": lambda out: "written by decode-" in out,
    "resume.py": lambda out: "lost the connection after" in out and "came back for 24 tokens" in out,
    "deadline.py": lambda out: (
        "in time" in out and "too late" in out and "field max_tokens" in out and out.rstrip().endswith("True")
    ),
    "roles.py": lambda out: "river: " in out and int(re.findall(r"(\d+) of the second", out)[0]) > 16,
    "choose.py": lambda out: "country: France" in out and "language: French" in out,
    # The beginning that they share has 8 times 15 tokens or so.
    "fork_join.py": lambda out: all(int(n) > 100 for n in re.findall(r"\((\d+) of", out)) and out.count("cached)") == 3,
    "together.py": lambda out: all(f"{city}: " in out for city in ("Rome", "Cairo", "Lima", "Oslo")),
    "count_tokens.py": lambda out: "'Hello, world!'" in out and "the last 16 tokens" in out,
}
"""What each prints, if it does what it says."""


@pytest.fixture(scope="module")
def address(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = Place(demo_cache, tmp_path_factory.mktemp("examples"))
    supervisor = 0
    try:
        place("headrace up --detach")
        told = place("headrace status --json | python -c 'import json, sys; print(json.load(sys.stdin)[\"pid\"])'")
        supervisor = int(told)
        yield f"127.0.0.1:{place.grpc_port}"
    finally:
        if supervisor and start_of(supervisor) is not None:
            below = descendants(supervisor)
            os.kill(supervisor, signal.SIGKILL)
            for pid in running(below):
                os.kill(pid, signal.SIGKILL)


def test_every_program_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.slow
def test_what_the_page_shows_runs(address: str) -> None:
    """Guards docs/client.md against names and options that are no more. The wheel's own lines: test_wheel.py."""
    page = (ROOT / "docs" / "client.md").read_text()
    shown = [text for text in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "headrace_client" not in text]
    assert len(shown) == 2
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(shown).replace("127.0.0.1:50051", address)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "decode-" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(SAYS))
def test_it_does_what_it_says(address: str, program: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / program), "--address", address],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[program](done.stdout), done.stdout

"""Clients that others wrote, each in an environment of its own: what one of them needs must not meet what we need.

Made once, under build/clients, and again when the versions below change. Where pip finds a package nowhere, what needs
it is skipped and says so.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "clients"
PROGRAMS = Path(__file__).parent / "programs"
NEEDS = {
    "schemathesis": ("schemathesis==4.32.5",),
    "openai": ("openai==3.54.0",),
    "llm": ("llm==0.36",),
    "anthropic": ("anthropic==2.12.0",),
    "aiperf": ("aiperf==0.13.0",),
    "lm_eval": ("lm_eval[api]==0.4.13", "transformers==5.23.0"),
}
INSTALL_LIMIT_S = 420


def environment(name: str) -> Path:
    """Return the folder of a client's programs; skips the test if it cannot be had."""
    needs = NEEDS[name]
    digest = hashlib.sha256(" ".join((sys.version, *needs)).encode()).hexdigest()[:12]
    place = FOLDER / f"{name}-{digest}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        # Tests of two processes may want the same one.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "complete").exists():
            shutil.rmtree(place, ignore_errors=True)
            _make(name, place, needs)
            (place / "complete").touch()
    return place / "bin"


def _make(name: str, place: Path, needs: tuple[str, ...]) -> None:
    # Our own pip, and no code compiled that nobody may ever run: both would take longer than the packages themselves.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    install = [sys.executable, "-m", "pip", "--python", str(place), "install", "--quiet", "--no-compile", *needs]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} was not installed within {INSTALL_LIMIT_S} s")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        pytest.skip(f"{name} cannot be installed here: {said[-1] if said else done.stderr[-200:]}")


def run(command: list[str], folder: Path, limit_s: float = 180, **variables: str) -> str:
    """Return what a client's program wrote, which must end well. It works in `folder`, and knows no proxy."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "HOME": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, f"{command[:3]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout

"""Ten seconds of random schedules, and the promise that a seed is a run."""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.sim.schedule import make_plan, run_schedule
from tests.sim.trace import tell
from tests.sim.world import World

ROOT = Path(__file__).parent.parent.parent
SECONDS = 10.0


def test_random_schedules_keep_every_promise() -> None:
    """Guards everything at once: tokens, fences, leaks, liveness. `make sim` runs more of the same."""
    began, seed = time.monotonic(), 77_000_000
    counted, effective = 0, Counter[str]()
    while time.monotonic() - began < SECONDS:
        result = run_schedule(seed)
        assert not result.failure, f"python -m tests.sim --only {seed}: {result.failure}"
        counted += result.counts
        effective += result.effective
        seed += 1
    assert counted >= 20 and len(effective) >= 8, (counted, effective)


def test_a_seed_is_a_run() -> None:
    """Guards reproduction: the same story line by line, also under another hash seed."""
    story = [line for seed in (3, 11, 12) for line in tell(World(make_plan(seed)))]
    code = (
        "from tests.sim.test_sim import *\n"
        "print('\\n'.join(line for seed in (3, 11, 12) for line in tell(World(make_plan(seed)))))"
    )
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        again = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert again.stdout.splitlines() == story

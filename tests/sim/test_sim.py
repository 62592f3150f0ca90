"""Ten seconds of random schedules, and the promise that a seed is a run."""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.sim.plan import Going
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


def test_leaving_alone_costs_nobody_anything() -> None:
    """Guards against a request that fails, is computed twice, or blames a worker, only because workers come and go."""
    notes = Counter[str]()
    for seed in range(78_000_000, 78_000_012):
        rng = Random(seed)
        plan = make_plan(seed)
        plan.faults = []
        plan.blocks["decode"] *= 2
        roles = ["decode", "decode", "prefill", "decode", "prefill"]
        plan.goings = [Going(role, rng.uniform(0.0, 0.08), pause_s=0.01) for role in roles]
        world = World(plan)
        world.run()
        assert not world.failure and not world.notes["UNAVAILABLE"]
        assert not world.notes["interrupted, and placed again"]
        assert {client.outcome.partition(" ")[0] for client in world.clients} <= {
            "complete",
            "CANCELLED",
            "DEADLINE_EXCEEDED",
        }
        notes += world.notes
    assert notes["leave completed"] >= 24 and notes["request moved"] >= 3, notes


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

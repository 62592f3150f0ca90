"""Three seconds of random schedules in each of two processes, and the promise that a seed is a run."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.sim.batch import run
from tests.sim.faults import Fault
from tests.sim.plan import Going
from tests.sim.schedule import RECOVERS, make_plan
from tests.sim.trace import tell
from tests.sim.world import World

ROOT = Path(__file__).parent.parent.parent
SECONDS = 3.0


def test_random_schedules_keep_every_promise() -> None:
    """Guards everything at once: tokens, fences, leaks, liveness. `make sim` runs more of the same."""
    report = run(range(77_000_000, 78_000_000), RECOVERS, SECONDS, None, 2)
    for failed in report.failures:
        pytest.fail(f"python -m tests.sim --only {failed.seed}: {failed.why}")
    assert report.counted >= 20 and len(report.effective) >= 8, (report.counted, report.effective)


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
            "INVALID_ARGUMENT",  # a dead end, which was judged
        }
        notes += world.notes
    assert notes["leave completed"] >= 24 and notes["request moved"] >= 3, notes


def test_a_partition_may_be_to_blame_from_its_first_moment() -> None:
    """Guards the judge: what is lost behind a partition before its effect is looked at, 20 ms later, is no violation
    (a worker that said that it leaves, and left, while its router could not hear it)."""
    plan = make_plan(78_000_000)
    plan.faults, plan.goings = [Fault("partition router", "time", at_s=0.06, lasts_s=0.5)], []
    world, known = World(plan), list[int]()
    for at_s in (0.0599, 0.0601, 0.2):
        world.clock.at(at_s, lambda: known.append(world.faults.unseen + sum(world.faults.struck.values())))
    world.run()
    assert known == [0, 1, 1] and world.faults.struck["partition router"] == 1


def test_a_seed_is_a_run() -> None:
    """Guards reproduction: the same story line by line, also under another hash seed."""
    story = [line for seed in (3, 11, 12) for line in tell(World(make_plan(seed)))]
    code = (
        "from tests.sim.test_sim import *\n"
        "print('\\n'.join(line for seed in (3, 11, 12) for line in tell(World(make_plan(seed)))))"
    )
    environments = (
        {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)} for seed in ("1", "2")
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for env in environments
    ]
    told = [again.communicate()[0] for again in both]
    for again, lines in zip(both, told, strict=True):
        assert again.returncode == 0 and lines.splitlines() == story

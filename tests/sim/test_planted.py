"""The simulator is itself tested: random schedules find every planted bug, with no scenario written for it."""

import time

import pytest

from tests.sim.bugs import BUGS, planted
from tests.sim.schedule import run_schedule

LIMIT_S = 60.0


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_random_schedules_find_a_planted_bug(bug: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the simulator against blindness: each bug is found within a minute, and its seed is clean without it."""
    began, seed = time.monotonic(), 50_000_000
    with planted(bug):
        while not (result := run_schedule(seed)).failure:
            seed += 1
            assert time.monotonic() - began < LIMIT_S, f"{bug} was not found in {seed - 50_000_000} schedules"
    with capsys.disabled():
        took = time.monotonic() - began
        print(f"\n{bug}: {took:.1f} s, {seed - 49_999_999} schedules: {result.failure[:110]}")
    assert not run_schedule(seed).failure, "the schedule fails without the bug as well"

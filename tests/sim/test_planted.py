"""The simulator is itself tested: random schedules find every planted bug, with no scenario written for it."""

import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.sim.batch import side_by_side
from tests.sim.bugs import BUGS, planted
from tests.sim.schedule import run_schedule

LIMIT_S = 60.0
Hunts = dict[tuple[object, ...], Future[str]]


def hunt(bug: str) -> str:
    """Schedules until one fails, which the bug alone makes fail. How long it took."""
    began, seed = time.monotonic(), 50_000_000
    with planted(bug):
        while not (result := run_schedule(seed)).failure:
            seed += 1
            assert time.monotonic() - began < LIMIT_S, f"{bug} was not found in {seed - 50_000_000} schedules"
    took = time.monotonic() - began
    assert not run_schedule(seed).failure, "the schedule fails without the bug as well"
    return f"{bug}: {took:.1f} s, {seed - 49_999_999} schedules: {result.failure[:110]}"


@pytest.fixture(scope="module")
def hunts() -> Iterator[Hunts]:
    with side_by_side(hunt, [(bug,) for bug in BUGS]) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_random_schedules_find_a_planted_bug(
    bug: str, hunts: Hunts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the simulator against blindness: each bug is found within a minute, and its seed is clean without it."""
    told = hunts[(bug,)].result()
    with capsys.disabled():
        print(f"\n{told}")

"""The simulator is itself tested: random schedules find every planted bug, with no scenario written for it."""

import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.sim.batch import side_by_side
from tests.sim.bugs import BUGS, planted
from tests.sim.schedule import run_schedule

MOST_SCHEDULES = 2_000
"""Within so many each bug is found: well under a minute of one core."""
RARE = {"pinned_segment_evicted": 10_000, "planned_behind_drafts": 10_000}
"""Bugs that few schedules meet have more: this one reads a segment of a full disk, about one in two thousand. The
other needs a request near its end, planned ahead, behind its last drafts."""
FIRST = 50_000_000
Hunts = dict[tuple[object, ...], Future[str]]


def hunt(bug: str) -> str:
    """Run schedules until one fails, which the bug alone makes fail. Return how soon."""
    began_s, seed = time.process_time(), FIRST
    with planted(bug):
        while not (result := run_schedule(seed)).failure:
            seed += 1
            most = RARE.get(bug, MOST_SCHEDULES)
            assert seed < FIRST + most, f"{bug} was not found in {most} schedules"
    took_s = time.process_time() - began_s
    assert not run_schedule(seed).failure, "the schedule fails without the bug as well"
    return f"{bug}: {seed - FIRST + 1} schedules, {took_s:.1f} CPU s: {result.failure[:110]}"


@pytest.fixture(scope="module")
def hunts() -> Iterator[Hunts]:
    with side_by_side(hunt, [(bug,) for bug in BUGS]) as found:
        yield found


@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_can_be_planted(bug: str) -> None:
    """Guards a bug that replaces what has another name by now: the hunt for it would be none."""
    with planted(bug):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_random_schedules_find_a_planted_bug(
    bug: str, hunts: Hunts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the simulator against blindness: each bug is found soon, and its seed is clean without it."""
    told = hunts[(bug,)].result()
    with capsys.disabled():
        print(f"\n{told}")

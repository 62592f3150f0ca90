"""Every interleaving of a handoff, and the proof that the explorer would notice."""

import pytest

from tests.sim.bugs import planted
from tests.sim.clock import Violation
from tests.sim.explore import LAYOUTS, explore

SAME = ((0, 0), (0, 0))


@pytest.mark.parametrize("remote", [True, False])
def test_one_request_of_two_chunks_with_two_faults(remote: bool) -> None:
    """Guards fences and leaks in every order of events."""
    states, _ = explore(((0, 0),), (2,), remote)
    assert states > 3_000


@pytest.mark.slow
@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_requests_with_two_faults(layout: tuple[tuple[int, int], ...], remote: bool) -> None:
    """Guards handoffs against each other: what is lost with one peer must not touch another's."""
    states, moves = explore(layout, (1, 1), remote)
    assert states > 10_000
    print(f"{states} states, {moves} moves")


@pytest.mark.parametrize("bug", ["reuse_on_timeout", "acknowledgement_lost", "zombie_writer"])
def test_the_explorer_finds_planted_bugs(bug: str) -> None:
    """Guards the explorer against blindness."""
    with planted(bug), pytest.raises(Violation):
        explore(((0, 0),), (2,), True)

"""Every interleaving of a handoff, and the proof that the explorer would notice."""

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.sim.batch import side_by_side
from tests.sim.bugs import planted
from tests.sim.clock import Violation
from tests.sim.explore import LAYOUTS, explore
from tests.sim.explore_state import Layout
from tests.sim.test_ranks import DEGREES, PLANTED

Explored = dict[tuple[object, ...], Future[tuple[int, int]]]


@pytest.fixture(scope="module")
def explored() -> Iterator[Explored]:
    with side_by_side(explore, [(at, (1, 1), remote) for remote in (True, False) for at in LAYOUTS]) as found:
        yield found


@pytest.mark.parametrize("remote", [True, False])
def test_one_request_of_two_chunks_with_two_faults(remote: bool) -> None:
    """Guards fences and leaks in every order of events."""
    states, _ = explore(((0, 0),), (2,), remote)
    assert states > 3_000


@pytest.mark.slow
@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_requests_with_two_faults(layout: Layout, remote: bool, explored: Explored) -> None:
    """Guards handoffs against each other: what is lost with one peer must not touch another's."""
    states, moves = explored[layout, (1, 1), remote].result()
    assert states > 10_000
    print(f"{states} states, {moves} moves")


@pytest.mark.parametrize("bug", ["reuse_on_timeout", "acknowledgement_lost", "zombie_writer"])
def test_the_explorer_finds_planted_bugs(bug: str) -> None:
    """Guards the explorer against blindness."""
    with planted(bug), pytest.raises(Violation):
        explore(((0, 0),), (2,), True)


@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize("degrees", DEGREES, ids=lambda degrees: "{prefill}-{decode}".format(**degrees))
def test_workers_of_two_ranks(degrees: dict[str, int], remote: bool) -> None:
    """Guards chunks whose parts end in every order, and fail, by up to two faults."""
    states, _ = explore(((0, 0),), (1,), remote, ranks=(degrees["prefill"], degrees["decode"]))
    assert states > 1_500


@pytest.mark.slow
@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize("degrees", DEGREES, ids=lambda degrees: "{prefill}-{decode}".format(**degrees))
def test_two_chunks_of_workers_of_two_ranks(degrees: dict[str, int], remote: bool) -> None:
    """Guards chunks of one handoff against each other's parts."""
    states, _ = explore(((0, 0),), (2,), remote, 1, (degrees["prefill"], degrees["decode"]))
    assert states > 10_000


@pytest.mark.parametrize("bug", PLANTED)
def test_the_explorer_finds_bugs_between_ranks(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the explorer against blindness for what joins the movers of ranks."""
    for owner, name, method in PLANTED[bug]():
        monkeypatch.setattr(owner, name, method)
    with pytest.raises(Violation):
        explore(((0, 0),), (1,), True, ranks=(2, 2))

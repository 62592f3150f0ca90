"""Random schedules of whole clusters whose workers have two ranks with a mover each, at equal and unequal degrees, and
bugs planted in what joins these movers, which the schedules find."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.sim.clock import Violation
from tests.sim.schedule import make_plan, stop_a_rank
from tests.sim.world import World
from tests.transfer.ranks import test_group_machine as machine
from transfer.ranks import group as product
from transfer.ranks.group import HeadsPart, MoverGroup

FIRST, SCHEDULES, MOST_SCHEDULES = 51_000_000, 24, 400
DEGREES = ({"prefill": 2, "decode": 2}, {"prefill": 1, "decode": 2}, {"prefill": 2, "decode": 1})


def run(seed: int, degrees: dict[str, int] | None = None) -> World:
    """Raises Violation."""
    plan = make_plan(seed)
    is_stopped = max(plan.ranks.values()) > 1  # as it was drawn
    plan.ranks = degrees or DEGREES[seed % len(DEGREES)]
    if not is_stopped:
        stop_a_rank(plan, seed)
    world = World(plan)
    world.run()
    return world


def failure(seed: int) -> str:
    """Return how a schedule fails, if it does."""
    try:
        return run(seed).failure
    except (Violation, KeyError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("degrees", DEGREES, ids=lambda degrees: "{prefill}-{decode}".format(**degrees))
def test_schedules_of_several_ranks_keep_every_promise(degrees: dict[str, int]) -> None:
    """Guards tokens, fences, leaks and liveness where a block comes in parts, and a rank is stopped alone; and that
    they do, and one is, for a while and for too long."""
    moved = 0
    stopped: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + SCHEDULES):
        world = run(seed, degrees)
        assert not world.failure, seed
        stopped["at all"] += world.faults.effective["stop rank"]
        stopped["too long"] += world.notes["a rank was stopped for too long"]
        for movers in world.ranks.values():
            assert len(movers) == degrees[world.processes[movers[0]._memory.process.pid].role]
            moved += len(movers) == 2 and bool(movers[1]._landings)
    assert moved, "no second rank has met anybody"
    assert stopped["at all"] > stopped["too long"] > 0, stopped


def only_the_first_part() -> list[tuple[Any, str, Any]]:
    """Only the first of two parts of a block is asked for."""
    return [(product, "parts", lambda s, r: [HeadsPart(0, at) for at in range(len(r))])]


def a_failed_part_is_forgotten() -> list[tuple[Any, str, Any]]:
    """A chunk has landed when all parts have ended, whatever became of those but the last."""
    ended = MoverGroup._ended

    def forgiving(self: MoverGroup, name: Any, seq: int, rank: int, error: str, *rest: Any) -> Any:
        is_last = len(self._named[name, seq].waiting) == 1
        return ended(self, name, seq, rank, error if is_last else "", *rest)

    return [(MoverGroup, "_ended", forgiving)]


def of_group(bug: Callable[[], dict[str, Any]]) -> Callable[[], list[tuple[Any, str, Any]]]:
    return lambda: [(MoverGroup, name, method) for name, method in bug().items()]


# Digests of another part cost a chunk that is made again, which breaks no promise: `test_group_machine` finds those.
PLANTED = {
    "landed_with_the_first_rank": of_group(machine.landed_with_the_first_rank),
    "fenced_at_rank_0_only": of_group(machine.fenced_at_rank_0_only),
    "only_the_first_part": only_the_first_part,
    "a_failed_part_is_forgotten": a_failed_part_is_forgotten,
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_bug_between_ranks_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the schedules against blindness: each bug is found, and its seed is clean without it."""
    for owner, name, planted in PLANTED[bug]():
        monkeypatch.setattr(owner, name, planted)
    for seed in range(FIRST, FIRST + MOST_SCHEDULES):
        if found := failure(seed):
            break
    else:
        pytest.fail(f"{bug} was not found in {MOST_SCHEDULES} schedules")
    monkeypatch.undo()
    assert not failure(seed), "the schedule fails without the bug as well"
    print(f"{bug}: {seed - FIRST + 1} schedules: {found[:110]}")

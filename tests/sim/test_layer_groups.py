"""Layer groups beside what they are to be equal to: one group that keeps everything, and windows that are masks."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sim.client import Client, Searcher
from tests.sim.schedule import make_plan
from tests.sim.uninterrupted import expected_output
from tests.sim.world import World

FIRST = 76_000_000
SLID, COMPLETE = "layer groups: windows slid", "complete"


def seeds(count: int) -> Iterator[int]:
    """Yield the first seeds whose schedules have layer groups."""
    found = (seed for seed in range(FIRST, FIRST + 100 * count) if make_plan(seed).windows)
    for _ in range(count):
        yield next(found)


def played(seed: int, masked: bool) -> World:
    plan = make_plan(seed)
    plan.masked = masked
    world = World(plan)
    world.run()
    return world


def answer(client: Client) -> list[object]:
    return [*client.answers] if isinstance(client, Searcher) else [*client.tokens_]


@pytest.mark.parametrize("count", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_answers_are_those_of_windows_that_are_masks(count: int) -> None:
    """Guards layer groups under faults, losses, moves, swaps and tiers: every schedule is played twice, and whoever was
    answered in both has the same answer, of which each token depends on every row that a window shows."""
    seen: Counter[str] = Counter()
    for seed in seeds(count):
        grouped, masked = played(seed, masked=False), played(seed, masked=True)
        assert not masked.notes[SLID] and not masked.notes["layer groups: loaded"]
        seen["slid"] += bool(grouped.notes[SLID])
        seen["struck"] += bool(grouped.faults.struck)
        others = {client.name: client for client in masked.clients}
        for client in grouped.clients:
            one, other = answer(client), answer(others[client.name])
            size = min(len(one), len(other))
            assert one[:size] == other[:size], (seed, client.name)
            if client.outcome.startswith(COMPLETE) and others[client.name].outcome.startswith(COMPLETE):
                assert len(one) == len(other) or client.stop_after is not None, (seed, client.name)
                seen["compared"] += 1
                seen["searches"] += isinstance(client, Searcher)
    assert seen["slid"] > count * 0.8 and seen["struck"] > count * 0.8 and seen["compared"] > 3 * count, seen
    assert seen["searches"] > 0


def test_a_window_of_one_token_more_or_less_is_another_answer() -> None:
    """Guards the test above: were a token not drawn by what windows show, whatever they let go would be alike."""
    plan = make_plan(next(seeds(1)))
    for ask in plan.asks:
        record = ask.record
        if record.beams is None and record.constraint is None and record.max_tokens > 2 and record.prompt_tokens > 6:
            answers = {tuple(expected_output(record, windows)) for windows in ((), (5,), (6,), (6, 1), (1, 6))}
            assert len(answers) == 5
            return
    raise AssertionError("no record to compare")

"""What full collections walk in a process that serves, and that nothing is left uncollected for good by it."""

import gc
import sys
from collections.abc import Iterator

import pytest

from cluster.processes.collector import ALL_AGAIN, spare_collector


@pytest.fixture(autouse=True)
def own_collector() -> Iterator[None]:
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    spare_collector()
    yield
    gc.callbacks[:] = callbacks
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def cycles(count: int) -> list[list[object]]:
    """Containers that lead back to themselves."""
    found: list[list[object]] = [[] for _ in range(count)]
    for one in found:
        one.append(one)
    return found


def test_what_outlives_a_full_collection_is_not_walked_by_the_next() -> None:
    """Guards all streams of a router against pauses that grow with how many are open: 0.8 s with 4,000."""
    held = cycles(20_000)
    gc.collect()
    assert len(gc.get_objects()) < 1_000
    assert len(held) == 20_000


def test_the_first_collection_is_due_by_what_is_new() -> None:
    """Guards against a first one that comes only after a quarter of all that there was, modules included, and walks
    as much."""
    walked = []

    def note(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2 and phase == "start":
            walked.append(len(gc.get_objects()))

    gc.callbacks.append(note)
    held = [[] for _ in range(160_000)]  # type: list[list[int]]
    assert len(walked) == 2 and max(walked) < 70_000
    assert len(held) == 160_000


def test_cycles_of_what_was_left_out_are_found() -> None:
    """Guards a process's memory: what was left out and is a cycle's alone would stay for good."""
    began, most = sys.getallocatedblocks(), 0
    for _ in range(200):
        garbage = cycles(20_000)
        gc.collect()
        most = max(most, sys.getallocatedblocks())
        del garbage
    assert most < ALL_AGAIN * began + 4 * 20_000, "garbage grows"
    assert most > 1.2 * began, "no garbage was left out, so this shows nothing"

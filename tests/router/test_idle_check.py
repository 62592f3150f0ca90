"""What a router checks while it is idle, and that nobody waits for it."""

import asyncio
import time
from itertools import pairwise
from random import Random

import pytest

from engine.identity import SHORT_BYTES
from router.app import RouterApp
from router.config import RouterConfig
from router.core.prefix_index import PrefixIndex
from router.idle_check import IDLE_CHECK_S, IdleCheck
from router.status.observer import NullObserver
from tests.router.bench import Bench
from tests.router.fake_cluster import ByteText
from tests.secrets_of_tests import SECRETS

RUN_BLOCKS = 100


def fill(index: PrefixIndex, worker: str, runs: int) -> None:
    """Let a worker hold so many chains of RUN_BLOCKS blocks."""
    random = Random(worker)
    index.add(worker, runs * RUN_BLOCKS)
    for _ in range(runs):
        index.recall(worker, b"", random.randbytes(RUN_BLOCKS * SHORT_BYTES))


class Idle:
    """A router without requests, and its check, on a clock of which every look costs `look_s`."""

    def __init__(self, runs: int) -> None:
        self.bench = Bench()
        self.index = self.bench.router.index
        fill(self.index, "d0", runs)
        self.now, self.look_s = 0.0, 0.001
        self.steps = 0
        checks = self.index.checks

        def counted() -> object:
            for _ in checks():
                self.steps += 1
                yield

        self.index.checks = counted  # type: ignore[method-assign, assignment]
        self.check = IdleCheck(self.bench.router, self.look)

    def look(self) -> float:
        self.now += self.look_s
        return self.now

    def tick(self, seconds: float = 0.05) -> int:
        """Return how many steps the index was checked by."""
        self.now += seconds
        before = self.steps
        self.check.tick(self.now)
        return self.steps - before


def test_what_workers_hold_is_checked_a_little_at_a_time() -> None:
    """Guards whoever comes while an idle router looks through hundreds of thousands of blocks."""
    idle = Idle(runs=1000)
    assert [idle.tick() for _ in range(20)] == [0] * 20, "it has changed just now"
    ticks = [idle.tick(IDLE_CHECK_S), *(idle.tick() for _ in range(100))]
    assert max(ticks) <= 3 < sum(ticks), "a tick takes as long as it may"
    assert ticks[-1] == 0, "all of it was seen"
    assert idle.tick(IDLE_CHECK_S) == 0, "and is not looked through again as it is"


def test_a_change_begins_the_check_anew() -> None:
    """Guards a healthy router: half of a check before a change, and half after it, find faults that are none."""
    idle = Idle(runs=400)
    idle.tick()
    whole = sum(1 for _ in idle.index.checks())
    idle.tick(IDLE_CHECK_S)
    for worker in ("d0", "p0"):
        idle.steps = 0
        idle.index.insert(worker, [bytes([number]) * 16 for number in range(3)])
        assert idle.tick(IDLE_CHECK_S) == 0
        assert idle.tick(IDLE_CHECK_S) > 0, "it has not changed any more"
        if worker == "p0":
            for _ in range(100):
                idle.tick()
            assert idle.steps >= whole


def test_who_has_requests_is_not_idle() -> None:
    idle = Idle(runs=10)
    idle.bench.submit()
    assert [idle.tick(2 * IDLE_CHECK_S) for _ in range(5)] == [0] * 5


def test_no_step_takes_long() -> None:
    """Guards a step that goes through everything: 100,000 blocks of four workers, a step against all of them."""
    index = PrefixIndex()
    for worker in "abcd":
        fill(index, worker, 250)
    took_s = []
    for _ in range(3):
        times = [time.perf_counter()]
        for _ in index.checks():
            times.append(time.perf_counter())
        took_s.append([end - begin for begin, end in pairwise(times)])
    steps_s = [min(each) for each in zip(*took_s, strict=True)]
    assert len(steps_s) > 40 and max(steps_s) < sum(steps_s) / 4


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_broken_invariant_ends_an_idle_router(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check itself: a router whose index is wrong must not go on by it, and a sound one must."""
    monkeypatch.setattr("router.idle_check.IDLE_CHECK_S", 0.1)

    async def run() -> None:
        app = RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS)
        index = app.hub.core.index
        fill(index, "d0", 50)
        if is_broken:
            index._caches["d0"].whole.blocks -= 1
        await app.start()
        try:
            await asyncio.wait_for(app.run(asyncio.Event()), 10.0 if is_broken else 1.0)
        finally:
            await app.stop(0.1)

    with pytest.raises(AssertionError if is_broken else TimeoutError, match="share a block" if is_broken else None):
        asyncio.run(run())

"""Threads beside the router's loop: how long it waits for one that runs Python."""

import asyncio
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from router.background import LATER, give_way_soon, stand_back

TICK_S = 0.001


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    """Leave the interpreter as it was."""
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


async def late_s() -> float:
    """Return by how much half of the loop's wakes are late, at least, while a thread beside it runs Python."""
    ended, late = threading.Event(), []

    def work() -> None:
        while not ended.is_set():
            sum(range(10))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(30):
            begin_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            late.append(time.monotonic() - begin_s - TICK_S)
    finally:
        ended.set()
        thread.join()
    return statistics.median(late)


def test_the_loop_waits_for_no_thread_for_long() -> None:
    """Guards the gaps between all streams' tokens while a long text is tokenized, or decisions are written down."""

    async def body() -> tuple[float, float]:
        usual_s = min([await late_s() for _ in range(3)])
        give_way_soon()
        return usual_s, min([await late_s() for _ in range(3)])

    usual_s, now_s = asyncio.run(body())
    assert usual_s > 0.003, "nothing was in the loop's way"
    assert now_s < usual_s / 2


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's own priority is Linux's")
def test_a_thread_that_stands_back_leaves_the_loop_s_priority_alone() -> None:
    """Guards a router with one processor, of which a long text would take turns as long as the loop's."""

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def work() -> None:
        for _ in range(2):
            stand_back()
            found.append(niceness())

    before, found = niceness(), list[int]()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [max(before, LATER)] * 2 and niceness() == before < LATER

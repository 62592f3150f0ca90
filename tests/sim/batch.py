"""Runs of many schedules, in this process or in several, and what they came to in all."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, TypeVar

from tests.sim.schedule import run_schedule
from tests.sim.shells import loud

BATCH = 50
"""Schedules that a process is given at once."""
Found = TypeVar("Found")


@dataclass(slots=True)
class Failed:
    """A promise was broken."""

    seed: int
    why: str


@dataclass(slots=True)
class Report:
    """What the schedules of some seeds came to. `ran` were run, `last` has the highest seed; `counted` count."""

    last: int = -1
    ran: int = 0
    counted: int = 0
    events: int = 0
    cpu_s: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    effective: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    failures: list[Failed] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        self.last = max(self.last, other.last)
        self.ran += other.ran
        self.counted += other.counted
        self.events += other.events
        self.cpu_s += other.cpu_s
        self.struck += other.struck
        self.effective += other.effective
        self.notes += other.notes
        self.failures += other.failures


def run_batch(seeds: range, strict: bool) -> Report:
    """Run schedules in this process, one after the other, up to the first failure."""
    report, began_s = Report(), time.process_time()
    # A world is one knot of objects. Looked for after each schedule, it is all there is to be found.
    gc.freeze()
    gc.disable()
    try:
        with loud():
            for seed in seeds:
                result = run_schedule(seed, strict=strict)
                report.last = seed
                report.ran += 1
                report.counted += result.counts
                report.events += result.events
                report.struck += result.struck
                report.effective += result.effective
                report.notes += result.notes
                gc.collect(0)  # what survives is a cache: no later one looks at it again
                if result.failure:
                    report.failures.append(Failed(seed, result.failure))
                    break
    finally:
        gc.enable()
        gc.unfreeze()
    report.cpu_s = time.process_time() - began_s
    return report


def run(
    seeds: range, strict: bool, seconds: float | None, schedules: int | None, processes: int
) -> Report:
    """Run batches of `seeds`, in order, until `seconds` have passed, `schedules` that count were run, one has failed,
    or there are no seeds left. Batches that are under way by then are finished."""
    until_s = float("inf") if seconds is None else time.monotonic() + seconds
    enough = float("inf") if schedules is None else schedules
    total = Report()

    def left() -> Iterator[range]:
        for first in range(seeds.start, seeds.stop, BATCH):
            if total.failures or total.counted >= enough or time.monotonic() >= until_s:
                return
            yield range(first, min(first + BATCH, seeds.stop))

    if processes == 1:
        for batch in left():
            total.add(run_batch(batch, strict))
        return total
    under_way: set[Future[Report]] = set()
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        for batch in left():
            under_way.add(pool.submit(run_batch, batch, strict))
            if len(under_way) > processes:
                under_way = _collect(total, under_way)
        while under_way:
            under_way = _collect(total, under_way)
    total.failures.sort(key=lambda failed: failed.seed)
    return total


@contextmanager
def side_by_side(
    function: Callable[..., Found], calls: Iterable[tuple[Any, ...]]
) -> Iterator[dict[tuple[Any, ...], Future[Found]]]:
    """Begins all `calls` of `function` in two processes. Those that have not begun by the end are dropped."""
    pool = ProcessPoolExecutor(2, mp_context=get_context("fork"))
    try:
        yield {call: pool.submit(function, *call) for call in calls}
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(total: Report, under_way: set[Future[Report]]) -> set[Future[Report]]:
    """Wait for one at least; returns those that are still under way."""
    done, rest = wait(under_way, return_when=FIRST_COMPLETED)
    for future in done:
        total.add(future.result())
    return rest

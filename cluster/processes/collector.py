"""Python's cycle collector in a process that serves: what it has looked at, it does not look at again.

A full collection walks every container in the process, and every stream waits for it: modules take a tenth of a second,
and thousands of open streams as much as a second. What requests leave behind is freed by reference counts
(`tests/router/test_growth.py`), so nearly all that a full collection finds is in use, and will be freed without it. So
what has outlived one is left out of the next: each container is walked a few times in its life, and a collection is as
long as what is new, however much is there.

A cycle among containers that were left out is found when all are walked again: when the process has half as many
objects again as when that was done last. So what such cycles hold never exceeds half of what was in use then, or what
the process began with.
"""

import gc
import sys

YOUNG_OBJECTS = 2_000
"""Containers made, less those freed, after which the youngest are looked at. Python's own 700 is met every other step
of 64 rows; with many more, one look takes longer."""
OLDER_EVERY = 4
"""The youngest are looked at so often before those that have outlived it are, and these before all that is new: at most
62,000 containers, less than a tenth of a second."""
ALL_AGAIN = 1.5
"""All are looked at again when there are so many times as many objects as when they were last."""
_ALL = 2


class _Sparing:
    """Hears of every collection. Mutable state: how many objects there were when all were looked at last, and whether
    they are now."""

    def __init__(self) -> None:
        self._blocks = sys.getallocatedblocks()
        self._is_whole = False

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] != _ALL:
            return
        if phase == "start":
            self._is_whole = sys.getallocatedblocks() > ALL_AGAIN * self._blocks
            if self._is_whole:
                gc.unfreeze()
            return
        gc.freeze()
        if self._is_whole:
            self._blocks = sys.getallocatedblocks()


def spare_collector() -> None:
    """Collect once, then leave all that is there, and all that outlives a full collection, out of those to come. Call
    it when a process is ready, before it serves."""
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: the next is due by what is new, and not by a quarter of all that there was
    gc.set_threshold(YOUNG_OBJECTS, OLDER_EVERY, OLDER_EVERY)
    gc.callbacks.append(_Sparing())

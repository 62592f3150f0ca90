"""Work that must never hold up the event loop: a bounded queue, and a thread that takes from it.

Whoever puts something in neither waits nor wakes anybody: the thread looks a few times a second. What finds the queue
full is missed, and counted by the caller. A thread that hangs is left behind when the process ends.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

PAUSE_S = 0.1
CLOSE_S = 1.0
MOST_WAITING = 1 << 16
"""The sum of sizes of what may wait."""

LATER = 10
"""The niceness of threads that stand back: about a ninth of a processor that somebody else wants whole."""

Item = TypeVar("Item")


def give_way_soon() -> None:
    """Let each thread of this process give way to the event loop's after half a millisecond of Python, not after five:
    long text costs some milliseconds of Python before and after the native code that tokenizes it."""
    sys.setswitchinterval(0.0005)


def stand_back() -> None:
    """Let the thread that calls this have a processor after the event loop's, where both want the same one: long text
    takes one for tens of milliseconds, in native code that nothing interrupts. Only Linux has a priority for each
    thread."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, own, max(os.getpriority(os.PRIO_PROCESS, own), LATER))


class BackgroundQueue(Generic[Item]):
    # Mutable state: what waits (the owner's thread adds, the queue's takes; both ends of a deque are safe for that).

    def __init__(self, name: str, work: Callable[[Item], None], rest: Callable[[], None] = lambda: None) -> None:
        """`work` is called with each item in order, and `rest` after the last one that waits; neither may raise."""
        self._work, self._rest = work, rest
        self._items: deque[Item] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, item: Item, size: int) -> bool:
        """Queue an item; False if there is no room, where all that wait are of its size, or no thread. The first one
        starts the thread."""
        if len(self._items) * size >= MOST_WAITING:
            return False
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError:
                return False  # the system has no thread to give now
        self._items.append(item)
        return True

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Do what waits, for at most `limit_s`, and end."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(limit_s)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(PAUSE_S)
            if not self._items:
                continue
            while self._items:
                self._work(self._items.popleft())
                # Lets the event loop's thread go on at once, and not only when the interpreter makes this one stop.
                time.sleep(0)
            self._rest()

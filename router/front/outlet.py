"""How new output leaves: readers are told of it in turns of the loop, and a front that can write at once is given it.

What workers say in one turn of the loop is noted, and who reads is told once for all of it, AT_ONCE readers in a turn:
between two turns workers are heard, so that under load output is joined for its readers and does not pile up before
us. A gRPC message costs 40 to 60 µs whatever is in it: readers that write such are woken so often in a second and no
more, and above that tokens share messages. Nothing here is a task, a future or a timer of a token.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from router.front.api import Delta, Started

AT_ONCE = 16
"""Readers told in one turn of the loop."""

log = logging.getLogger(__name__)


class Outlet:
    """A front's short way to its client. `take` writes new output at once and says whether it did; the front sets it
    when its answer has begun. It is asked only while nothing else of the answer is under way. `begin` returns what
    `Started` will say, for a head that leaves before a worker has the request: from then on its client can come back;
    the frontend sets it when there is a request."""

    __slots__ = ("begin", "take")

    def __init__(self) -> None:
        self.begin: Callable[[], Started] | None = None
        self.take: Callable[[Delta], bool] | None = None


class WakeQueue:
    """Lives on the router's event loop."""

    # Mutable state: the signals that were set and have not had their turn, of fronts that write at once and of others;
    # how many of the others may have it now, and when that was counted; whether a turn of the loop is due.

    def __init__(self, wakes_per_s: float) -> None:
        """At most `wakes_per_s` readers are woken in a second, those that an outlet spares this not counted."""
        self._wakes_per_s = wakes_per_s
        self._direct: deque[ReaderSignal] = deque()
        self._woken: deque[ReaderSignal] = deque()
        self._allowed = float(AT_ONCE)
        self._counted_s = 0.0
        self._is_due = False

    def add(self, signal: "ReaderSignal") -> None:
        (self._woken if signal.deliver is None else self._direct).append(signal)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(min(AT_ONCE, len(self._direct))):
            self._direct.popleft().answer()
        if self._woken:
            now = loop.time()
            earned = (now - self._counted_s) * self._wakes_per_s
            self._allowed, self._counted_s = min(self._allowed + earned, AT_ONCE), now
            for _ in range(min(int(self._allowed), len(self._woken))):
                self._woken.popleft().answer()
                self._allowed -= 1
        self._is_due = bool(self._direct or self._woken)
        if self._direct or (self._woken and self._allowed >= 1):
            loop.call_soon(self._take)
        elif self._woken:
            loop.call_later(AT_ONCE / 2 / self._wakes_per_s, self._take)


class ReaderSignal:
    """Tells one reader that there is something to read, as `asyncio.Event` does; `deliver`, if it is set, is asked
    first, and may do all there is to do."""

    # Mutable state: whether there was ever a reader, whether it waits for its turn, and whether the reader is to look.

    __slots__ = ("_event", "_is_queued", "_is_read", "_turns", "deliver")

    def __init__(self, turns: WakeQueue) -> None:
        self.deliver: Callable[[], bool] | None = None
        self._turns = turns
        self._is_read = False
        self._is_queued = False
        self._event = asyncio.Event()

    def set(self) -> None:
        if self._is_read and not self._is_queued:
            self._is_queued = True
            self._turns.add(self)

    def call(self) -> None:
        """Let a new reader look at once, and one that still waits see that there is a new one."""
        self._is_read = True
        self._event.set()

    async def wait(self) -> None:
        """Wait for a turn; the one that has come since `clear` counts."""
        await self._event.wait()

    def clear(self) -> None:
        """The reader looks now. One that was sent away must not: it is another's turn."""
        self._event.clear()

    def answer(self) -> None:
        """Its turn has come."""
        self._is_queued = False
        try:
            is_done = self.deliver is not None and self.deliver()
        except Exception:
            # The reader itself comes upon what is wrong, and ends with it.
            log.exception("output could not be written at once")
            is_done = False
        if not is_done:
            self._event.set()

"""Recomputes what the router core keeps twice while nobody asks for anything; `router/app.py` ticks it."""

from collections.abc import Callable

from router.core.core import Router

IDLE_CHECK_S = 10.0
CHECK_S = 0.002
"""How long a tick may check what workers are believed to hold."""
_CHECKED = object()


class IdleCheck:
    """Checks the core's invariants while it has no requests, and holds up nothing that comes then.

    Every IDLE_CHECK_S of idleness it recomputes what is known of requests, their line and the workers' load, which is
    little by then. What workers are believed to hold may be millions of blocks: once that has not changed for
    IDLE_CHECK_S it is gone through once, for CHECK_S at a tick. A change ends that, for what was seen says nothing any
    more; so while other routers' requests, or evictions, are told all the time, it is not checked here. Tests and the
    simulator check all of it after every event.
    """

    # Mutable state: since when there is nothing new of each, the index's count of changes, and the steps still to do.

    def __init__(self, core: Router, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._idle_since_s = self._same_since_s = clock()
        self._changes = core.index.changes
        self._steps = core.index.checks()

    def tick(self, now: float) -> None:
        """Raises AssertionError where an invariant is broken."""
        core, index = self._core, self._core.index
        if core.open or index.changes != self._changes:
            self._same_since_s, self._changes, self._steps = now, index.changes, index.checks()
        elif now - self._same_since_s >= IDLE_CHECK_S:
            until_s = self._clock() + CHECK_S
            while next(self._steps, _CHECKED) is None and self._clock() < until_s:
                pass
        if core.open:
            self._idle_since_s = now
        elif now - self._idle_since_s >= IDLE_CHECK_S:
            core.check_requests()
            self._idle_since_s = now

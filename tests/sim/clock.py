"""Virtual time, and processes that live in it: one heap of events, one seeded generator, nothing else is random."""

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from random import Random

Act = Callable[[], None]


class Violation(AssertionError):
    """A promise of the design is broken; the message says which one, where and when."""


class Clock:
    """Virtual time. Mutable state: the heap. Events of one moment run in the order in which they were scheduled."""

    def __init__(self, rng: Random) -> None:
        self.now = 0.0
        self.rng = rng
        self.random = rng.random
        self.read = partial(getattr, self, "now")
        """Returns `now`, as a clock does."""
        self.events = 0
        self._heap: list[tuple[float, int, Act, Process | None]] = []
        self._count = 0

    def at(self, delay_s: float, act: Act, process: "Process | None" = None) -> None:
        """Run `act` after `delay_s`; if `process` is given, in it, as `Process.run` does."""
        self._count += 1
        heappush(self._heap, (self.now + delay_s, self._count, act, process))

    def step(self) -> bool:
        """Run the next event; False: there is none."""
        if not self._heap:
            return False
        self.now, _, act, process = heappop(self._heap)
        self.events += 1
        if process is None or process.runs:
            act()
        else:
            process.run(act)
        return True

    @property
    def next_at(self) -> float:
        """Return when the next event is due; infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")


class Process:
    """One life of one process. What is scheduled through it never runs after its death, and waits while it is frozen.

    Mutable state: `alive`, `frozen`, `runs` (neither dead nor frozen) and what waits for the thaw, in order.
    """

    def __init__(self, clock: Clock, name: str, role: str, pid: int, incarnation: int) -> None:
        self.clock = clock
        self.name = name
        self.role = role
        self.pid = pid
        self.incarnation = incarnation
        self.alive = self.runs = True
        self.frozen = False
        self._stash: list[Act] = []

    def later(self, delay_s: float, act: Act) -> None:
        """Run `act` in this process after `delay_s` of virtual time."""
        self.clock.at(delay_s, act, self)

    def run(self, act: Act) -> None:
        """Run `act` in this process now, after its thaw, or never."""
        if self.runs:
            act()
        elif self.alive:
            self._stash.append(act)

    def kill(self) -> None:
        self.alive = self.runs = False
        self._stash.clear()

    def freeze(self) -> None:
        self.frozen, self.runs = True, False

    def resume(self) -> None:
        """Run everything that was held back now, in order, as after SIGCONT."""
        self.frozen, self.runs = False, self.alive
        stash, self._stash = self._stash, []
        for act in stash:
            self.run(act)

    def __repr__(self) -> str:
        return f"{self.name}({'frozen' if self.frozen else 'alive' if self.alive else 'dead'})"

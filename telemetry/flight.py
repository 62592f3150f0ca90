"""The flight recorder: what has happened to the latest requests of a process, kept in memory.

It is always on, as it costs a list entry for each step of a request's life, and nothing for a token. A timeline is
read on demand (`headrace trace`), written to the log when its request fails, and turned into spans when it ends.

Moments are on this process's own clock; `began_unix_s` says, for people, when that was. No clock is compared.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec

log = logging.getLogger(__name__)

Fact = str | int | float | bool
LONGEST = 64
"""Events kept of one request; a request that is placed again and again loses the middle of its story, not its end."""

SHOWN = 20


class FlightEvent(msgspec.Struct, frozen=True, gc=False):  # it holds nothing that could hold it
    at_s: float
    """Seconds since the timeline began."""
    what: str
    facts: dict[str, Fact] = {}


class Flight(msgspec.Struct, kw_only=True):
    """The timeline of one request in one process."""

    request: str
    worker: str
    began_unix_s: float
    events: list[FlightEvent] = []
    left_out: int = 0
    """Events that were dropped behind the first half of LONGEST."""


class FlightRecorder:
    """The latest flights. Mutable state: the flights by request, the one heard of last at the end. Owner: one thread;
    `find` and `latest` may be called from any."""

    def __init__(
        self,
        worker: str,
        capacity: int = 256,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._worker = worker
        self._capacity = capacity
        self._unix_clock = unix_clock
        self._flights: OrderedDict[str, tuple[float, Flight]] = OrderedDict()

    def note(self, request: str, what: str, now: float, **facts: Fact) -> None:
        """Add an event at `now`, on the caller's clock; the first one of a request begins its flight."""
        known = self._flights.get(request)
        if known is None:
            flight = Flight(request=request, worker=self._worker, began_unix_s=self._unix_clock())
            known = self._flights[request] = (now, flight)
            if len(self._flights) > self._capacity:
                self._flights.popitem(last=False)
        else:
            self._flights.move_to_end(request)
        began_s, flight = known
        if len(flight.events) >= LONGEST:
            del flight.events[LONGEST // 2]
            flight.left_out += 1
        flight.events.append(FlightEvent(now - began_s, what, facts))

    def find(self, request: str) -> list[Flight]:
        """Return the flights of a request and of its samples (`request.1`, ..); none if it is unknown or long ago."""
        mine = (request, f"{request}.")
        return [f for f in self._all() if f.request == mine[0] or f.request.startswith(mine[1])]

    def latest(self, count: int) -> list[Flight]:
        """Return the flights that were heard of last, the newest first."""
        return list(self._all())[: -count - 1 : -1]

    def told(self, request: str) -> list[Flight]:
        """Return the flights of a request; without one, the latest."""
        return self.find(request) if request else self.latest(SHOWN)

    def dump(self, request: str, why: str) -> None:
        """Write one request's timeline to the log."""
        for flight in self.find(request):
            story = "; ".join(f"{e.at_s:.4f} {e.what}{_facts(e)}" for e in flight.events)
            log.warning("%s; its timeline: %s", why, story, extra={"request": flight.request})

    def dump_open(self, ends: frozenset[str], why: str) -> None:
        """Write the timelines of all requests whose last event is none of `ends` to the log: those under way when this
        process broke."""
        for flight in self._all():
            if flight.events and flight.events[-1].what not in ends:
                self.dump(flight.request, why)

    def _all(self) -> Iterator[Flight]:
        # A copy in one step, since another thread may add to it.
        return iter([flight for _, flight in list(self._flights.values())])


def _facts(event: FlightEvent) -> str:
    return "".join(f" {name}={value}" for name, value in event.facts.items())

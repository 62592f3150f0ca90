"""Routers that come and go: what becomes of the requests of one that is lost, and of those that nobody has. Pure.

Whose a request is, and what is kept for the router that comes next, is the business of
`decode_worker.scheduler.orphans`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.departures import Departure, Departures
from decode_worker.scheduler.events import Tell
from decode_worker.scheduler.filling import Filling
from decode_worker.scheduler.orphans import NOBODY, Orphans, orphan
from decode_worker.scheduler.outcomes import Drawn, Over, Result
from decode_worker.scheduler.request import Request, RequestState
from engine.messages import OrphansTold
from engine.types import Incarnation, RequestId


@dataclass(slots=True, eq=False, repr=False)
class Routers:
    """Keeps nothing: what it changes belongs to the parts that it is given. Each result is to be acted on before the
    next is asked for."""

    requests: dict[RequestId, Request]
    """All that there are; a departure that comes back is put in."""
    orphans: Orphans
    departures: Departures
    """Those of a lost router come back, or are let go."""
    batch: Batch
    """Who comes back joins it."""
    filling: Filling
    """Computes here what no router can name a prefill worker for."""

    def lost(self, link: int, now: float) -> Iterator[Result]:
        """Nobody hears of its requests any more: those whose clients may come back go on for a while."""
        heir = self.orphans.left(link)
        lost = [r for r in self.requests.values() if r.link == link]
        yield from [Over(r) for r in lost if not r.record.context]
        self._orphan([r for r in lost if r.record.context], now)
        for departure in self.departures.router_lost(link, now):
            yield from self._take_back(departure, now)
        if heir != NOBODY:
            yield from self._hand_over(heir, now)

    def joined(self, link: int, router: Incarnation, now: float) -> Iterator[Result]:
        """The same incarnation has placed its requests again since it lost its former stream; another takes over."""
        former = [r for r in self.requests.values() if r.router == router and r.link != link]
        yield from [Over(r) for r in former if not r.handovers]
        self._orphan([r for r in former if r.handovers], now)
        self.orphans.joined(link, router)
        yield from self._hand_over(link, now)

    def _orphan(self, requests: list[Request], now: float) -> None:
        for request in requests:
            self.orphans.leave(request, now)
            # Who asked for it is gone: were it to depart, its next router would never be told of it.
            request.yielding = False
            if request.state is RequestState.ASKING:
                self.filling.here(request, now)

    def _take_back(self, departure: Departure, now: float) -> Iterator[Result]:
        """Its router is gone before anybody went on with it: it runs on here, as an orphan."""
        request = departure.request
        self.requests[request.record.request] = request
        self.orphans.leave(request, now)
        request.yielding = False
        request.clock.resume("decode_queue", now)
        self.batch.add_ready(request)
        if departure.token is not None:
            yield Drawn(request, departure.token)

    def _hand_over(self, link: int, now: float) -> Iterator[Result]:
        """The router on `link` gets what belonged to routers that are gone."""
        for request in [r for r in self.requests.values() if r.link == NOBODY]:
            if self.orphans.adopt(request, link):
                yield Tell(link, orphan(request, request.output, now))
            else:
                yield Over(request)
        for one in self.orphans.adopt_ended(link):
            yield Tell(link, orphan(one.request, one.tokens, now))
            yield Tell(link, one.ended)
        if self.orphans.is_alone(link):
            yield Tell(link, OrphansTold())

"""The requests that wait for a worker, and their offers to workers, from the head of the queue.

New requests stand in their tenants' lines, which take turns (`router/core/fair_share.py`). One that has had its turn
and comes back, since it was refused, or its worker was lost or left, stands before all of them, the oldest first: small
ones do not overtake it. A worker that refused is not asked again before its next report, so re-offers come at the
rate of reports and never spin. A sample of a prompt is offered first to a worker that has another one, a conversation's
next turn to those that served the one before. `router/core/placement.py`, where the way goes on, finds the workers.
Pure: time is an argument.
"""

import heapq
from collections import deque
from itertools import islice

import msgspec

from engine.messages import Cancel, Fault, Place
from engine.types import FinishReason, RequestId
from router.core.call import Call, State
from router.core.call_table import CallTable
from router.core.cluster_view import ClusterView
from router.core.endings import ROUTER_FAILED
from router.core.events import Command, Fail, TellWorker
from router.core.leaving.adoption import Adoptions
from router.core.placement import Placer
from router.core.policy import Choice
from router.core.sessions import Session, Sessions

MOST_OPEN_OFFERS = 16
"""Offers without an answer, for each decode worker, above which nobody new has a turn. What no worker takes comes back
before all lines, so of a flood that workers refuse no more stands before those that come later."""
MOST_AT_ONCE = 32
"""Requests of the line that one event deals with, so that nobody else waits for hundreds which come back when a worker
is lost: whatever comes next goes on, at the latest a tick."""
ASIDE_S = 0.25
MOST_TRIED = 8
"""So many of those that no worker could hold which takes requests now are tried again in such a time, and in any when
more workers take requests: it has to be found out for each whom it could go to."""
DEPARTURES = 32
"""Requests that workers took last, of which the line's speed is known."""
FEWEST_DEPARTURES = 8


class WaitingQueue:
    """The router core owns it. A request of an earlier router whose place is not known yet is put aside meanwhile, one
    that is held back for news of the workers that it was offered to (`router.core.recovery`), and one that only a
    worker could hold that takes nobody now: all others pass."""

    # Mutable state: (turn, request) of those that have come back, and of those of them put aside; stale entries are
    # skipped. The turns of those that no worker could hold which takes requests, in the order in which they are tried
    # again; how many of them are due, when more are, and how often workers had begun to take requests. For how long
    # somebody has waited here, and since when somebody does; when, on that clock, workers took requests since nobody
    # last waited anywhere; whether it stands until an offer is answered; whose turn it is while `advance` runs, and how
    # many it has dealt with; who was next when that found room nowhere. Those that are new are in the table's `share`.

    def __init__(
        self, table: CallTable, view: ClusterView, placer: Placer, adoptions: Adoptions, sessions: Sessions
    ) -> None:
        self._table = table
        self._view = view
        self._placer = placer
        self._adoptions = adoptions
        self._sessions = sessions
        self._share = table.share
        self._back: list[tuple[int, RequestId]] = []
        self._aside: list[tuple[int, RequestId]] = []
        self._passed: dict[RequestId, int] = {}
        self._due = 0
        self._due_s = 0.0
        self._openings = 0
        self._waited_s = 0.0
        self._since_s: float | None = None
        self._departures: deque[float] = deque(maxlen=DEPARTURES)
        self._awaits_answers = False
        self._placing: Call | None = None
        self._dealt_with = 0
        self._stuck: Call | None = None

    def enter(self, call: Call, tenant: str, weight: float, session: Session | None = None) -> None:
        """A new request waits from now on, in its tenant's line."""
        if self._nobody_waits():
            self._share.begin_anew()
        call.session = session
        self._share.enter(call.record.request, tenant, weight, call.record.priority, call.turn)

    def rejoin(self, call: Call) -> None:
        """Put a call that has had its turn back before all that have not."""
        self._table.move(call, State.WAITING)
        self._view.release(call)
        call.prefill = call.decode = ""
        call.prefill_life = call.decode_life = None
        call.yielding = False
        self._stuck = None  # it stands before whoever that was
        heapq.heappush(self._back, (call.turn, call.record.request))

    def advance(self, now: float, out: list[Command]) -> None:
        """Offer requests from the head of the queue while some worker may have room. What goes wrong with one ends that
        one alone; what goes wrong before anybody's turn is known is raised."""
        self._dealt_with = 0
        while True:
            self._placing = None
            try:
                self._advance(now, out)
                return
            except Exception as error:
                if self._placing is None:
                    raise  # no request's fault: a broken invariant ends the router
                self._fail(self._placing, error, out)

    def reported(self, worker: str, now: float, out: list[Command]) -> None:
        """A worker has reported: go on, unless room is waited for that it has not. Where hundreds of them are full, all
        would be compared at the report of each. What else may have changed is seen by the next tick."""
        stuck = self._first_and_stuck()
        if stuck is None or self._placer.may_have_room(worker, stuck):
            self.advance(now, out)

    def entered(self, call: Call, now: float, out: list[Command]) -> None:
        """A new request waits: go on, unless it stands behind others and the first one has found room nowhere."""
        if self._first_and_stuck() is None or self._share.is_first_of_its_line(call.record.request):
            self.advance(now, out)

    def left(self, now: float, out: list[Command]) -> None:
        """A client has left, which makes no room yet: go on, if the first one was its own."""
        if self._first_and_stuck() is None:
            self.advance(now, out)

    def _first_and_stuck(self) -> Call | None:
        """Return who was next, if it still waits and had room nowhere when that was last looked for."""
        stuck = self._stuck
        if stuck is None or stuck.state is not State.WAITING:
            return None
        return stuck if self._table.calls.get(stuck.record.request) is stuck else None

    def _advance(self, now: float, out: list[Command]) -> None:
        self._stuck = None
        if self._since_s is None and not self._is_empty():
            self._since_s = now
        if self._aside:
            waiting = [entry for entry in self._aside if self._is_aside(entry[1], now)]
            for entry in set(self._aside).difference(waiting):
                heapq.heappush(self._back, entry)
            self._aside = waiting
        if self._passed:
            self._try_passed(now)
        if not self._is_empty() and self._placer.have_all_refused(now):
            return  # before anybody asks whose turn it is
        while (call := self._head(now)) is not None:
            if call.deadline_s is not None and call.deadline_s <= now:
                break  # no worker is to hear of it: the next tick ends it
            self._dealt_with += 1
            if self._dealt_with > MOST_AT_ONCE:
                self._awaits_answers = True
                break
            self._placing = call
            request = call.record.request
            if self._is_aside(request, now):
                self._aside.append(heapq.heappop(self._back))
                continue
            choice = self._offer(call, now, out)
            if choice is None:
                # It may have come while no worker was known; now that some are, it may be too large for each.
                fault = self._placer.impossible(call.record, now)
                if fault is not None:
                    self._table.forget(call, out, _refused(call, fault))
                elif self._placer.takes_nobody_for(call.record, now):
                    self._pass(call, now)
                else:
                    self._stuck = call
                    return
                continue
            if request in self._share:
                self._share.serve(request, len(call.record.tokens) - choice.prefill.cached_tokens)
            else:
                heapq.heappop(self._back)
        if self._since_s is not None and self._is_empty():
            self._waited_s, self._since_s = self._line_s(now), None
        if self._nobody_waits():
            self._departures.clear()

    def answered(self, now: float, out: list[Command]) -> None:
        """A worker has taken a request: the line has moved. Go on, if that was waited for."""
        if not self._nobody_waits():
            self._departures.append(self._line_s(now))
        if self._awaits_answers:
            self.advance(now, out)

    def last(self) -> Call:
        """Return who goes where there is no room for all: the last one of the tenant that has the most waiting for a
        first turn. Somebody does."""
        return self._table.calls[self._share.last_of_the_longest()]

    def wait_s(self, tenant: str, weight: float, priority: int, now: float) -> float:
        """Return how long a new request of a tenant would wait for its turn, at the speed at which the line has moved;
        0.0 while that is not known."""
        if len(self._departures) < FEWEST_DEPARTURES:
            return 0.0
        before = len(self._back) + self._share.ahead(tenant, weight, priority)
        return before * (self._line_s(now) - self._departures[0]) / len(self._departures)

    def check(self) -> None:
        """Raise AssertionError if a request waits outside of the queue."""
        back = {request for _, request in self._back + self._aside} | set(self._passed)
        lined = []
        for request, call in self._table.calls.items():
            if call.state is State.WAITING:
                assert request in back or request in self._share, f"{request} waits outside of the queue"
                assert not call.decode
                if request in self._share or self._share.is_aside(request):
                    lined.append(request)
        self._share.check(lined)

    def _is_aside(self, request: RequestId, now: float) -> bool:
        """Return whether a request that waits is not to be offered yet."""
        call = self._table.calls.get(request)
        until_s = None if call is None else call.held_back_until_s
        return (until_s is not None and now < until_s) or self._adoptions.is_unsure(request, now)

    def _fail(self, call: Call, error: Exception, out: list[Command]) -> None:
        """End a call whose placing raised `error`."""
        request = call.record.request
        self._adoptions.close(request)
        if call.state is State.OFFERED:  # whether its worker hears of it, nobody knows
            out.append(TellWorker(call.decode, Cancel(request, call.placement, FinishReason.CANCELLED)))
        self._table.forget(call, out, Fail(request, ROUTER_FAILED, FinishReason.ERROR, cause=error))

    def _pass(self, call: Call, now: float) -> None:
        """Let all others pass for a while."""
        request = call.record.request
        if request in self._share:
            self._share.put_aside(request)
        else:
            heapq.heappop(self._back)
        if not self._passed:
            self._due, self._due_s, self._openings = 0, now + ASIDE_S, self._view.registry.openings
        self._passed[request] = call.turn

    def _try_passed(self, now: float) -> None:
        """Give those who were passed their turns again that are due: all of them, where a worker has begun to take
        requests since."""
        calls, openings = self._table.calls, self._view.registry.openings
        if openings == self._openings and now < self._due_s and not self._due:
            return  # as in most events: those that are gone stay among them until then
        known = ((request, turn, calls.get(request)) for request, turn in self._passed.items())
        passed = {request: turn for request, turn, call in known if call is not None and call.turn == turn}
        if openings != self._openings:
            self._openings, self._due = openings, len(passed)
        elif now >= self._due_s:
            self._due, self._due_s = max(self._due, MOST_TRIED), now + ASIDE_S
        self._due = min(self._due, len(passed))
        for request in list(islice(passed, min(self._due, MOST_TRIED))):
            turn = passed.pop(request)
            self._due -= 1
            if not self._share.bring_back(request):
                heapq.heappush(self._back, (turn, request))
        self._passed = passed

    def _line_s(self, now: float) -> float:
        """Return for how long somebody has waited here, all in all: a line that nobody stands in does not move."""
        return self._waited_s + (now - self._since_s if self._since_s is not None else 0.0)

    def _is_empty(self) -> bool:
        return not (self._back or self._aside or self._passed or len(self._share))

    def _nobody_waits(self) -> bool:
        """Return True if nobody waits here, nor at other routers."""
        return self._is_empty() and not self._share.is_waited_for_elsewhere

    def _head(self, now: float) -> Call | None:
        """Return the call that is next; None too while there are too many offers without an answer."""
        self._placing = None
        calls = self._table.calls
        while self._back:
            turn, request = self._back[0]
            call = calls.get(request)
            if call is not None and call.turn == turn:
                return call
            heapq.heappop(self._back)
        self._awaits_answers = self._has_asked_enough(now)
        if self._awaits_answers:
            return None
        following = self._share.next(lambda request: self._placer.cached_tokens(calls[request]))
        return None if following is None else calls[following]

    def _has_asked_enough(self, now: float) -> bool:
        offers = self._table.open_offers
        if len(offers) < MOST_OPEN_OFFERS:
            return False
        takers = {worker.name for worker in self._view.registry.takers("decode", now)}
        most = MOST_OPEN_OFFERS * len(takers)
        if not takers or len(offers) < most:
            return not takers
        # One that hangs answers nothing: what it was offered says nothing of the others.
        return sum(self._table.calls[request].decode in takers for request in offers) >= most

    def _offer(self, call: Call, now: float, out: list[Command]) -> Choice | None:
        """Offer `call` to a worker, which this returns; None if none may have room for it."""
        host, choice = self._beside(call, now)
        if choice is None:
            call.pin = self._sessions.find(call.session, now)
            choice = self._placer.choose(call, now)
        if choice is None:
            return None
        self._table.move(call, State.OFFERED)
        call.placement = max(call.placement, call.highest) + 1
        self._table.offered(call, now)
        prefill = self._view.offered(call, choice, is_fork=host is not None)
        record = call.record
        if call.deadline_s is not None:
            record = msgspec.structs.replace(record, remaining_s=call.deadline_s - now)
        if call.logprobs:
            record = msgspec.structs.replace(record, emitted_logprobs=call.logprobs.part(0))
        place = Place(record=record, placement=call.placement, prefill=prefill, losses=call.losses, fork_of=host)
        # It was bound to where its KV is, or the policy says why.
        bound = host is not None or call.source is not None
        out.append(TellWorker(call.decode, place, "pinned" if bound else choice.reason))
        return choice

    def _beside(self, call: Call, now: float) -> tuple[RequestId | None, Choice | None]:
        """Another sample of its prompt to share blocks with, and the place there."""
        if call.source is None:
            for host in self._table.hosts(call):
                choice = self._placer.beside(call, host, now)
                if choice is not None:
                    return host.record.request, choice
        return None, None


def _refused(call: Call, fault: Fault) -> Fail:
    """Return how a call ends that no worker could hold: one that was taken before was not too large, but its worker is
    lost, and has not come back."""
    if not call.losses:
        return Fail(call.record.request, fault, FinishReason.REJECTED)
    lost = Fault("UNAVAILABLE", f"the worker that could hold it was lost: {fault.message}")
    return Fail(call.record.request, lost, FinishReason.ERROR)

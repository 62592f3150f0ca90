"""The requests that the router knows: by name, in groups of samples, by deadline, and those that wait or move. Pure.

A tick and a worker's report are far more frequent than a request, so neither looks at all requests: what they ask for
is kept beside them.
"""

import heapq
from collections import deque
from collections.abc import Iterator

from engine.messages import Release
from engine.types import RequestId, RequestRecord
from router.core.call import Call, State
from router.core.cluster_view import ClusterView
from router.core.events import Command, Ending, TellWorker
from router.core.fair_share import FairShare
from router.core.registry import WorkerEntry

MIN_DEADLINES = 1024
"""Deadlines that may be kept of requests that are over, beside as many as are open."""


class CallTable:
    """The router core owns it. Samples of one prompt are a group: each is placed beside another one, if it can be."""

    # Mutable state: the calls by request, those that wait, those whose offer has no answer, those of each group by
    # sample index, and the last turn given; (deadline, turn, request) of calls that have one, (time, request, turn,
    # placement) of what was offered, oldest first, and calls that were asked to move or have moved. Of these three,
    # entries that are over are dropped when they are met. And what the requests cost their tenants.

    def __init__(self, view: ClusterView) -> None:
        self.calls: dict[RequestId, Call] = {}
        self.waiting: dict[RequestId, Call] = {}
        self.open_offers: set[RequestId] = set()
        self.share = FairShare()
        self._deadlines: list[tuple[float, int, RequestId]] = []
        self._offers: deque[tuple[float, RequestId, int, int]] = deque()
        self._moving: dict[RequestId, Call] = {}
        self._view = view
        self._groups: dict[str, dict[int, Call]] = {}
        self._turns = 0

    def open(self, record: RequestRecord, deadline_s: float | None, state: State = State.WAITING) -> Call:
        """Note a request that was not known. Its turn is behind all others'."""
        self._turns += 1
        call = Call(record, self._turns, deadline_s, state)
        self.calls[record.request] = call
        if state is State.WAITING:
            self.waiting[record.request] = call
        if deadline_s is not None:
            self._note_deadline(call, deadline_s)
        if record.group:
            self._groups.setdefault(record.group, {})[record.sample_index] = call
        return call

    def move(self, call: Call, state: State) -> None:
        """Change the state of `call`. Raises AssertionError for a change that there is not."""
        call.move(state)
        if state is State.WAITING:
            self.waiting[call.record.request] = call
        else:
            self.waiting.pop(call.record.request, None)
        if state is State.OFFERED:
            self.open_offers.add(call.record.request)
        else:
            self.open_offers.discard(call.record.request)

    def waiting_in_turn(self) -> list[Call]:
        """Return the calls that wait, oldest first."""
        return sorted(self.waiting.values(), key=lambda call: call.turn)

    def overdue(self, now: float, most: int) -> list[Call]:
        """Return calls whose deadline has passed and that this has not returned, oldest first: at most so many, those
        whose deadline was first."""
        late: list[Call] = []
        while self._deadlines and self._deadlines[0][0] <= now and len(late) < most:
            _, turn, request = heapq.heappop(self._deadlines)
            call = self.calls.get(request)
            if call is not None and call.turn == turn:
                late.append(call)
        return sorted(late, key=lambda call: call.turn)

    def _note_deadline(self, call: Call, deadline_s: float) -> None:
        if len(self._deadlines) > 2 * len(self.calls) + MIN_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if self._is_open(entry)]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, call.turn, call.record.request))

    def _is_open(self, entry: tuple[float, int, RequestId]) -> bool:
        call = self.calls.get(entry[2])
        return call is not None and call.turn == entry[1]

    def offered(self, call: Call, now: float) -> None:
        """Note that `call` was offered to a worker."""
        self._offers.append((now, call.record.request, call.turn, call.placement))

    def forgive(self, now: float) -> None:
        """Count all offers from now: no answer could have been heard until here."""
        self._offers = deque((now, request, turn, placement) for _, request, turn, placement in self._offers)

    def unanswered(self, until_s: float) -> list[Call]:
        """Return the calls whose offer of `until_s` or earlier has had no answer, each once, oldest first."""
        silent = []
        while self._offers and self._offers[0][0] <= until_s:
            _, request, turn, placement = self._offers.popleft()
            call = self.calls.get(request)
            if call is None or call.turn != turn:
                continue
            if call.state is State.OFFERED and call.placement == placement:
                silent.append(call)
        return silent

    def _holds(self, call: Call) -> bool:
        return self.calls.get(call.record.request) is call

    def moves(self, call: Call) -> None:
        """Note that `call` was asked to leave its worker, or that a worker which it has left keeps its KV."""
        self._moving[call.record.request] = call

    def around(self, workers: list[WorkerEntry]) -> list[Call]:
        """Return the calls that `workers` have, those that move and those that wait, oldest first."""
        found = {name: call for name, call in self._moving.items() if self._still_moves(call)}
        self._moving = dict(found)
        found |= self.waiting
        for worker in workers:
            found |= {name: call for name in worker.own if (call := self.calls.get(name)) is not None}
        return sorted(found.values(), key=lambda call: call.turn)

    def _still_moves(self, call: Call) -> bool:
        return self._holds(call) and (call.yielding or call.source is not None)

    def hosts(self, call: Call) -> Iterator[Call]:
        """Other samples of the prompt of `call`, which waits, that a decode worker has, or is offered: the first one of
        each worker."""
        seen: set[str] = set()
        for _, other in sorted(self._groups.get(call.record.group, {}).items()):
            here = other.state in (State.OFFERED, State.RUNNING) and not other.yielding
            if here and other.decode not in seen:
                seen.add(other.decode)
                yield other

    def release(self, call: Call, out: list[Command]) -> None:
        """Tell a leaving worker that the KV it keeps for `call` may go."""
        if call.source is not None:
            out.append(TellWorker(call.source[0], Release(call.record.request, call.source_placement)))
            call.source = None

    def forget(self, call: Call, out: list[Command], end: Ending | None = None) -> None:
        """Drop `call`, which no worker holds, and tell its client `end`, if it still waits."""
        record = call.record
        del self.calls[record.request]
        self.waiting.pop(record.request, None)
        self.open_offers.discard(record.request)
        group = self._groups.get(record.group, {})
        if group.get(record.sample_index) is call:
            del group[record.sample_index]
            if not group:
                del self._groups[record.group]
        self.share.left(record.request)
        self._view.release(call)
        self.release(call, out)
        if end is not None:
            out.append(end)

    def check(self) -> None:
        """Raise AssertionError if what is kept twice disagrees."""
        self._view.check(self.calls)
        calls = self.calls.values()
        assert self.waiting == {c.record.request: c for c in calls if c.state is State.WAITING}
        assert self.open_offers == {c.record.request for c in calls if c.state is State.OFFERED}
        timed = {(c.turn, c.record.request) for c in calls if c.deadline_s is not None and c.state is not State.CLOSING}
        assert timed <= {(turn, request) for _, turn, request in self._deadlines}, "a deadline is not watched"
        moving = [c for c in calls if c.yielding or c.source is not None]
        assert all(self._moving.get(c.record.request) is c for c in moving), "a move is not known"
        known = [call for group in self._groups.values() for call in group.values()]
        grouped = [call for call in self.calls.values() if call.record.group]
        assert len(known) == len(grouped) and all(self._groups.values())
        assert all(self.calls.get(call.record.request) is call for call in known)

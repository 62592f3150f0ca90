"""The requests that the router knows: by name, in groups of samples, in the waiting line, by their deadlines.

The line is first come, first served. A request that is back in it has its old turn. One that is put aside waits outside
of it until it is taken back. Pure.
"""

import heapq
from collections.abc import Iterator

from engine.messages import Release
from engine.types import RequestId, RequestRecord
from router.core.call import Call, State
from router.core.cluster_view import Beliefs
from router.core.events import Command, SendRelease
from router.core.groups import Groups


class Book:
    """Owned by the router core, which alone changes a call's state otherwise."""

    # Mutable state: the calls by request and by group; line, aside and deadlines, whose stale entries are skipped.

    def __init__(self, beliefs: Beliefs) -> None:
        self.calls: dict[RequestId, Call] = {}
        self.groups = Groups()
        self._beliefs = beliefs
        self._line: list[tuple[int, RequestId]] = []
        self._aside: list[tuple[int, RequestId]] = []
        self._deadlines: list[tuple[float, RequestId]] = []
        self._turns = 0

    @property
    def waiting(self) -> int:
        return sum(call.state is State.WAITING for call in self.calls.values())

    def open(
        self,
        record: RequestRecord,
        deadline_s: float | None,
        state: State = State.WAITING,
        placement: int = 0,
    ) -> Call:
        """A request that was not known: at the end of the line, or with a worker already."""
        self._turns += 1
        call = Call(record, self._turns, deadline_s, state, placement)
        self.calls[record.request] = call
        self.groups.add(call)
        if state is State.WAITING:
            heapq.heappush(self._line, (call.turn, record.request))
        if deadline_s is not None:
            heapq.heappush(self._deadlines, (deadline_s, record.request))
        return call

    def head(self) -> Call | None:
        """Whose turn it is."""
        while self._line:
            turn, request = self._line[0]
            call = self.calls.get(request)
            if call is not None and call.state is State.WAITING and call.turn == turn:
                return call
            heapq.heappop(self._line)
        return None

    def next(self) -> None:
        """The one at the head has left the line."""
        heapq.heappop(self._line)

    @property
    def has_aside(self) -> bool:
        return bool(self._aside)

    def put_aside(self) -> None:
        """The one at the head waits outside of the line."""
        self._aside.append(heapq.heappop(self._line))

    def take_back(self) -> None:
        """All that wait outside have their turns again."""
        for entry in self._aside:
            heapq.heappush(self._line, entry)
        self._aside.clear()

    def requeue(self, call: Call) -> None:
        """Its decode worker has it no more: back in line."""
        call.move(State.WAITING)
        self._beliefs.release(call)
        call.prefill = call.decode = ""
        call.prefill_life = call.decode_life = None
        call.yielding = False
        heapq.heappush(self._line, (call.turn, call.record.request))

    def release(self, call: Call, out: list[Command]) -> None:
        """The KV that a leaving worker keeps for `call` is not needed any more."""
        if call.source is not None:
            release = Release(call.record.request, call.source_placement)
            out.append(SendRelease(call.source[0], release))
            call.source = None

    def forget(self, call: Call, out: list[Command]) -> None:
        """No worker holds it, and nobody waits for it."""
        del self.calls[call.record.request]
        self.groups.remove(call)
        self._beliefs.release(call)
        self.release(call, out)

    def overdue(self, now: float) -> Iterator[RequestId]:
        """Names whose deadline has passed, each once; some may be forgotten."""
        while self._deadlines and self._deadlines[0][0] <= now:
            yield heapq.heappop(self._deadlines)[1]

    def check(self) -> None:
        """Raise AssertionError if what is kept twice disagrees."""
        self._beliefs.check(self.calls)
        self.groups.check(self.calls)
        in_line = {request for turn, request in self._line + self._aside}
        for request, call in self.calls.items():
            if call.state is State.WAITING:
                assert request in in_line, f"{request} waits outside the line"
                assert not call.decode

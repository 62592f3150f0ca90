"""The requests that the router knows: by name, and in groups of samples. Pure."""

from collections.abc import Iterator

from engine.messages import Release
from engine.types import RequestId, RequestRecord
from router.core.call import Call, State
from router.core.cluster_view import ClusterView
from router.core.events import Command, Ending, TellWorker
from router.core.fair_share import FairShare


class CallTable:
    """The router core owns it. Samples of one prompt are a group: each is placed beside another one, if it can be."""

    # Mutable state: the calls by request, those of each group by sample index, the last turn given, and what the
    # requests cost their tenants.

    def __init__(self, view: ClusterView) -> None:
        self.calls: dict[RequestId, Call] = {}
        self.share = FairShare()
        self._view = view
        self._groups: dict[str, dict[int, Call]] = {}
        self._turns = 0

    def open(self, record: RequestRecord, deadline_s: float | None, state: State = State.WAITING) -> Call:
        """Note a request that was not known. Its turn is behind all others'."""
        self._turns += 1
        call = Call(record, self._turns, deadline_s, state)
        self.calls[record.request] = call
        if record.group:
            self._groups.setdefault(record.group, {})[record.sample_index] = call
        return call

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
        known = [call for group in self._groups.values() for call in group.values()]
        grouped = [call for call in self.calls.values() if call.record.group]
        assert len(known) == len(grouped) and all(self._groups.values())
        assert all(self.calls.get(call.record.request) is call for call in known)

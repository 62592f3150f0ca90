"""Which requests are samples of one prompt: a sample is placed beside another one, and shares its blocks. Pure."""

from collections.abc import Iterator, Mapping

from engine.types import RequestId
from router.core.call import Call, State


class Groups:
    """Mutable state: the calls of each group by sample index. The router core owns it."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[int, Call]] = {}

    def add(self, call: Call) -> None:
        if call.record.group:
            self._groups.setdefault(call.record.group, {})[call.record.sample_index] = call

    def remove(self, call: Call) -> None:
        group = self._groups.get(call.record.group, {})
        if group.get(call.record.sample_index) is call:
            del group[call.record.sample_index]
            if not group:
                del self._groups[call.record.group]

    def hosts(self, call: Call) -> Iterator[Call]:
        """Other samples of its prompt that a decode worker has, or is offered: the first one of each worker."""
        seen: set[str] = set()
        group = self._groups.get(call.record.group, {})
        for index in sorted(group):
            other = group[index]
            here = other.state in (State.OFFERED, State.RUNNING) and not other.yielding
            if other is not call and here and other.decode not in seen:
                seen.add(other.decode)
                yield other

    def check(self, calls: Mapping[RequestId, Call]) -> None:
        """Raise AssertionError if these are not the groups of `calls`."""
        known = [call for group in self._groups.values() for call in group.values()]
        grouped = [call for call in calls.values() if call.record.group]
        assert len(known) == len(grouped) and all(self._groups.values())
        assert all(calls.get(call.record.request) is call for call in known)

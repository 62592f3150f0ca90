"""One descriptor for both reasons to poll a GPU transport: something was posted, or it is time to look again."""

import selectors

from transfer.bell import Bell
from transfer.gpu.pulse import Pulse


class Wakeup:
    """A bell and a pulse."""

    def __init__(self) -> None:
        self._bell = Bell()
        self._pulse = Pulse()
        self._selector = selectors.EpollSelector()
        for part in (self._bell, self._pulse):
            self._selector.register(part, selectors.EVENT_READ, part)

    def fileno(self) -> int:
        return self._selector.fileno()

    def ring(self) -> None:
        self._bell.ring()

    def beat(self, on: bool, now: float, *, afresh: bool) -> None:
        self._pulse.set(on, now, afresh=afresh)

    def wait(self, timeout_s: float) -> None:
        """Return when there is a reason, or after `timeout_s`, and be quiet until the next."""
        for key, _ in self._selector.select(timeout_s):
            key.data.hush()

    def hush(self) -> None:
        """Whatever was rung for has been seen to."""
        self._bell.hush()

    def close(self) -> None:
        self._selector.close()
        self._bell.close()
        self._pulse.close()

"""A bell that wakes its thread for other reasons too: what `tcp`, `nccl` and `cuda_ipc` wait on."""

import selectors
from collections.abc import Callable
from typing import Protocol

from transfer.polling import Bell


class Watched(Protocol):
    """A socket, or a timer."""

    def fileno(self) -> int: ...


class Reactor(Bell):
    """One descriptor for itself and for whatever is watched, each with what to do about it."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = selectors.EpollSelector()
        self._selector.register(self._fd, selectors.EVENT_READ, self.hush)

    def fileno(self) -> int:
        return self._selector.fileno()

    def watch(self, what: Watched, act: Callable[[], None], events: int = selectors.EVENT_READ) -> None:
        self._selector.register(what, events, act)

    def rewatch(self, what: Watched, events: int) -> None:
        key = self._selector.get_key(what)
        if key.events != events:
            self._selector.modify(what, events, key.data)

    def is_watched(self, what: Watched) -> bool:
        return what.fileno() in self._selector.get_map()

    def unwatch(self, what: Watched) -> None:
        if self.is_watched(what):
            self._selector.unregister(what)

    def wait(self, timeout_s: float) -> None:
        """Do what is due, waiting for the first of it at most `timeout_s`."""
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def close(self) -> None:
        self._selector.close()
        super().close()

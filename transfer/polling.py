"""Parts that the transports share behind their contract: what wakes the transfer thread, what has ended, which peers
there are and what they tell."""

import contextlib
import os
import select
from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine.messages import Endpoint
from engine.types import Incarnation
from transfer.transport import Completion, Outcome, Ticket, TransferError

PeerT = TypeVar("PeerT")
DetailsT = TypeVar("DetailsT")


class Bell:
    """A descriptor that is readable while somebody has something to do: wakes a thread that waits in `select`. Any
    thread may `ring`; the one that waits on `fileno` calls `hush`. Ringing twice is ringing once."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        # A full counter means that it rings already.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def wait(self, timeout_s: float) -> None:
        """Return when it rings, or after `timeout_s`."""
        if timeout_s > 0:
            poller = select.poll()
            poller.register(self._fd, select.POLLIN)
            poller.poll(timeout_s * 1e3)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PeerTable(dict[Incarnation, PeerT]):
    """Connected peers; a missing one raises TransferError."""

    def __missing__(self, peer: Incarnation) -> PeerT:
        raise TransferError(f"{peer} is not connected")


class CompletionQueue:
    """The tickets of one transport, and what has ended since its last `poll`; `ring` is called for what ends."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._ended: list[Completion] = []
        self._last_ticket = 0

    def ticket(self) -> Ticket:
        self._last_ticket += 1
        return Ticket(self._last_ticket)

    def end(self, ticket: Ticket, outcome: Outcome, error: str = "") -> None:
        self.add([Completion(ticket, outcome, error)])

    def add(self, completions: list[Completion]) -> None:
        if completions:
            self._ended += completions
            self._ring()

    def take(self) -> list[Completion]:
        taken, self._ended = self._ended, []
        return taken


def details_of(endpoint: Endpoint, kind: type[DetailsT]) -> DetailsT:
    """Return what a peer's transport has told of itself. Raises TransferError where it is something else."""
    try:
        return msgspec.convert(endpoint.details, kind)
    except msgspec.ValidationError as error:
        raise TransferError(f"not a {endpoint.transport} endpoint: {error}") from error

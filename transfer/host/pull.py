"""Transports whose receiver reads the peer's memory by its own hand: what `shm`, `loopback` and `cuda_ipc` share.

A receive is a queue entry until it is copied, a few blocks at a time, so it can be cancelled between two blocks with
proof: nobody else copies. The generation of a source block is checked before and after its copy, as with a sequence
lock: its owner advances it before the block is written anew, so equal generations mean that no byte changed meanwhile.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from engine.types import BlockId, Incarnation
from transfer.polling import Bell, CompletionQueue, PeerTable
from transfer.transport import Completion, Landing, Move, Outcome, StaleBlockError, Ticket, TransferError

BLOCKS_PER_RUN = 32
"""Few, so that a poll ends soon, and a cancel that waits in the queue behind it is heard."""


class PeerPool(Protocol):
    """A peer's pool, as it can be read from here."""

    def generation(self, block: BlockId) -> int:
        """Raises TransferError if there is no such block."""


class HostPool(PeerPool, Protocol):
    """A peer's pool in this host's memory."""

    def read(self, block: BlockId) -> npt.NDArray[np.uint8]:
        """A view of what travels of one block."""


PoolT = TypeVar("PoolT", bound=PeerPool)
IntoT = TypeVar("IntoT")


@dataclass(slots=True, eq=False)
class Pull(Generic[PoolT, IntoT]):
    """One receive. `ended` of its blocks are in their place, the copies of `begun` were begun."""

    ticket: Ticket
    peer: Incarnation
    source: PoolT
    move: Move
    landing: IntoT
    begun: int = 0
    ended: int = 0
    error: str = ""


class PullTransport(ABC, Generic[PoolT, IntoT]):
    """`transfer.transport.Transport` but for what a subclass says: how a pool is found, and how it is copied from."""

    reads_remotely = True
    scrapped_bytes = 0  # what nobody wants is not read

    # Mutable state: the peers' pools, the receives in order, and what has ended.

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._peers: PeerTable[PoolT] = PeerTable()
        self._pulls: deque[Pull[PoolT, IntoT]] = deque()
        self._completions = CompletionQueue(bell.ring)

    def send(self, peer: Incarnation, move: Move, packed: None = None) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"{peer} is not connected")
        ticket = self._completions.ticket()
        self._completions.end(ticket, Outcome.DONE)
        return ticket

    def recv(self, peer: Incarnation, move: Move, landing: IntoT | None) -> Ticket:
        source, ticket = self._peers[peer], self._completions.ticket()
        if landing is None:
            # A wire that carries nothing has nothing to drain.
            self._completions.end(ticket, Outcome.DONE)
        else:
            self._enqueue(Pull(ticket, peer, source, move, landing))
        return ticket

    def fileno(self) -> int:
        return self._bell.fileno()

    def poll(self, timeout_s: float) -> list[Completion]:
        self._bell.wait(timeout_s)
        is_due = self._advance()
        self._bell.hush()
        if is_due:
            self._bell.ring()
        return self._completions.take()

    def cancel(self, ticket: Ticket) -> bool:
        for pull in self._pulls:
            if pull.ticket == ticket:
                self._finish(pull, Outcome.CANCELLED)
                return True
        return False

    def disconnect(self, peer: Incarnation) -> None:
        self._peers.pop(peer, None)
        for pull in [pull for pull in self._pulls if pull.peer == peer]:
            self._finish(pull, Outcome.FAILED, "disconnected")

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._bell.close()

    @abstractmethod
    def _advance(self) -> bool:
        """Copy some blocks, and finish what has ended. True where there is more to do at once."""

    def _enqueue(self, pull: Pull[PoolT, IntoT]) -> None:
        self._pulls.append(pull)
        self._bell.ring()

    def _finish(self, pull: Pull[PoolT, IntoT], outcome: Outcome, error: str = "") -> None:
        """End the receive; nothing of it touches local memory any more."""
        self._pulls.remove(pull)
        self._completions.end(pull.ticket, outcome, error)


class HostPullTransport(PullTransport[HostPool, Landing]):
    """Copies up to `BLOCKS_PER_RUN` blocks a poll, by the transfer thread."""

    device = None

    def __init__(self) -> None:
        super().__init__(Bell())

    def _advance(self) -> bool:
        budget = BLOCKS_PER_RUN
        while self._pulls and budget:
            pull = self._pulls[0]
            some = pull.move.remote[pull.ended : pull.ended + budget]
            budget -= len(some)
            try:
                self._copy(pull, some)
            except Exception as error:
                # Whatever is in an offer may cost its own receive, never this thread.
                self._finish(pull, Outcome.FAILED, f"{type(error).__name__}: {error}")
                continue
            if pull.ended == len(pull.move.remote):
                self._finish(pull, Outcome.DONE)
        return bool(self._pulls)

    @staticmethod
    def _copy(pull: Pull[HostPool, Landing], blocks: Iterable[tuple[BlockId, int]]) -> None:
        for block in blocks:
            expect(pull.source, [block])
            # numpy's copy releases the GIL; slice assignment of a memoryview does not.
            np.copyto(np.frombuffer(pull.landing.place(pull.ended), dtype=np.uint8), pull.source.read(block[0]))
            expect(pull.source, [block])
            pull.landing.landed(pull.ended)
            pull.ended += 1


def expect(pool: PeerPool, blocks: Iterable[tuple[BlockId, int]]) -> None:
    """Raises StaleBlockError where a block is not the one of that generation, which was offered, any more."""
    for block, generation in blocks:
        now = pool.generation(block)
        if now != generation:
            raise StaleBlockError(f"block {block} is at generation {now}, {generation} was offered")

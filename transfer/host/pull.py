"""Receives that read the peer's memory by this process's own hand: what `shm` and `loopback` share.

A receive is a queue entry until `run` copies it, a few blocks at a time, so it can be cancelled between two blocks with
proof: nobody else copies. The generation of a source block is checked before and after its copy, as with a sequence
lock: its owner advances it before the block is written anew, so equal generations mean that no byte changed meanwhile.
"""

from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.types import BlockId, Incarnation
from transfer.bell import Bell
from transfer.transport import (
    Completion,
    Landing,
    Move,
    Outcome,
    StaleBlockError,
    Ticket,
    TransferError,
)

BLOCKS_PER_RUN = 32
"""So that a poll ends soon, and a cancel that waits in the queue behind it is heard."""


class PeerPool(Protocol):
    """A peer's pool, as it can be read from here."""

    def read(self, block: BlockId) -> npt.NDArray[np.uint8]:
        """A view of what travels of one block. Raises TransferError if there is no such block."""

    def generation(self, block: BlockId) -> int: ...


class _Pull:
    __slots__ = ("done", "landing", "move", "peer", "source", "ticket")

    def __init__(self, ticket: Ticket, peer: Incarnation, source: PeerPool, move: Move, landing: Landing) -> None:
        self.ticket = ticket
        self.peer = peer
        self.source = source
        self.move = move
        self.landing = landing
        self.done = 0


class Puller:
    """The queue of receives of one transport, and its completions. `bell` rings while there is something to do."""

    def __init__(self) -> None:
        self._queue: deque[_Pull] = deque()
        self._completions: list[Completion] = []
        self._last_ticket = 0
        self.bell = Bell()

    def ticket(self) -> Ticket:
        self._last_ticket += 1
        return Ticket(self._last_ticket)

    def pull(self, ticket: Ticket, peer: Incarnation, source: PeerPool, move: Move, landing: Landing | None) -> None:
        """Queue a receive. A scrap receive is done at once: a wire that carries nothing has nothing to drain."""
        if landing is None:
            self.finish(ticket, Outcome.DONE)
            return
        self._queue.append(_Pull(ticket, peer, source, move, landing))
        self.bell.ring()

    def finish(self, ticket: Ticket, outcome: Outcome, error: str = "") -> None:
        """Report the end of a transfer in the next `run`."""
        self._completions.append(Completion(ticket, outcome, error))
        self.bell.ring()

    def cancel(self, ticket: Ticket) -> bool:
        for pull in self._queue:
            if pull.ticket == ticket:
                self._queue.remove(pull)
                self.finish(ticket, Outcome.CANCELLED)
                return True
        return False

    def drop_peer(self, peer: Incarnation) -> None:
        """Fail whatever is queued from `peer`."""
        for pull in [pull for pull in self._queue if pull.peer == peer]:
            self._queue.remove(pull)
            self.finish(pull.ticket, Outcome.FAILED, "disconnected")

    def run(self) -> list[Completion]:
        """Copy up to `BLOCKS_PER_RUN` blocks; return what has ended."""
        budget = BLOCKS_PER_RUN
        while self._queue and budget:
            pull = self._queue[0]
            blocks = min(budget, len(pull.move.remote) - pull.done)
            budget -= blocks
            try:
                self._copy(pull, blocks)
            except TransferError as error:
                self._queue.popleft()
                self.finish(pull.ticket, Outcome.FAILED, f"{type(error).__name__}: {error}")
                continue
            if pull.done == len(pull.move.remote):
                self._queue.popleft()
                self.finish(pull.ticket, Outcome.DONE)
        completions, self._completions = self._completions, []
        self.bell.hush()
        if self._queue:
            self.bell.ring()
        return completions

    def _copy(self, pull: _Pull, blocks: int) -> None:
        first = pull.done
        for block, generation in pull.move.remote[first : first + blocks]:
            source = pull.source.read(block)
            self._expect(pull.source, block, generation)
            # numpy's copy releases the GIL; slice assignment of a memoryview does not.
            np.copyto(np.frombuffer(pull.landing.place(pull.done), dtype=np.uint8), source)
            self._expect(pull.source, block, generation)
            pull.landing.landed(pull.done)
            pull.done += 1

    @staticmethod
    def _expect(source: PeerPool, block: BlockId, generation: int) -> None:
        now = source.generation(block)
        if now != generation:
            raise StaleBlockError(f"block {block} is at generation {now}, {generation} was offered")

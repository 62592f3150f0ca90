"""How a receiver reads a peer's memory by its own hand, a few blocks at a time. The transports made of it are in
tests/transfer/test_conformance.py and test_faults.py, whole handoffs in test_mover.py."""

import numpy as np
import numpy.typing as npt
import pytest

from engine.messages import Endpoint, Handoff
from engine.types import BlockId, Incarnation, RequestId
from transfer.host.pull import BLOCKS_PER_RUN, HostPullTransport, expect
from transfer.transport import BlockSlice, Completion, Move, Outcome, StaleBlockError, TransferError

ME, PEER = Incarnation(1), Incarnation(2)
H = Handoff(RequestId("r"), 1, 1, ME, PEER)


class Pool:
    """A peer's pool of one-byte blocks. Reading block `renewed` shows that it was handed out anew meanwhile."""

    def __init__(self, renewed: int = -1) -> None:
        self.reads: list[int] = []
        self._renewed = renewed

    def generation(self, block: BlockId) -> int:
        return 7 + (block == self._renewed and block in self.reads)

    def read(self, block: BlockId) -> npt.NDArray[np.uint8]:
        self.reads.append(block)
        return np.array([block % 256], dtype=np.uint8)


class Landed:
    def __init__(self) -> None:
        self.bytes = bytearray(256)
        self.order: list[int] = []

    def place(self, at: int) -> memoryview:
        return memoryview(self.bytes)[at : at + 1]

    def landed(self, at: int) -> None:
        self.order.append(at)


class Pulls(HostPullTransport):
    name = "pulls"

    def describe(self, peer: Incarnation) -> Endpoint:
        return Endpoint(transport=self.name)

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: BlockSlice, received: BlockSlice) -> None: ...

    def knows(self, pool: Pool) -> "Pulls":
        self._peers[PEER] = pool
        return self


def _move(*blocks: int) -> Move:
    return Move(H, 0, remote=tuple((BlockId(block), 7) for block in blocks))


def test_a_poll_copies_so_many_blocks_and_wakes_for_the_rest() -> None:
    """Guards a cancel, and every other transfer, from a chunk of thousands of blocks."""
    pool, landing = Pool(), Landed()
    pulls = Pulls().knows(pool)
    ticket = pulls.recv(PEER, _move(*range(BLOCKS_PER_RUN + 2)), landing)
    assert pulls.poll(10.0) == [] and len(pool.reads) == BLOCKS_PER_RUN
    assert pulls.poll(10.0) == [Completion(ticket, Outcome.DONE)]
    assert landing.order == list(range(BLOCKS_PER_RUN + 2)) == list(landing.bytes[: BLOCKS_PER_RUN + 2])
    pulls.close()


def test_a_block_that_changed_while_it_was_copied_is_refused() -> None:
    """Guards the second look at the generation: the bytes may be half of one sequence, half of another."""
    pulls, landing = Pulls().knows(Pool(renewed=1)), Landed()
    failed = pulls.recv(PEER, _move(0, 1, 2), landing)
    after = pulls.recv(PEER, _move(3), Landed())
    one, other = pulls.poll(10.0)
    assert (one.ticket, one.outcome) == (failed, Outcome.FAILED) and one.error.startswith("StaleBlockError: block 1")
    assert landing.order == [0] and other == Completion(after, Outcome.DONE), "and nobody else's receive"
    pulls.close()


def test_generations_are_compared_block_by_block() -> None:
    pool = Pool()
    expect(pool, [(BlockId(1), 7)])
    with pytest.raises(StaleBlockError, match="block 2 is at generation 7, 6 was offered"):
        expect(pool, [(BlockId(1), 7), (BlockId(2), 6)])


def test_a_cancelled_receive_reads_nothing_more() -> None:
    pool = Pool()
    pulls = Pulls().knows(pool)
    ticket = pulls.recv(PEER, _move(0), Landed())
    assert pulls.cancel(ticket) and not pulls.cancel(ticket)
    assert pulls.poll(0.0) == [Completion(ticket, Outcome.CANCELLED)] and pool.reads == []
    pulls.close()


def test_what_nobody_wants_is_not_read_and_a_lost_peers_receives_fail() -> None:
    pool = Pool()
    pulls = Pulls().knows(pool)
    scrap, wanted = pulls.recv(PEER, _move(0), None), pulls.recv(PEER, _move(1), Landed())
    sent = pulls.send(PEER, Move(H, 0, local=(BlockId(0),)))
    pulls.disconnect(PEER)
    outcomes = {one.ticket: one.outcome for one in pulls.poll(0.0)}
    assert outcomes == {scrap: Outcome.DONE, sent: Outcome.DONE, wanted: Outcome.FAILED} and pool.reads == []
    with pytest.raises(TransferError, match="not connected"):
        pulls.send(PEER, _move())
    pulls.close()

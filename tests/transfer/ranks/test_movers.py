"""Rank 0's side of the movers of several ranks, over real sockets to a rank that a thread plays."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.kv.layout import KVLayout
from engine.storage.paged import PagedKV
from engine.types import Incarnation
from transfer.config import TransferConfig
from transfer.ranks.links import DescribedTo, DescribeTo, FromMover, MoveLink, MoverOpened, OpenMover, ToMover
from transfer.ranks.movers import RankMovers
from transfer.transport import TransferError

LAYOUT = KVLayout(kv_heads=2, layers=1, block_size=4, head_dim=8)
PEERS = [Incarnation(9), Incarnation(10)]


@contextmanager
def opened() -> Iterator[tuple[RankMovers, MoveLink[ToMover]]]:
    """Movers of two ranks without a transport; yields them with the end of the other rank, which has opened its own."""
    here, there = socket.socketpair()
    memory = PagedKV(LAYOUT, 2)
    movers = RankMovers(
        {}, memory, LAYOUT, lambda event: None, [range(1), range(1, 2)], {1: MoveLink(here, FromMover)}
    )
    rank: MoveLink[ToMover] = MoveLink(there, ToMover)
    rank.say(MoverOpened(()))
    movers.open(Incarnation(5), TransferConfig(), "127.0.0.1")
    assert isinstance(rank.hear(), OpenMover)
    try:
        yield movers, rank
    finally:
        there.close()
        here.close()
        memory.close()


def test_an_answer_that_was_not_waited_for_is_nobody_elses() -> None:
    """Guards a peer that is told of one rank what another rank, or the same one of another peer, has said too late."""
    with opened() as (movers, rank):
        with pytest.raises(TransferError, match="rank 1 does not say how it is reached"):
            movers.describe(1, "tcp", PEERS[:1], 0.05)
        late = rank.hear()
        assert isinstance(late, DescribeTo)

        def answer() -> None:
            asked = rank.hear()
            assert isinstance(asked, DescribeTo)
            rank.say(DescribedTo(late.number, ({"port": 1},)))
            rank.say(DescribedTo(asked.number, ({"port": 2},)))

        thread = threading.Thread(target=answer)
        thread.start()
        assert movers.describe(1, "tcp", PEERS[1:], 5.0) == [{"port": 2}]
        thread.join()

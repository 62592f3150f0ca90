"""Rank 0's side of the movers of several ranks, over real sockets to a rank that a thread plays."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.kv.layout import KVLayout
from engine.messages import Endpoint, Handoff
from engine.ranks.sums import set_wait
from engine.storage.paged import PagedKV
from engine.types import BlockId, Incarnation, RequestId
from transfer.config import TransferConfig
from transfer.handoff.commands import Connect, MoverDied, MoverEvent, OutgoingBlock, PostSend, Unreachable
from transfer.handoff.negotiation import Agreement
from transfer.ranks.links import DescribedTo, DescribeTo, FromMover, MoveLink, MoverOpened, OpenMover, Reported, ToMover
from transfer.ranks.movers import RankMovers
from transfer.transport import Move, TransferError

LAYOUT = KVLayout(kv_heads=2, layers=1, block_size=4, head_dim=8)
PEERS = [Incarnation(9), Incarnation(10)]
FEW_BYTES = 8192
SENDS = 50


@contextmanager
def opened(heard: list[MoverEvent], wait_s: float = 0.0) -> Iterator[tuple[RankMovers, MoveLink[ToMover]]]:
    """Movers of two ranks without a transport, whose events go to `heard`; yields them with the end of the other rank,
    which has opened its own. Either end may be ahead of the other by a few frames, rank 0 for `wait_s`."""
    here, there = socket.socketpair()
    for end in (here, there):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FEW_BYTES)
    set_wait(here, wait_s, socket.SO_SNDTIMEO)
    memory = PagedKV(LAYOUT, 2)
    movers = RankMovers({}, memory, LAYOUT, heard.append, [range(1), range(1, 2)], {1: MoveLink(here, FromMover)})
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
    with opened([]) as (movers, rank):
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


def send(movers: RankMovers, sends: int) -> None:
    """Connect with a peer, and send it so many chunks, of which rank 1 has a part each."""
    movers.submit(Connect(PEERS[0], Endpoint(transport="loopback"), Agreement(LAYOUT)))
    blocks = tuple(OutgoingBlock(BlockId(0), 0, at, 4, b"i" * 16) for at in range(16))
    for number in range(sends):
        handoff = Handoff(RequestId(f"r{number}"), 1, 0, PEERS[0], Incarnation(5))
        movers.submit(PostSend(PEERS[0], Move(handoff, 0, (BlockId(0),) * 16), blocks))


def until(heard: list[MoverEvent], kind: type[MoverEvent], wait_s: float) -> MoverEvent | None:
    due_s = time.monotonic() + wait_s
    while time.monotonic() < due_s:
        found = next((event for event in heard if isinstance(event, kind)), None)
        if found is not None:
            return found
        time.sleep(0.002)
    return None


def test_a_rank_is_heard_while_it_takes_no_commands() -> None:
    """Guards two processes that wait for each other: rank 0 tells more than fits between them and hears nothing until
    that is told, and the rank says more than fits before it takes another command."""
    heard: list[MoverEvent] = []
    with opened(heard, wait_s=2.0) as (movers, rank):
        telling = threading.Thread(target=send, args=(movers, SENDS), daemon=True)
        telling.start()
        for _ in range(SENDS):  # far more than fits
            gone = Unreachable(PEERS[1], "it is not there" * 100)
            saying = threading.Thread(target=rank.say, args=(Reported(gone, 0, 0, 0, 0, 0),), daemon=True)
            saying.start()
            saying.join(1.5)
            assert not saying.is_alive(), "rank 0 does not hear, since it waits for the rank to hear"
        telling.join(1.0)
        assert not telling.is_alive(), "who gives a command waits for the rank"
        told = [rank.hear() for _ in range(1 + SENDS)]
        assert isinstance(told[0], Connect)
        sent = [one.move.handoff.request for one in told if isinstance(one, PostSend)]
        assert sent == [f"r{number}" for number in range(SENDS)]
        assert until(heard, Unreachable, 1.0) and not until(heard, MoverDied, 0.0)


def test_a_rank_that_takes_no_commands_ends_the_worker() -> None:
    """Guards commands that are kept for a rank for ever."""
    heard: list[MoverEvent] = []
    with opened(heard, wait_s=0.05) as (movers, _):
        send(movers, SENDS)
        assert until(heard, MoverDied, 5.0) == MoverDied("at rank 1: it takes no commands")


def test_nobody_tells_a_rank_that_has_ended() -> None:
    """Guards a thread that is left of every rank, and an error of one whose end is told by who watches its process."""
    heard: list[MoverEvent] = []
    before = set(threading.enumerate())
    with opened(heard) as (movers, _):
        telling = threading.Thread(target=send, args=(movers, SENDS), daemon=True)
        telling.start()
        telling.join(1.0)
        threads = set(threading.enumerate()) - before
    for thread in threads:
        thread.join(5.0)
    assert threads and not any(thread.is_alive() for thread in threads)
    assert until(heard, MoverDied, 0.0) is None

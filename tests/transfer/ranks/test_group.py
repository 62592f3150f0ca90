"""The parts of blocks between ranks, and one mover made of many."""

import tracemalloc
from typing import Any

import pytest

from engine.kv.layout import KVLayout
from engine.messages import Endpoint, Handoff, RankEndpoint
from engine.types import BlockId, Incarnation, RequestId
from transfer.handoff.commands import (
    CancelRecv,
    CancelSend,
    Connect,
    Disconnect,
    IncomingBlock,
    MoverDied,
    OutgoingBlock,
    Posted,
    PostRecv,
    PostScrap,
    PostSend,
    Received,
    Rows,
    Sent,
    Unreachable,
)
from transfer.handoff.negotiation import MAX_PEER_RANKS, Agreement
from transfer.ranks.group import HeadsPart, MoverGroup, ToRank, heads_of, part_of, parts
from transfer.transport import Move

ME, PEER = Incarnation(5), Incarnation(9)
LAYOUT = KVLayout(kv_heads=6, layers=1, block_size=4, head_dim=8)
READ = Handoff(RequestId("r"), 1, 1, ME, PEER)
SERVED = Handoff(RequestId("r"), 1, 1, PEER, ME)


def even(ranks: int, heads: int = 6) -> list[range]:
    return [range(rank * heads // ranks, (rank + 1) * heads // ranks) for rank in range(ranks)]


def endpoint(heads: list[range], details: int = 1) -> Endpoint:
    told = [
        RankEndpoint(
            first_head=held.start, kv_heads=len(held), details=[{"rank": rank, "for": at} for at in range(details)]
        )
        for rank, held in enumerate(heads)
    ]
    return Endpoint(transport="shm", ranks=told)


def joined(mine: list[range], theirs: list[range], layout: KVLayout = LAYOUT) -> MoverGroup:
    group = MoverGroup(mine)
    group.submit(Connect(PEER, endpoint(theirs), Agreement(layout)))
    return group


def receive(parts: int, seq: int = 0) -> PostRecv:
    block = IncomingBlock((Rows(0, BlockId(3), 0, 4),), 1, 4, b"i", 100, tuple(range(101, 100 + parts)))
    return PostRecv(PEER, Move(READ, seq, remote=((BlockId(7), 1),)), (block,))


def send(seq: int = 0) -> PostSend:
    blocks = (OutgoingBlock(BlockId(7), 1, 0, 4, b"i"), OutgoingBlock(BlockId(8), 1, 1, 4, b"j"))
    return PostSend(PEER, Move(SERVED, seq, (BlockId(7), BlockId(8))), blocks)


@pytest.mark.parametrize("senders", [1, 2, 3, 6])
@pytest.mark.parametrize("receivers", [1, 2, 3, 6])
def test_every_rank_is_sent_each_of_its_heads_once(senders: int, receivers: int) -> None:
    """Guards against a head that nobody sends to a rank which computes with it, or that two send."""
    sent = [list[int]() for _ in range(receivers)]
    for sender, receiver in parts(even(senders), even(receivers)):
        sent[receiver] += sorted(set(even(senders)[sender]) & set(even(receivers)[receiver]))
    assert sent == [list(heads) for heads in even(receivers)]


def test_of_ranks_with_the_same_head_the_lowest_sends_and_all_receive() -> None:
    """Guards against replicas that are filled once for all of them, or by all of them."""
    replicas = [range(1), range(1), range(1, 2), range(1, 2)]
    assert parts(replicas, even(2, 2)) == [HeadsPart(0, 0), HeadsPart(2, 1)]
    assert parts(even(2, 2), replicas) == [HeadsPart(0, 0), HeadsPart(0, 1), HeadsPart(1, 2), HeadsPart(1, 3)]


def test_a_rank_is_told_the_way_to_each_of_the_peers_that_it_meets() -> None:
    """Guards against a rank that greets with another one's token, or takes another one's heads."""
    group = MoverGroup(even(2))
    told: Any = group.submit(Connect(PEER, endpoint(even(3), details=2), Agreement(LAYOUT)))
    assert [(one.rank, one.command.peer) for one in told] == [
        (0, PEER), (0, part_of(PEER, 1)), (1, part_of(PEER, 1)), (1, part_of(PEER, 2)),
    ]  # fmt: skip
    assert [one.command.endpoint.details for one in told] == [
        {"rank": 0, "for": 0}, {"rank": 1, "for": 0}, {"rank": 1, "for": 1}, {"rank": 2, "for": 1},
    ]  # fmt: skip
    assert [one.command.agreement.layout.heads for one in told] == [even(3)[rank] for rank in (0, 1, 1, 2)]
    assert not any(one.command.endpoint.ranks for one in told)


def test_one_pool_and_one_peer_are_passed_on_as_they_are() -> None:
    """Guards against a worker of one rank whose commands cost more, or mean something else, than before."""
    group, connect = MoverGroup([LAYOUT.heads]), Connect(PEER, Endpoint(transport="shm"), Agreement(LAYOUT))
    assert group.is_one
    assert group.passes(send()) and group.passes(receive(1))
    assert not group.passes(receive(2)) and not group.passes(connect)
    for command in (connect, send(), receive(1), CancelSend(SERVED, 0), CancelRecv(READ, 0), Disconnect(PEER)):
        assert group.submit(command) == [ToRank(0, command)]
    for event in (Posted(SERVED, 0, (1, 2)), Sent(SERVED, 0, "", 2.0), Received(READ, 0, "no", 1.0, 0)):
        assert group.heard(0, event) == [event]
    assert group.heard(0, Unreachable(PEER, "gone")) == [Unreachable(PEER, "gone")]
    assert group.is_one
    group.check()


def test_a_mover_is_the_workers_until_something_comes_in_parts_and_when_nothing_does_any_more() -> None:
    """Guards a part of a chunk that is told of as if it were the whole, since it was posted before another peer came or
    ends when its own has gone."""
    group, other = MoverGroup([LAYOUT.heads]), Incarnation(33)
    group.submit(Connect(other, Endpoint(transport="shm"), Agreement(LAYOUT)))
    alone = PostRecv(other, Move(Handoff(RequestId("s"), 1, 1, ME, other), 0), ())
    assert group.is_one and group.submit(alone) == [ToRank(0, alone)]
    group.submit(Connect(PEER, endpoint(even(2)), Agreement(LAYOUT)))
    assert not group.is_one and not group.passes(alone)
    landed = Received(alone.move.handoff, 0, "", 1.0, 4)
    assert group.heard(0, landed) == [landed], "it was rank 0's alone"
    names = [one.command.move.handoff for one in group.submit(receive(2))]  # type: ignore[union-attr]
    group.submit(Disconnect(PEER))
    assert not group.is_one, "both parts are outstanding"
    group.heard(0, Received(names[0], 0, "gone", 0.1, 0))
    assert not group.is_one, "one part is outstanding"
    (ended,) = group.heard(0, Received(names[1], 0, "gone", 0.1, 0))
    assert isinstance(ended, Received) and ended.handoff == READ and group.is_one
    group.check()


def test_a_chunk_has_landed_when_every_part_has() -> None:
    """Guards against heads that are computed with before they are there, and a fence of some ranks only."""
    group = joined(even(3), even(2))
    told: Any = group.submit(receive(4))
    assert [one.rank for one in told] == [0, 1, 1, 2]
    assert [one.command.blocks[0].digest for one in told] == [100, 101, 102, 103]
    names = [one.command.move.handoff for one in told]
    assert len(set(names)) == 4 and not any(one.command.blocks[0].more for one in told)
    for at in (2, 0, 3):
        assert not group.heard(told[at].rank, Received(names[at], 0, "", 0.1 * at, 10))
        group.check()
    assert group.heard(1, Received(names[1], 0, "", 0.1, 10)) == [Received(READ, 0, "", pytest.approx(0.3), 40)]
    group.check()


def test_a_part_that_fails_ends_the_others_and_is_told_when_they_have_ended() -> None:
    """Guards against a chunk that is called broken, and then freed, while other ranks still write to it."""
    group = joined(even(2), even(2))
    first, second = (one.command.move.handoff for one in group.submit(receive(2)))  # type: ignore[union-attr]
    assert group.heard(1, Received(second, 0, "stale", 0.1, 0)) == [ToRank(0, CancelRecv(first, 0))]
    assert group.heard(0, Received(first, 0, "cancelled", 0.1, 0)) == [Received(READ, 0, "at rank 1: stale", 0.1, 0)]


def test_a_chunk_is_offered_with_the_digests_of_all_parts() -> None:
    """Guards against an offer of heads that are not posted yet, and digests of another part or block."""
    group = joined(even(2), even(2))
    first, second = (one.command.move.handoff for one in group.submit(send()))  # type: ignore[union-attr]
    assert not group.heard(1, Posted(second, 0, (21, 22)))
    assert group.heard(0, Posted(first, 0, (11, 12))) == [Posted(SERVED, 0, (11, 12), ((21,), (22,)))]
    assert not group.heard(0, Sent(first, 0, "", 0.1))
    assert group.heard(1, Sent(second, 0, "", 0.2)) == [Sent(SERVED, 0, "", 0.2)]


def test_what_can_never_be_offered_is_not_waited_for() -> None:
    """Guards against a send that waits for ever for a reader who is never told of it, and against a way that is cut for
    all that follows, unheard of."""
    group = joined(even(2), even(2))
    first, second = (one.command.move.handoff for one in group.submit(send()))  # type: ignore[union-attr]
    assert not group.heard(0, Posted(first, 0, (11, 12)))
    told = group.heard(1, Sent(second, 0, "no way", 0.0))
    assert told == [ToRank(0, Disconnect(PEER)), Unreachable(PEER, "a part was not sent: at rank 1: no way")]
    assert group.heard(0, Sent(first, 0, "disconnected", 0.1)) == [Sent(SERVED, 0, "at rank 1: no way", 0.1)]
    group.check()


def test_cancels_and_scraps_go_to_every_part() -> None:
    """Guards against ranks that still write behind a cancel, and bytes on their way to one that nobody takes off."""
    group = joined(even(2), even(2))
    names = [one.command.move.handoff for one in group.submit(receive(2))]  # type: ignore[union-attr]
    assert group.submit(CancelRecv(READ, 0)) == [ToRank(rank, CancelRecv(names[rank], 0)) for rank in (0, 1)]
    told: Any = group.submit(PostScrap(PEER, Move(READ, 1)))
    assert [(one.rank, one.command.peer) for one in told] == [(0, PEER), (1, part_of(PEER, 1))]
    assert [one.command.move.handoff for one in told] == names
    unknown = CancelRecv(READ, 5)
    assert group.submit(unknown) == [ToRank(0, unknown)], "a mover takes no notice of what it does not have"


def test_an_offer_with_too_few_digests_fails() -> None:
    """Guards against parts that are taken unverified from a peer which cuts blocks otherwise."""
    group = joined(even(2), even(2))
    *scraps, ended = group.submit(receive(1))
    assert [type(one.command) for one in scraps] == [PostScrap, PostScrap]  # type: ignore[union-attr]
    assert isinstance(ended, Received) and "1 digests" in ended.error
    group.check()


@pytest.mark.parametrize("heads", [[range(3)], [range(3), range(2, 6)], [range(3, 6), range(3)], [range(0), range(6)]])
def test_ranks_that_have_not_the_heads_of_their_worker_are_refused(heads: list[range]) -> None:
    """Guards against a peer whose ranks leave a head out, or send it twice."""
    with pytest.raises(ValueError, match="do not share out KV heads 0 to 5"):
        heads_of(endpoint(heads), LAYOUT)
    (told,) = MoverGroup(even(2)).submit(Connect(PEER, endpoint(heads), Agreement(LAYOUT)))
    assert isinstance(told, Unreachable) and told.peer == PEER


def test_ranks_cost_by_their_number_and_not_by_that_of_their_heads() -> None:
    """Guards the memory of a worker from a hello of a few hundred bytes."""
    ranks = endpoint([range(1 << 20)] * MAX_PEER_RANKS)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="0 to 1048575") as raised:
            heads_of(ranks, LAYOUT)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20 and len(str(raised.value)) < 200
    finally:
        tracemalloc.stop()


def test_a_rank_whose_peer_or_mover_is_lost_is_the_workers() -> None:
    """Guards against a loss that names a rank's life, which no scheduler knows."""
    group = joined(even(2), even(2))
    assert group.heard(1, Unreachable(part_of(PEER, 1), "cut")) == [Unreachable(PEER, "from rank 1: cut")]
    assert group.heard(1, MoverDied("x")) == [MoverDied("at rank 1: x")]
    assert group.submit(Disconnect(PEER)) == [ToRank(0, Disconnect(PEER)), ToRank(1, Disconnect(part_of(PEER, 1)))]

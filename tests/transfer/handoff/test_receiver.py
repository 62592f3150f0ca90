"""What a receiver reads, and when its target blocks are free, one message at a time. Both sides together are in
test_migration.py and, in any order, in test_migration_machine.py, rows of blocks of another size in test_conversion.py,
every fault in tests/sim."""

from typing import NoReturn

import pytest

from engine.messages import Handoff, Landed, Offer, Stop
from engine.types import Incarnation, RequestId
from tests.transfer.handoff.records import DECODE, PREFILL, H, expected, offer
from transfer.handoff.commands import (
    Arrived,
    Broken,
    CancelRecv,
    Disconnect,
    Emit,
    ExpectedBlock,
    Fenced,
    PostRecv,
    PostScrap,
)
from transfer.handoff.migration import HandoffError
from transfer.handoff.receiver import KVReceiver


def test_the_fence_waits_for_every_own_receive() -> None:
    """Guards the bug family of DESIGN 6: target blocks freed while a copy into them runs."""
    receiver = KVReceiver()
    receiver.expect(H, expected(0, 1, 2))
    receiver.offer(offer(0, 0))
    receiver.offer(offer(1, 1))
    receiver.received(H, 0, "")
    assert receiver.stop(H) == [CancelRecv(H, 1)]
    assert receiver.stop(H) == []
    stop, fenced = receiver.received(H, 1, "cancelled")
    assert stop == Emit(PREFILL, Stop(H))
    assert fenced == Fenced(H, (0,))


def test_a_receive_that_ends_well_after_stop_counts_as_landed() -> None:
    receiver = KVReceiver()
    receiver.expect(H, expected(0, 1))
    receiver.offer(offer(0, 0))
    receiver.stop(H)
    assert receiver.received(H, 0, "") == [Emit(PREFILL, Stop(H)), Fenced(H, (0,))]


def test_nothing_is_read_after_stop() -> None:
    """Guards against a promise broken: after `Stop` the sender reuses its blocks at once."""
    receiver = KVReceiver()
    receiver.expect(H, expected(0, 1))
    receiver.offer(offer(0, 0))
    receiver.stop(H)
    (scrap,) = receiver.offer(offer(1, 1))
    assert isinstance(scrap, PostScrap) and scrap.move.remote == ((101, 7),)
    receiver.received(H, 0, "cancelled")
    scrap, again = receiver.offer(offer(2, 1))
    assert isinstance(scrap, PostScrap) and len(scrap.move.remote) == 1
    assert again == Emit(PREFILL, Stop(H)), "a sender that never heard the first one waits for ever"
    assert receiver.dropped == {"offer: stopped": 1, "offer: unknown handoff": 1}


def test_a_duplicate_offer_posts_nothing() -> None:
    """Guards against a second receive for bytes that come once: the stream would be out of step for good."""
    receiver = KVReceiver()
    receiver.expect(H, expected(0, 1))
    receiver.offer(offer(0, 0))
    assert receiver.offer(offer(0, 0)) == []
    receiver.received(H, 0, "")
    assert receiver.offer(offer(0, 0)) == []
    assert receiver.dropped == {"offer: duplicate": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        offer(1, 9),
        offer(1, 0),
        offer(1, 1, 1),
        offer(1, 1, tokens=3),
        offer(1),
    ],
    ids=["not asked for", "being received", "twice in one chunk", "other length", "empty"],
)
def test_an_offer_of_other_blocks_breaks_the_attempt(wrong: Offer) -> None:
    """Guards against landing what was not asked for, and against waiting for ever for what was."""
    receiver = KVReceiver()
    receiver.expect(H, expected(0, 1))
    receiver.offer(offer(0, 0))
    scrap, broken = receiver.offer(wrong)
    assert isinstance(scrap, PostScrap) and isinstance(broken, Broken)
    assert receiver.stop(H) == [CancelRecv(H, 0)]


def test_a_digest_mismatch_breaks_the_attempt_once() -> None:
    receiver = KVReceiver()
    receiver.expect(H, expected(0, 1, 2))
    receiver.offer(offer(0, 0))
    receiver.offer(offer(1, 1))
    (broken,) = receiver.received(H, 0, "digest mismatch")
    assert isinstance(broken, Broken) and "digest" in broken.why
    assert receiver.received(H, 1, "digest mismatch") == []
    assert receiver.stop(H) == [Emit(PREFILL, Stop(H)), Fenced(H, ())]


def test_a_lost_sender_breaks_its_handoffs_only() -> None:
    receiver = KVReceiver()
    elsewhere = Handoff(RequestId("r"), 1, 2, DECODE, Incarnation(9))
    receiver.expect(H, expected(0))
    receiver.expect(elsewhere, expected(1))
    disconnect, broken = receiver.peer_lost(PREFILL)
    assert disconnect == Disconnect(PREFILL)
    assert isinstance(broken, Broken) and broken.handoff == H
    assert receiver.is_expected(elsewhere)


def test_it_has_arrived_when_the_last_block_has_landed() -> None:
    """Guards a step over blocks that are still on their way: chunks end in any order."""
    receiver = KVReceiver()
    receiver.expect(H, expected(0, 1))
    for seq in (0, 1):
        (post,) = receiver.offer(offer(seq, seq))
        assert isinstance(post, PostRecv) and post.peer == PREFILL and post.blocks[0].digest == 1000 + seq
        receiver.check()
    assert receiver.received(H, 1, "") == [Emit(PREFILL, Landed(H, 1))]
    assert receiver.unfinished == [H]
    assert receiver.received(H, 0, "") == [Emit(PREFILL, Landed(H, 0)), Arrived(H)]
    assert not receiver.is_expected(H)


def test_a_chunk_that_is_right_after_one_that_broke_lands_without_an_arrival() -> None:
    """Guards an attempt that was broken: its scheduler has been told so, and must not hear that it has arrived."""
    receiver = KVReceiver()
    receiver.expect(H, expected(0))
    receiver.offer(offer(0, 0))
    receiver.peer_lost(PREFILL)
    assert receiver.received(H, 0, "") == [Emit(PREFILL, Landed(H, 0))]
    assert receiver.stop(H) == [Emit(PREFILL, Stop(H)), Fenced(H, (0,))]


def test_a_block_that_lands_nowhere_is_not_expected() -> None:
    """Guards bytes that are fetched and thrown away."""
    with pytest.raises(HandoffError, match="at least one"):
        KVReceiver().expect(H, {**expected(0), 1: ExpectedBlock((), b"i" * 16, 4)})


def test_what_is_expected_is_what_was_named_then() -> None:
    """Guards the mapping of a caller that goes on using it."""
    receiver, blocks = KVReceiver(), expected(0)
    receiver.expect(H, blocks)
    blocks.clear()
    (post,) = receiver.offer(offer(0, 0))
    assert isinstance(post, PostRecv)


def test_what_has_landed_is_named_in_order() -> None:
    receiver = KVReceiver()
    receiver.expect(H, expected(1, 2, 8))
    receiver.offer(offer(0, 8))
    receiver.offer(offer(1, 1))
    for seq in (0, 1):
        receiver.received(H, seq, "")
    assert receiver.stop(H) == [Emit(PREFILL, Stop(H)), Fenced(H, (1, 8))]


def test_a_receive_of_an_unknown_handoff_raises() -> None:
    """Guards a transfer thread that writes behind the fence: what it reports must be outstanding."""
    with pytest.raises(HandoffError, match="no receive is outstanding"):
        KVReceiver().received(H, 0, "")


def test_an_offer_looks_at_its_own_blocks_alone() -> None:
    """Guards a worker's streams while a long prompt comes in: each chunk went through all blocks that are expected."""

    class Expected(dict[int, ExpectedBlock]):
        looked = 0

        def __getitem__(self, index: int) -> ExpectedBlock:
            Expected.looked += 1
            return super().__getitem__(index)

        def items(self) -> NoReturn:
            raise AssertionError("all are looked at")

    receiver = KVReceiver()
    receiver.expect(H, expected(*range(100)))
    receiving = receiver._handoffs[H]
    receiving.expected = Expected(receiving.expected)
    for seq in range(50):
        (post,) = receiver.offer(offer(seq, 2 * seq, 2 * seq + 1))
        assert isinstance(post, PostRecv)
    assert Expected.looked <= 4 * 50
    receiver.check()

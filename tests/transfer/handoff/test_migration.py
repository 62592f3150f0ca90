"""The two sides of a handoff, one message at a time: transcripts of what each must say, and when."""

import itertools

import pytest

from engine.messages import BlockOffer, Handoff, Landed, Offer, Stop
from engine.types import BlockId, Incarnation, RequestId
from transfer.handoff.commands import (
    Arrived,
    Broken,
    CancelRecv,
    CancelSend,
    Disconnect,
    Emit,
    ExpectedBlock,
    Fenced,
    OutgoingBlock,
    PostRecv,
    PostScrap,
    PostSend,
    Rows,
    Settled,
)
from transfer.handoff.migration import RECEIVER_TABLE, SENDER_TABLE, HandoffError, R, S
from transfer.handoff.receiver import KVReceiver
from transfer.handoff.sender import KVSender

PREFILL = Incarnation(1)
DECODE = Incarnation(2)
H = Handoff(RequestId("r"), 1, 1, DECODE, PREFILL)
OTHER = Handoff(RequestId("other"), 1, 1, DECODE, PREFILL)


def block(index: int) -> OutgoingBlock:
    return OutgoingBlock(BlockId(100 + index), 7, index, 4, bytes([index]) * 16)


def expected(*indices: int) -> dict[int, ExpectedBlock]:
    return {
        i: ExpectedBlock((Rows(0, BlockId(200 + i), 0, 4),), bytes([i]) * 16, 4) for i in indices
    }


def offer(seq: int, *indices: int, tokens: int = 4) -> Offer:
    blocks = [BlockOffer(BlockId(100 + i), 7, i, tokens, 1000 + i) for i in indices]
    return Offer(H, seq, blocks)


def sender_with(*seqs: int, reads_remotely: bool = True, sent: bool = True) -> KVSender:
    sender = KVSender()
    sender.open(H, reads_remotely)
    for seq in seqs:
        sender.offer(H, [block(seq)])
        sender.posted(H, seq, [1000 + seq])
        if sent:
            sender.sent(H, seq, "")
    return sender


def test_a_handoff_from_end_to_end() -> None:
    """The story of every handoff that goes well."""
    sender, receiver = KVSender(), KVReceiver()
    sender.open(H, reads_remotely=True)
    receiver.expect(H, expected(0, 1))
    (post,) = sender.offer(H, [block(0), block(1)])
    assert isinstance(post, PostSend) and post.move.local == (100, 101)
    (emit,) = sender.posted(H, 0, [1000, 1001])
    assert emit == Emit(DECODE, offer(0, 0, 1))
    assert sender.sent(H, 0, "") == []
    (recv,) = receiver.offer(emit.record)
    assert isinstance(recv, PostRecv)
    assert recv.move.remote == ((100, 7), (101, 7))
    assert [block.rows for block in recv.blocks] == [(Rows(0, 200, 0, 4),), (Rows(0, 201, 0, 4),)]
    landed, arrived = receiver.received(H, 0, "")
    assert landed == Emit(PREFILL, Landed(H, 0)) and arrived == Arrived(H)
    assert sender.landed(landed.record) == []
    assert sender.close(H) == [Settled(H)]
    assert not sender.unsettled and not receiver.unfinished


def test_landed_alone_does_not_settle_an_open_handoff() -> None:
    """Guards against unpinning between two chunks: the next one is still to be offered."""
    sender = sender_with(0)
    assert sender.landed(Landed(H, 0)) == []
    assert sender.is_open(H)


def test_a_close_waits_for_the_last_landed() -> None:
    """Guards against unpinning blocks that the receiver still reads, because prefill is done."""
    sender = sender_with(0, 1)
    assert sender.close(H) == []
    assert sender.landed(Landed(H, 1)) == []
    assert sender.landed(Landed(H, 0)) == [Settled(H)]


def test_a_stop_waits_for_own_sends() -> None:
    """Guards against unpinning blocks that the transfer thread still hashes or writes to a socket."""
    sender = sender_with(0, reads_remotely=False, sent=False)
    assert sender.stop(Stop(H)) == [CancelSend(H, 0)]
    assert sender.sent(H, 0, "") == [Settled(H)]


@pytest.mark.parametrize("reads_remotely", [True, False])
def test_a_chunk_posted_after_stop(reads_remotely: bool) -> None:
    """Bytes on their way must be announced, so that they are drained; a stopped reader must be offered nothing."""
    sender = KVSender()
    sender.open(H, reads_remotely)
    sender.offer(H, [block(0)])
    assert sender.stop(Stop(H)) == ([] if reads_remotely else [CancelSend(H, 0)])
    announced = sender.posted(H, 0, [1000])
    assert announced == ([] if reads_remotely else [Emit(DECODE, offer(0, 0))])
    assert sender.sent(H, 0, "") == [Settled(H)]


def test_a_lost_reader_only_quarantines() -> None:
    """Guards against freeing on a broken channel: a frozen receiver may wake up and read."""
    sender = sender_with(0)
    assert sender.peer_lost(DECODE) == [Disconnect(DECODE)]
    assert sender.quarantined == [H]
    assert sender.close(H) == []
    assert sender.peer_dead(DECODE) == [Disconnect(DECODE), Settled(H)]


def test_a_late_stop_ends_the_quarantine() -> None:
    sender = sender_with(0)
    sender.peer_lost(DECODE)
    assert sender.stop(Stop(H)) == [Settled(H)]


def test_a_lost_peer_of_a_pushing_transport_settles_with_the_last_send() -> None:
    """Guards against quarantining for ever where this side's own completions are the proof."""
    sender = sender_with(0, reads_remotely=False, sent=False)
    assert sender.peer_lost(DECODE) == [Disconnect(DECODE)]
    assert sender.sent(H, 0, "disconnected") == [Settled(H)]


def test_death_waits_for_own_sends() -> None:
    sender = sender_with(0, sent=False)
    assert sender.peer_dead(DECODE) == [Disconnect(DECODE)]
    assert sender.sent(H, 0, "disconnected") == [Settled(H)]


def test_a_send_that_was_never_posted_breaks_the_attempt() -> None:
    sender = KVSender()
    sender.open(H, reads_remotely=True)
    sender.offer(H, [block(0)])
    (broken,) = sender.sent(H, 0, "no route")
    assert isinstance(broken, Broken) and "no route" in broken.why
    assert sender.close(H) == [Settled(H)]


def test_a_send_that_fails_after_its_offer_may_still_be_read() -> None:
    """Guards against taking the end of one's own send for the end of the peer's read."""
    sender = sender_with(0, sent=False)
    (broken,) = sender.sent(H, 0, "failed")
    assert isinstance(broken, Broken)
    assert sender.close(H) == []
    assert sender.stop(Stop(H)) == [Settled(H)]


def test_strange_messages_to_the_sender_are_counted() -> None:
    """Guards against a duplicate or early `Landed` that unpins a block which is being read."""
    sender = sender_with(0)
    sender.offer(H, [block(1)])
    before = repr(sender)
    for message in (Landed(OTHER, 0), Landed(H, 2), Landed(H, -1), Landed(H, 1)):
        assert sender.landed(message) == []
    assert sender.stop(Stop(OTHER)) == []
    assert repr(sender) == before
    assert sum(sender.dropped.values()) == 5
    sender.landed(Landed(H, 0))
    assert sender.landed(Landed(H, 0)) == []
    assert sender.dropped["landed: duplicate"] == 2


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


def test_wrong_local_calls_raise() -> None:
    sender, receiver = sender_with(0), KVReceiver()
    receiver.expect(H, expected(0))
    wrong = [
        lambda: sender.open(H, True),
        lambda: sender.offer(OTHER, [block(0)]),
        lambda: sender.offer(H, []),
        lambda: sender.posted(H, 0, [1]),
        lambda: sender.sent(H, 0, ""),
        lambda: sender.close(OTHER),
        lambda: receiver.expect(H, expected(0)),
        lambda: receiver.expect(OTHER, {}),
        lambda: receiver.received(H, 0, ""),
        lambda: receiver.stop(OTHER),
    ]
    for call in wrong:
        with pytest.raises(HandoffError):
            call()
    sender.stop(Stop(H))
    with pytest.raises(HandoffError):
        sender.offer(H, [block(1)])


def test_the_tables_are_complete_for_what_peers_can_cause() -> None:
    """A peer's message or death must never meet a state without a row (a repeated stop is dropped before)."""
    for state, event in itertools.product(S, ("lost", "dead", "stop")):
        assert (state, event) in SENDER_TABLE or (state, event) == (S.STOPPED, "stop")
    assert (R.OPEN, "break") in RECEIVER_TABLE


def test_repr_tells_the_state() -> None:
    sender = sender_with(0, 1)
    sender.landed(Landed(H, 0))
    assert repr(sender) == "KVSender(r/1.1:open(sending 0, reading 1 of 2))"
    receiver = KVReceiver()
    receiver.expect(H, expected(0, 1))
    receiver.offer(offer(0, 0))
    assert repr(receiver) == "KVReceiver(r/1.1:open(landed 0 of 2 blocks, receiving [0]))"


def test_a_pushed_send_is_withdrawn_when_the_receiver_stops() -> None:
    """Guards a leak: a receiver that stopped before it dialled never takes the bytes, and the send never ends."""
    for remote in (True, False):
        sender = KVSender()
        sender.open(H, reads_remotely=remote)
        sender.offer(H, [block(0)])
        sender.posted(H, 0, (1,))
        commands = sender.stop(Stop(H))
        assert commands == ([] if remote else [CancelSend(H, 0)])
        assert sender.sent(H, 0, "" if remote else "cancelled") == [Settled(H)]

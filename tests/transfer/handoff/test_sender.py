"""When a sender may reuse its source blocks, one message at a time. Both sides together are in test_migration.py and,
in any order, in test_migration_machine.py, whoever holds the blocks in test_source.py, every fault in tests/sim."""

from collections.abc import Callable

import pytest

from engine.messages import Handoff, Landed, Stop
from engine.types import Incarnation
from tests.transfer.handoff.records import DECODE, OTHER, PREFILL, H, block, offer, sender_with
from transfer.handoff.commands import Broken, CancelSend, Command, Disconnect, Emit, PostSend, Settled
from transfer.handoff.migration import HandoffError
from transfer.handoff.sender import KVSender


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


def test_what_a_reader_says_it_does_not_read_is_named() -> None:
    """Guards blocks kept for a reader that came back and knows nothing of them any more."""
    sender = sender_with(0)
    elsewhere = Handoff(H.request, 1, 2, Incarnation(9), PREFILL)
    sender.open(elsewhere, reads_remotely=True)
    assert sender.unclaimed(DECODE, [OTHER]) == [H]
    assert sender.unclaimed(DECODE, [H]) == []
    assert sender.unsettled == [H, elsewhere] and sender.is_open(H)
    sender.check()


def test_what_a_reader_claims_is_gone_through_once() -> None:
    """Guards a worker's streams when a reader comes back: each handoff went through all that it claimed."""

    class Claimed(list[Handoff]):
        searches = 0

        def __contains__(self, handoff: object) -> bool:
            Claimed.searches += 1
            return super().__contains__(handoff)

    sender, handoffs = KVSender(), [Handoff(H.request, number, 0, DECODE, PREFILL) for number in range(9)]
    for handoff in handoffs:
        sender.open(handoff, reads_remotely=True)
    assert sender.unclaimed(DECODE, Claimed(handoffs[:7])) == handoffs[7:]
    assert not Claimed.searches


def test_what_is_sent_is_what_was_offered_then() -> None:
    """Guards the list of a caller that goes on using it."""
    sender, blocks = KVSender(), [block(0)]
    sender.open(H, reads_remotely=True)
    (post,) = sender.offer(H, blocks)
    blocks.clear()
    assert isinstance(post, PostSend) and post.blocks == (block(0),)


@pytest.mark.parametrize(
    "heard",
    [lambda s: s.close(H), lambda s: s.peer_lost(DECODE), lambda s: s.peer_dead(DECODE)],
    ids=["close", "lost", "dead"],
)
def test_a_receiver_that_has_stopped_stays_stopped(heard: Callable[[KVSender], list[Command]]) -> None:
    """Guards a quarantine without an end: it said that it reads no more, whatever else is heard of it."""
    sender = sender_with(0, sent=False)
    assert sender.stop(Stop(H)) == []
    heard(sender)
    assert sender.quarantined == [] and sender.stop(Stop(H)) == []
    assert sender.sent(H, 0, "") == [Settled(H)]


def test_a_closed_handoff_of_a_dead_receiver_is_settled() -> None:
    sender = sender_with(0)
    sender.close(H)
    assert sender.peer_dead(DECODE) == [Disconnect(DECODE), Settled(H)]


def test_a_lost_receiver_stays_lost_when_its_handoff_is_closed() -> None:
    """Guards blocks that are offered to nobody, and a quarantine that is not seen."""
    sender = sender_with(0)
    sender.peer_lost(DECODE)
    assert sender.close(H) == [] and sender.quarantined == [H] and not sender.is_open(H)


def test_the_loss_of_one_reader_is_not_that_of_another() -> None:
    """Guards blocks that are unpinned under a living reader because another one died."""
    sender = sender_with(0)
    assert sender.peer_lost(Incarnation(9)) == [Disconnect(Incarnation(9))]
    assert sender.peer_dead(Incarnation(9)) == [Disconnect(Incarnation(9))]
    assert sender.is_open(H) and sender.quarantined == []


def test_a_chunk_posted_after_the_loss_was_never_offered() -> None:
    """Guards a quarantine for what its reader never heard of."""
    sender = KVSender()
    sender.open(H, reads_remotely=True)
    sender.offer(H, [block(0)])
    sender.peer_lost(DECODE)
    assert sender.posted(H, 0, [1000]) == []
    assert sender.sent(H, 0, "") == [Settled(H)]


def test_a_pushed_chunk_whose_send_failed_is_read_by_nobody() -> None:
    """Guards blocks kept for a `Landed` that cannot come: on a wire the bytes end with the send."""
    sender = sender_with(0, reads_remotely=False, sent=False)
    (broken,) = sender.sent(H, 0, "the wire is cut")
    assert isinstance(broken, Broken)
    assert sender.close(H) == [Settled(H)]


def test_only_the_sends_that_still_run_are_withdrawn() -> None:
    sender = sender_with(0, reads_remotely=False)
    sender.offer(H, [block(1)])
    assert sender.stop(Stop(H)) == [CancelSend(H, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda s: s.posted(H, 0, [1000]),
        lambda s: s.posted(H, 1, [1, 2]),
        lambda s: s.posted(H, 2, [1000]),
        lambda s: s.posted(H, -1, [1000]),
        lambda s: s.sent(H, 1, ""),
    ],
    ids=["posted twice", "a digest too many", "no such chunk", "none before the first", "sent, but never posted"],
)
def test_what_the_transfer_thread_cannot_have_done_raises(wrong: Callable[[KVSender], list[Command]]) -> None:
    """Guards blocks that are unpinned, or offered with another's digest, on a wrong answer of the transfer thread."""
    sender = sender_with(0, sent=False)
    sender.offer(H, [block(1)])
    with pytest.raises(HandoffError):
        wrong(sender)


def test_a_closed_handoff_is_offered_nothing() -> None:
    """Guards blocks behind the first token's count of chunks: its reader would never ask for them."""
    sender = sender_with(0)
    sender.close(H)
    with pytest.raises(HandoffError, match="offer while closed"):
        sender.offer(H, [block(1)])

"""The two sides of a handoff, one message at a time: transcripts of what each must say, and when. Each side alone is in
test_sender.py and test_receiver.py, both over a bad wire in test_migration_machine.py, over every transport in
tests/transfer/test_mover.py, with every fault in tests/sim."""

import itertools

import pytest

from engine.messages import Landed, Stop
from tests.transfer.handoff.records import DECODE, OTHER, PREFILL, H, block, expected, offer, sender_with
from transfer.handoff.commands import Arrived, Emit, PostRecv, PostSend, Rows, Settled
from transfer.handoff.migration import RECEIVER_TABLE, SENDER_TABLE, HandoffError, R, S
from transfer.handoff.receiver import KVReceiver
from transfer.handoff.sender import KVSender


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

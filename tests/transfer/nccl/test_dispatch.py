"""What one end launches because the other says so. Pieces packed ahead are in test_packing.py, the order of pieces in
test_pair.py, faults of every call in test_transport.py, puts in test_ring.py."""

import time

import pytest

from tests.transfer.nccl.ends import LAYOUT, QUICK, Ends
from transfer.nccl.dispatch import PieceDispatcher
from transfer.nccl.peer import NcclPeer
from transfer.nccl.wire import Go, Grant
from transfer.transport import BlockSlice, TransferError


def _follower(ends: Ends) -> tuple[PieceDispatcher, NcclPeer]:
    """The end that follows, of a pair that is warm and at rest, and what it knows of its leader."""
    leader, follower = ends.pair(1, 2)
    ends.until(lambda: leader.transport.report.built == follower.transport.report.built == 1)
    dispatch, peer = follower.transport._dispatch, follower.transport._peers[leader.me]
    assert dispatch.busy is None and not dispatch.is_waiting and not peer.pair.leads
    return dispatch, peer


@pytest.mark.parametrize(
    "go", [Go(9, True, 0, 0, 0), Go(1, True, 5, 0, LAYOUT.block_bytes)], ids=["another communicator", "no chunk here"]
)
def test_a_call_for_what_is_not_there_costs_the_pair(ends: Ends, go: Go) -> None:
    """Guards an operation that one end alone has launched: it would wait in a kernel until its limit."""
    dispatch, peer = _follower(ends)
    dispatch.call(peer, go)
    assert dispatch.is_called_by(peer)
    told: list[str] = []

    def guarded(peer, call, now):  # type: ignore[no-untyped-def]
        try:
            return bool(call(peer, now))
        except TransferError as error:
            told.append(str(error))
            return True

    dispatch.step(time.monotonic(), {}, guarded)
    assert len(told) == 1 and dispatch.busy is None and not dispatch.is_called_by(peer)


def test_a_grant_that_nobody_asked_for_is_refused(ends: Ends) -> None:
    dispatch, peer = _follower(ends)
    with pytest.raises(TransferError, match="is for nothing that this end does"):
        dispatch.granted(peer, Grant(1, 0))


def test_calls_of_a_lost_pair_are_forgotten(ends: Ends) -> None:
    """Guards the next life of the pair from what the leader has said in this one."""
    dispatch, peer = _follower(ends)
    assert peer.communicator is not None
    dispatch.call(peer, Go(1, True, 0, 0, LAYOUT.block_bytes))
    communicator, peer.communicator = peer.communicator, None
    dispatch.abort(peer, communicator, time.monotonic())
    assert not dispatch.is_called_by(peer)


def test_slots_are_for_the_largest_peer(ends: Ends) -> None:
    """Guards the device memory that is promised to be enough: four pieces, whoever comes later with less."""
    dispatch, peer = _follower(ends)
    part = BlockSlice(0, LAYOUT.head_bytes, LAYOUT.block_bytes)
    assert dispatch.reserve(peer.sent, peer.received) == dispatch.reserve(part, part) == 4 * QUICK.piece_bytes

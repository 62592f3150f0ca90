"""The nccl transport with its peer in another process that is killed, frozen, or ends in the middle of a call."""

import time

import pytest

from tests.transfer.conftest import RECEIVER, ProcessPeer, Rig, RigFactory
from tests.transfer.fake_device import STALL, TESTS, count
from tests.transfer.nccl.far import (
    BLOCKS,
    FREED_S,
    Pattern,
    begun,
    far_rig,
    is_lost_when_frozen,
    is_lost_when_it_ends_in,
    is_lost_when_killed,
    sender_of,
    still_works,
)
from transfer.transport import Outcome


@pytest.fixture
def far(make_rig: RigFactory) -> Rig:
    return far_rig(make_rig, make_rig.spares, 3)


def stuck(rig: Rig, victim: ProcessPeer) -> int:
    """A transfer in whose middle the sender's half of an operation does not start: nothing but that is under way."""
    victim._ask("script", "settle", STALL, -1, 6)
    ticket = begun(rig, victim)

    def is_stuck() -> bool:
        landed = [rig.is_poisoned(block) for block in range(BLOCKS)]
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:
            rig.turn()
        return count("running") == 1 and landed == [rig.is_poisoned(block) for block in range(BLOCKS)]

    rig.until(is_stuck)
    return ticket


def test_the_peer_is_killed_in_the_middle(far: Rig, pattern: Pattern) -> None:
    """Guards against a survivor that spins for ever: within a node, the library does not tell of a dead peer."""
    victim, other = sender_of(far), sender_of(far)
    is_lost_when_killed(far, victim, begun(far, victim))
    still_works(far, other, pattern)


def test_the_peer_is_killed_with_a_piece_packed_ahead(far: Rig, pattern: Pattern) -> None:
    """Guards the time between packing and launching: the next piece is in its slot, and not called for."""
    victim, other = sender_of(far), sender_of(far)
    ticket = stuck(far, victim)
    told = victim._ask("packing")
    assert "blocks of send 0" in str(told), f"nothing was packed ahead: {told}"
    left = [block for block in range(BLOCKS) if far.is_poisoned(block)]
    is_lost_when_killed(far, victim, ticket)
    assert left and all(far.is_poisoned(block) for block in left)
    still_works(far, other, pattern)


def test_the_peer_freezes_in_the_middle(far: Rig, pattern: Pattern) -> None:
    """A frozen process closes no socket: the limit of the operation is what frees the survivor. Thawed, it is told."""
    victim, other = sender_of(far), sender_of(far)
    ticket = stuck(far, victim)
    took_s = is_lost_when_frozen(far, victim, other, ticket, pattern)
    assert TESTS.limit_s - 1.5 < took_s < TESTS.limit_s + FREED_S


@pytest.mark.parametrize("verb", ["id", "init", "async", "group", "send", "recv"])
def test_the_peer_ends_in_a_call(far: Rig, pattern: Pattern, verb: str) -> None:
    is_lost_when_it_ends_in(far, verb, {"send": 1, "async": 2}.get(verb, 0), pattern)


def test_one_operation_at_a_time(far: Rig) -> None:
    """Guards the order that keeps workers from waiting for each other in kernels (`transfer.nccl.lane`)."""
    peers = [far.peer() for _ in range(3)]
    tickets = []
    for n, peer in enumerate(peers):
        peer.fill({block: block for block in range(10)})
        peer.send(RECEIVER, "r", 0, list(range(10)))
        targets = [10 * n + block for block in range(10)]
        tickets.append(far.recv(peer, "r", 0, [(block, 0) for block in range(10)], targets))
    assert all(far.outcome(ticket) is Outcome.DONE for ticket in tickets)
    assert count("most") == 1

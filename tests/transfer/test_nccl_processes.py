"""The nccl transport with its peer in another process that is killed, frozen, or ends in the middle of a call."""

import os
import signal
import time
from typing import Any

import pytest

from engine.messages import Endpoint
from engine.types import Incarnation
from tests.transfer.conftest import LARGE, ProcessPeer, Rig, RigFactory, end, spawn
from tests.transfer.fake_device import DIE, STALL, TESTS, count, fake
from tests.transfer.wire import whole
from transfer.transport import Outcome

FREED_S = 1.0
"""DESIGN: how soon the survivor is free once the loss is detected, here by the end of the socket."""


@pytest.fixture
def far(make_rig: RigFactory) -> Rig:
    """A receiver whose senders are processes; 720 KiB blocks, so that transfers take a while."""
    fake().fake_reset()
    # A process takes seconds to start, in which the rig does not poll: all are up before any is met.
    spares = make_rig.spares
    spares += [spawn() for _ in range(3 - len(spares))]
    me = Incarnation(999)
    for peer in [ProcessPeer("nccl", me, LARGE, 1, spares, "cpu") for _ in range(3)]:
        peer.close()
    return make_rig("nccl", LARGE, 32, in_process=False)


def begun(rig: Rig, peer: Any) -> int:
    """A transfer that has landed its first block, and is not over."""
    rig.poison()
    peer.fill({block: block + 1 for block in range(30)})
    peer.send(2**64 - 5, "r", 0, list(range(30)))
    ticket = rig.recv(peer, "r", 0, [(block, 0) for block in range(30)], list(range(30)))
    rig.until(lambda: not rig.is_poisoned(0))
    assert ticket not in rig.ended, "it is over: nothing is shown"
    return ticket


def is_stuck(rig: Rig) -> bool:
    """Nothing but one operation has been under way for a while."""
    landed = [rig.is_poisoned(block) for block in range(30)]
    end_s = time.monotonic() + 0.2
    while time.monotonic() < end_s:
        rig.turn()
    return count("running") == 1 and landed == [rig.is_poisoned(block) for block in range(30)]


def still_works(rig: Rig, peer: Any, pattern: Any) -> None:
    peer.fill({0: 77})
    peer.send(2**64 - 5, "after", 0, [0])
    ticket = rig.recv(peer, "after", 0, [(0, 0)], [31])
    assert rig.outcome(ticket) is Outcome.DONE
    assert rig.bytes_of(31) == pattern(77, rig.layout.block_bytes)


def test_the_peer_is_killed_in_the_middle(far: Rig, pattern: Any) -> None:
    """Guards against a survivor that spins for ever: within a node, the library does not tell of a dead peer."""
    victim, other = far.peer(), far.peer()
    assert isinstance(victim, ProcessPeer)
    ticket = begun(far, victim)
    victim.process.kill()
    victim.process.wait()
    began_s = time.monotonic()
    assert far.outcome(ticket) is Outcome.LOST
    assert time.monotonic() - began_s < FREED_S
    assert "connection lost" in far.ended[ticket].error
    far.until(lambda: count("running") == 0)
    assert time.monotonic() - began_s < FREED_S, "kernels of the aborted communicator run on"
    still_works(far, other, pattern)


def test_the_peer_freezes_in_the_middle(far: Rig, pattern: Any) -> None:
    """A frozen process closes no socket: the limit of the operation is what frees the survivor. Thawed, it is told."""
    victim, other = far.peer(), far.peer()
    assert isinstance(victim, ProcessPeer)
    # Its half of an operation does not start, so that it is surely in the middle of one when it freezes.
    victim._ask("script", "settle", STALL, -1, 6)
    ticket = begun(far, victim)
    far.until(lambda: is_stuck(far))
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        assert far.outcome(ticket) is Outcome.LOST
        took_s = time.monotonic() - began_s
        assert TESTS.limit_s - 1.5 < took_s < TESTS.limit_s + FREED_S
        left = [block for block in range(30) if far.is_poisoned(block)]
        assert left, "all had landed: nothing is shown"
        still_works(far, other, pattern)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    for _ in range(100):
        far.turn()
    assert all(far.is_poisoned(block) for block in left), "the thawed peer's bytes landed"


@pytest.mark.parametrize("verb", ["id", "init", "async", "group", "send", "recv"])
def test_the_peer_ends_in_a_call(far: Rig, pattern: Any, verb: str) -> None:
    """The peer leads: it makes the communicator, warms it up and sends."""
    other = far.peer()
    victim = ProcessPeer("nccl", Incarnation(1001), far.layout, far.blocks, far.spares, "cpu")
    skip = {"send": 1, "async": 2}.get(verb, 0)
    victim._ask("script", verb, DIE, -1, skip)
    far.peers.append(victim)
    far.connect(victim.me, Endpoint(transport="nccl", details=victim.details))
    every = whole(far.layout)
    victim.connect(2**64 - 5, dict(far.transport.describe().details), (every, every))
    ticket = far.recv(victim, "r", 0, [(0, 0)], [3])
    if verb == "send":
        victim.fill({0: 1})
        victim.send(2**64 - 5, "r", 0, [0])
    far.until(lambda: victim.process.poll() is not None)
    assert victim.process.returncode == 9, "the fault did not take effect"
    began_s = time.monotonic()
    assert far.outcome(ticket) is Outcome.LOST
    assert time.monotonic() - began_s < FREED_S
    still_works(far, other, pattern)
    end(victim.process)


def test_one_operation_at_a_time(far: Rig) -> None:
    """Guards the order that keeps workers from waiting for each other in kernels (`transfer.nccl_lane`)."""
    peers = [far.peer() for _ in range(3)]
    tickets = []
    for n, peer in enumerate(peers):
        peer.fill({block: block for block in range(10)})
        peer.send(2**64 - 5, "r", 0, list(range(10)))
        targets = [10 * n + block for block in range(10)]
        tickets.append(far.recv(peer, "r", 0, [(block, 0) for block in range(10)], targets))
    assert all(far.outcome(ticket) is Outcome.DONE for ticket in tickets)
    assert count("most") == 1

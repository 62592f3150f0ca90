"""A receiver over nccl whose senders are processes: what is done to them in the tests of sends and in those of puts."""

import os
import signal
import time
from collections.abc import Callable

from engine.messages import Endpoint
from engine.types import Incarnation
from tests.transfer.conftest import (
    LARGE,
    RECEIVER,
    Process,
    ProcessPeer,
    Rig,
    RigFactory,
    end,
    spawn,
)
from tests.transfer.fake_device import DIE, count, fake
from tests.transfer.wire import whole
from transfer.transport import Outcome

FREED_S = 1.0
"""DESIGN: how soon the survivor is free once the loss is detected, here by the end of the socket."""
BLOCKS = 30
Pattern = Callable[[int, int], bytes]


def far_rig(make_rig: RigFactory, spares: list[Process], processes: int) -> Rig:
    """720 KiB blocks, so that transfers take a while. A process takes seconds to start, in which the rig does not poll:
    all are up before any is met. One more starts meanwhile, for the next test to have in the place of a victim."""
    fake().fake_reset()
    spares[:0] = [spawn() for _ in range(processes + 1 - len(spares))]
    for peer in [ProcessPeer("nccl", Incarnation(999), LARGE, 1, spares, "cpu") for _ in range(processes)]:
        peer.close()
    return make_rig("nccl", LARGE, 32, in_process=False)


def sender_of(rig: Rig) -> ProcessPeer:
    peer = rig.peer()
    assert isinstance(peer, ProcessPeer)
    return peer


def begun(rig: Rig, peer: ProcessPeer) -> int:
    """A transfer that has landed its first block, and is not over."""
    rig.poison()
    peer.fill({block: block + 1 for block in range(BLOCKS)})
    peer.send(RECEIVER, "r", 0, list(range(BLOCKS)))
    ticket = rig.recv(peer, "r", 0, [(block, 0) for block in range(BLOCKS)], list(range(BLOCKS)))
    rig.until(lambda: not rig.is_poisoned(0))
    assert ticket not in rig.ended, "it is over: nothing is shown"
    return ticket


def still_works(rig: Rig, peer: ProcessPeer, pattern: Pattern) -> None:
    peer.fill({0: 77})
    peer.send(RECEIVER, "after", 0, [0])
    ticket = rig.recv(peer, "after", 0, [(0, 0)], [31])
    assert rig.outcome(ticket) is Outcome.DONE
    assert rig.bytes_of(31) == pattern(77, rig.layout.block_bytes)


def is_lost_when_killed(rig: Rig, victim: ProcessPeer, ticket: int) -> None:
    """The receive ends in time, and nothing of the aborted communicator runs on."""
    victim.process.kill()
    victim.process.wait()
    began_s = time.monotonic()
    assert rig.outcome(ticket) is Outcome.LOST
    assert time.monotonic() - began_s < FREED_S
    assert "connection lost" in rig.ended[ticket].error
    rig.until(lambda: count("running") == 0)
    assert time.monotonic() - began_s < FREED_S, "kernels of the aborted communicator run on"


def is_lost_when_frozen(
    rig: Rig, victim: ProcessPeer, other: ProcessPeer, ticket: int, pattern: Pattern
) -> float:
    """What had not landed before never does, not even when the sender is thawed. How long the receive lived on."""
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        assert rig.outcome(ticket) is Outcome.LOST
        took_s = time.monotonic() - began_s
        left = [block for block in range(BLOCKS) if rig.is_poisoned(block)]
        assert left, "all had landed: nothing is shown"
        still_works(rig, other, pattern)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    for _ in range(100):
        rig.turn()
    assert all(rig.is_poisoned(block) for block in left), "the thawed peer's bytes landed"
    return took_s


def is_lost_when_it_ends_in(rig: Rig, verb: str, skip: int, pattern: Pattern) -> None:
    """A sender that leads, and ends inside a call: it makes the communicator, warms it up and sends."""
    other = sender_of(rig)
    victim = ProcessPeer("nccl", Incarnation(1001), rig.layout, rig.blocks, rig.spares, "cpu")
    victim._ask("script", verb, DIE, -1, skip)
    rig.peers.append(victim)
    rig.connect(victim.me, Endpoint(transport="nccl", details=victim.details))
    every = whole(rig.layout)
    victim.connect(RECEIVER, dict(rig.transport.describe(victim.me).details), (every, every))
    ticket = rig.recv(victim, "r", 0, [(0, 0)], [3])
    if verb == "send":
        victim.fill({0: 1})
        victim.send(RECEIVER, "r", 0, [0])
    rig.until(lambda: victim.process.poll() is not None)
    assert victim.process.returncode == 9, "the fault did not take effect"
    began_s = time.monotonic()
    assert rig.outcome(ticket) is Outcome.LOST
    assert time.monotonic() - began_s < FREED_S
    still_works(rig, other, pattern)
    end(victim.process)

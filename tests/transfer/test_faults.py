"""Peers that freeze, die or lie, and what each transport leaves behind. Every fault proves that it took effect."""

import gc
import os
import resource
import select
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from engine.messages import Endpoint, Handoff
from engine.types import BlockId, Incarnation, RequestId
from tests.transfer.wire import whole
from transfer.host.shm import ShmTransport
from transfer.host.tcp.door import MAX_STRANGERS
from transfer.host.tcp.transport import TcpTransport
from transfer.transport import Move, Outcome, TransferError

ME = 2**64 - 5
LATE_TURNS = 100


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def open_files() -> int:
    gc.collect()  # what an earlier test left in a cycle may hold some
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["shm", "tcp", "cuda_ipc", "nccl"])
def test_a_frozen_peer_holds_up_nobody(
    make_rig: Any, large_layout: Any, pattern: Any, kind: str
) -> None:
    """Guards against a transfer thread that waits for one peer, and against writes after a cancel when it wakes up."""
    rig = make_rig(kind, large_layout, 8, in_process=False)
    frozen, well = rig.peer(), rig.peer()
    rig.poison()
    frozen.fill({0: 1, 1: 2})
    well.fill({0: 3})
    size = large_layout.block_bytes
    # Connected and in the middle of a stream when it freezes.
    frozen.send(ME, "first", 0, [1])
    assert rig.outcome(rig.recv(frozen, "first", 0, [(1, 0)], [7])) is Outcome.DONE
    os.kill(frozen.process.pid, signal.SIGSTOP)
    try:
        rig.until(lambda: process_state(frozen.process.pid) == "T")
        stuck = rig.recv(frozen, "stuck", 0, [(0, 0)], [0])
        well.send(ME, "well", 0, [0])
        assert rig.outcome(rig.recv(well, "well", 0, [(0, 0)], [1])) is Outcome.DONE
        assert rig.bytes_of(1) == pattern(3, size)
        if rig.transport.reads_remotely:
            # Its memory can be read without its help.
            assert rig.outcome(stuck) is Outcome.DONE
            return
        assert stuck not in rig.ended
        assert rig.transport.cancel(stuck)
        assert rig.outcome(stuck) is Outcome.CANCELLED
    finally:
        os.kill(frozen.process.pid, signal.SIGCONT)
    frozen.send(ME, "stuck", 0, [0])
    frozen.send(ME, "next", 0, [1])
    assert rig.outcome(rig.recv(frozen, "next", 0, [(1, 0)], [2])) is Outcome.DONE
    assert rig.is_poisoned(0)
    assert rig.bytes_of(2) == pattern(2, size)


def test_a_killed_peer_tcp(make_rig: Any) -> None:
    """Guards against a receive that waits for ever for a dead sender."""
    rig = make_rig("tcp", in_process=False)
    peer = rig.peer()
    peer.fill({0: 1})
    peer.send(ME, "r", 0, [0])
    assert rig.outcome(rig.recv(peer, "r", 0, [(0, 0)], [1])) is Outcome.DONE
    waiting = rig.recv(peer, "r", 1, [(0, 0)], [2])
    peer.process.kill()
    peer.process.wait()
    assert rig.outcome(waiting) is Outcome.LOST
    assert rig.outcome(rig.recv(peer, "r", 2, [(0, 0)], [2])) is Outcome.LOST


def test_a_killed_peer_shm(make_rig: Any, pattern: Any) -> None:
    """What was offered can still be read out of a dead peer's memory; a new mapping of it cannot be had."""
    rig = make_rig("shm", in_process=False)
    peer = rig.peer()
    peer.fill({0: 1})
    peer.process.kill()
    peer.process.wait()
    assert rig.outcome(rig.recv(peer, "r", 0, [(0, 0)], [2])) is Outcome.DONE
    assert rig.bytes_of(2) == pattern(1, rig.layout.block_bytes)
    with pytest.raises(TransferError, match="cannot open"):
        rig.connect(peer.me, Endpoint(transport="shm", details=peer.details))


def test_a_killed_receiver_ends_the_sends(make_rig: Any) -> None:
    """Guards against source blocks that stay pinned for a tcp reader that is gone (its socket is closed)."""
    rig = make_rig("tcp")
    peer = rig.peer()
    peer.fill({0: 1})
    peer.send(ME, "r", 0, [0])
    assert rig.outcome(rig.recv(peer, "r", 0, [(0, 0)], [1])) is Outcome.DONE
    rig.transport.disconnect(peer.me)
    rig.until(lambda: len(peer.completions) == 1)
    peer.send(ME, "r", 1, [0])
    peer.pump()
    peer.transport.disconnect(ME)
    rig.until(lambda: len(peer.completions) == 2)
    assert [c.outcome for c in peer.completions] == [Outcome.DONE, Outcome.FAILED]


@pytest.mark.parametrize("wrong", ["inode", "blocks", "fd", "pid"])
def test_a_recycled_pid_or_descriptor_is_noticed(make_rig: Any, wrong: str) -> None:
    """Guards against reading some other process's memory because a number was used again."""
    rig = make_rig("shm")
    peer = rig.peer()
    details = dict(peer.details)
    details[wrong] = {"inode": details["inode"] + 1, "blocks": 9999, "fd": 0, "pid": 1}[wrong]
    with pytest.raises(TransferError):
        rig.connect(peer.me, Endpoint(transport="shm", details=details))


def test_the_peers_memory_is_mapped_read_only(make_rig: Any) -> None:
    """Guards DESIGN 6: only the process that owns a pool can write to it."""
    rig = make_rig("shm", in_process=False)
    peer = rig.peer()
    inode = str(peer.details["inode"])
    maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if inode in line.split()
    ]
    assert maps and all(line.split()[1] == "r--s" for line in maps)


@pytest.mark.parametrize("source", [-1, 64, 2**40])
@pytest.mark.parametrize("kind", ["loopback", "shm"])
def test_a_block_the_peer_does_not_have(make_rig: Any, kind: str, source: int) -> None:
    """Guards against reading beyond a pool: numpy would take -1 for the last block."""
    rig = make_rig(kind)
    peer = rig.peer()
    assert rig.outcome(rig.recv(peer, "r", 0, [(source, 0)], [1])) is Outcome.FAILED


def test_a_cancel_in_the_middle_of_a_block(make_rig: Any, large_layout: Any, pattern: Any) -> None:
    """Guards against the rest of a large block that lands after the proof."""
    rig = make_rig("tcp", large_layout, 64)
    peer = rig.peer()
    rig.poison()
    peer.fill({block: block for block in range(64)})
    peer.send(ME, "gone", 0, list(range(40)))
    gone = rig.recv(peer, "gone", 0, [(b, 0) for b in range(40)], list(range(40)))
    rig.until(lambda: not rig.is_poisoned(0))
    assert gone not in rig.ended
    assert rig.transport.cancel(gone)
    frozen = [rig.bytes_of(block) for block in range(40)]
    assert frozen[39] != pattern(39, large_layout.block_bytes)
    peer.send(ME, "kept", 0, [5])
    assert rig.outcome(rig.recv(peer, "kept", 0, [(5, 0)], [50])) is Outcome.DONE
    assert [rig.bytes_of(block) for block in range(40)] == frozen
    assert rig.bytes_of(50) == pattern(5, large_layout.block_bytes)


@pytest.mark.parametrize("begun", [False, True])
def test_a_withdrawn_send(make_rig: Any, large_layout: Any, pattern: Any, begun: bool) -> None:
    """Guards against a withdrawn chunk that is taken for a whole one, and against a stream out of step after it."""
    rig = make_rig("tcp", large_layout, 64)
    peer = rig.peer()
    rig.poison()
    peer.fill({block: block for block in range(64)})
    move = Move(rig.handoff(peer, "gone"), 0, tuple(range(40)))
    ticket = peer.transport.send(ME, move)
    gone = rig.recv(peer, "gone", 0, [(b, 0) for b in range(40)], list(range(40)))
    if begun:
        rig.until(lambda: not rig.is_poisoned(0))
    assert peer.transport.cancel(ticket)
    peer.send(ME, "kept", 0, [5])
    kept = rig.recv(peer, "kept", 0, [(5, 0)], [50])
    assert rig.outcome(gone) is Outcome.FAILED
    assert "withdrew" in rig.ended[gone].error
    assert rig.outcome(kept) is Outcome.DONE
    assert rig.bytes_of(50) == pattern(5, large_layout.block_bytes)
    assert next(c.outcome for c in peer.completions) is Outcome.CANCELLED


def test_a_large_backlog_never_blocks(make_rig: Any, large_layout: Any, pattern: Any) -> None:
    """Guards against a send that waits for a receiver which has posted nothing yet."""
    rig = make_rig("tcp", large_layout, 16)
    peer = rig.peer()
    peer.fill({block: block for block in range(16)})
    for seq in range(64):
        peer.send(ME, "r", seq, [seq % 16])
    for _ in range(LATE_TURNS):
        peer.pump()
    tickets = [rig.recv(peer, "r", seq, [(seq % 16, 0)], [seq % 16]) for seq in range(64)]
    assert all(rig.outcome(ticket) is Outcome.DONE for ticket in tickets)
    assert all(rig.bytes_of(b) == pattern(b, large_layout.block_bytes) for b in range(16))


def test_bytes_nobody_waits_for_yet_do_not_spin(make_rig: Any, large_layout: Any) -> None:
    """Guards against a thread that runs hot while an early chunk waits in the socket for its receive."""
    rig = make_rig("tcp", large_layout, 8)
    peer = rig.peer()
    peer.send(ME, "r", 0, [0])
    assert rig.outcome(rig.recv(peer, "r", 0, [(0, 0)], [0])) is Outcome.DONE
    peer.send(ME, "r", 1, [1])
    for _ in range(LATE_TURNS):
        peer.pump()
    import select

    poller = select.poll()
    poller.register(rig.transport.fileno(), select.POLLIN)
    assert not poller.poll(20)
    assert rig.outcome(rig.recv(peer, "r", 1, [(1, 0)], [1])) is Outcome.DONE


def test_a_frame_that_is_not_the_next_one(make_rig: Any) -> None:
    """Guards against bytes of one chunk that land in the blocks of another, when the ends disagree on the order."""
    rig = make_rig("tcp")
    peer = rig.peer()
    rig.poison()
    peer.fill({0: 1})
    peer.send(ME, "other", 0, [0])
    assert rig.outcome(rig.recv(peer, "r", 0, [(0, 0)], [1])) is Outcome.LOST
    assert rig.is_poisoned(1)


def test_a_stranger_gets_nothing(make_rig: Any) -> None:
    """Guards against anybody who finds the port and reads other people's prompts out of the KV blocks."""
    rig = make_rig("tcp")
    peer = rig.peer()
    details = {**peer.details, "key": "00" * 32}
    rig.connect(peer.me, Endpoint(transport="tcp", details=details))
    peer.send(ME, "r", 0, [0])
    rig.poison()
    assert rig.outcome(rig.recv(peer, "r", 0, [(0, 0)], [1])) is Outcome.LOST
    assert rig.is_poisoned(1) and not peer.completions


def test_silent_strangers_do_not_pile_up(make_rig: Any) -> None:
    """Guards against a port scanner that uses up the worker's descriptors, or keeps true peers out."""
    rig = make_rig("tcp")
    peer = rig.peer()
    peer.fill({0: 1})
    address = (peer.details["host"], peer.details["port"])
    before = open_files()
    strangers = []
    for _ in range(MAX_STRANGERS + 30):
        strangers.append(socket.create_connection(address))
        peer.pump()
    for _ in range(LATE_TURNS):
        peer.pump()
    try:
        assert open_files() - before <= len(strangers) + MAX_STRANGERS
        peer.send(ME, "r", 0, [0])
        assert rig.outcome(rig.recv(peer, "r", 0, [(0, 0)], [1])) is Outcome.DONE
    finally:
        for stranger in strangers:
            stranger.close()


def test_without_a_free_descriptor_the_door_stays_open(make_rig: Any) -> None:
    """Guards against a flood of connections that ends the worker, or spins its thread, when descriptors run out."""
    rig = make_rig("tcp")
    peer = rig.peer()
    peer.fill({0: 1})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as stranger:
        stranger.setblocking(False)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, limits[1]))
        taken: list[int] = []
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.dup(stranger.fileno()))
            stranger.connect_ex((peer.details["host"], peer.details["port"]))
            peer.pump()
            assert not select.select([peer.transport.fileno()], [], [], 0)[0], "it would be woken for ever"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in taken:
                os.close(fd)
    peer.send(ME, "r", 0, [0])
    assert rig.outcome(rig.recv(peer, "r", 0, [(0, 0)], [1])) is Outcome.DONE


@pytest.mark.parametrize("port", [-1, 0, 1 << 16, (1 << 64) - 1])
def test_a_port_that_cannot_be_is_refused(make_rig: Any, port: int) -> None:
    """Guards against a peer whose endpoint ends the worker that reads it."""
    rig = make_rig("tcp")
    peer = rig.peer()
    with pytest.raises(TransferError, match="no port"):
        rig.connect(peer.me, Endpoint(transport="tcp", details={**peer.details, "port": port}))


def test_a_life_that_cannot_be_is_lost(make_rig: Any) -> None:
    """Guards against a peer whose incarnation does not fit into what is said first: it may not end the thread."""
    rig = make_rig("tcp")
    peer = rig.peer()
    nobody = Incarnation(-1)
    every = whole(rig.layout)
    rig.transport.connect(nobody, Endpoint(transport="tcp", details=peer.details), every, every)
    move = Move(Handoff(RequestId("r"), 1, 1, Incarnation(ME), peer.me), 0, remote=((BlockId(0), 0),))
    ticket = rig.transport.recv(nobody, move, None)
    (ended,) = rig.transport.poll(0.0)
    assert (ended.ticket, ended.outcome) == (ticket, Outcome.LOST) and "no " in ended.error


@pytest.mark.parametrize("kind", ["loopback", "shm", "tcp"])
def test_no_descriptor_is_left(make_rig: Any, kind: str) -> None:
    """Guards against a leak per peer or per connection: workers come and go for weeks."""
    rig = make_rig(kind)
    peer = rig.peer()
    peer.fill({0: 1})

    def one_life(number: int) -> None:
        endpoint = Endpoint(transport=kind, details=peer.details)
        rig.connect(peer.me, endpoint)
        peer.connect(ME, dict(rig.transport.describe(peer.me).details))
        peer.send(ME, f"r{number}", 0, [0])
        ticket = rig.recv(peer, f"r{number}", 0, [(0, 0)], [1])
        assert rig.outcome(ticket) is Outcome.DONE
        rig.transport.disconnect(peer.me)
        peer.transport.disconnect(ME)
        for _ in range(5):
            rig.turn(0.0)

    one_life(0)
    before = open_files()
    for number in range(1, 20):
        one_life(number)
    assert open_files() == before


def test_closing_gives_everything_back(make_rig: Any) -> None:
    rig = make_rig("tcp")
    before = open_files()
    for _ in range(5):
        ShmTransport(rig.pool).close()
        TcpTransport(rig.pool, ME, "127.0.0.1", 10.0).close()
    assert open_files() == before


def test_an_address_that_is_not_ours(make_rig: Any) -> None:
    rig = make_rig("shm")
    before = open_files()
    with pytest.raises(TransferError, match="cannot listen"):
        TcpTransport(rig.pool, ME, "192.0.2.1", 10.0)
    assert open_files() == before

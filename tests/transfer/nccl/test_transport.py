"""The nccl transport against a scripted library: every call fails, hangs or never ends, at either end of a pair."""

import threading
import time

import msgspec
import pytest

from engine.messages import Endpoint, Handoff
from engine.types import BlockId, RequestId
from tests.transfer.fake_device import ASYNC, FAIL, HANG, STALL, Fault, count, fake
from tests.transfer.nccl.ends import BLOCKS, LAYOUT, QUICK, Ends
from tests.transfer.wire import IntoDevice, whole
from transfer.gpu.device import StuckStreamError
from transfer.liveness import Watchdog
from transfer.transport import Move, Outcome, TransferError

FAULTS = {
    "no id": ("id", FAIL, 0),
    "init is refused": ("init", FAIL, 0),
    "init never ends": ("joining", STALL, 0),
    "init ends badly": ("joining", FAIL, 0),
    "warm-up is refused": ("group", FAIL, 0),
    "warm-up never starts": ("settle", STALL, 0),
    "warm-up never ends": ("recv", STALL, 0),
    "state cannot be asked": ("async", FAIL, 5),
    "an error later": ("async", ASYNC, 12),
    "send is refused": ("send", FAIL, 1),
    "send never starts": ("settle", STALL, 3),
    "send never ends": ("send", STALL, 1),
    "recv is refused": ("recv", FAIL, 1),
    "recv never ends": ("recv", STALL, 2),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_the_pair_and_nobody_else(ends: Ends, fault: str, rank: int) -> None:
    """Guards against a receive that never ends, a worker that is done for with one of its peers, and a pair that is
    never whole again. The receiver follows; `other` is a third worker that it reads from meanwhile."""
    sender, receiver = ends.end(1), ends.end(5)
    other = ends.end(3)
    ends.join(other, receiver)
    ends.arrives(other, receiver, 7)
    verb, action, skip = FAULTS[fault]
    if verb in ("send", "recv") and skip and rank == (verb == "send"):
        rank = 1 - rank  # the leader sends, the follower receives
    scripted = Fault(verb, action, rank=-1 if verb in ("id", "group") else rank, skip=skip)
    ends.join(sender, receiver)
    sender.fill(1, 40)
    tickets = []

    def is_taken() -> bool:
        if len(tickets) < 30 and all(t in receiver.ended for t in tickets):
            tickets.append(ends.chunk(sender, receiver, [1], [4])[1])
        return scripted.taken

    ends.until(is_taken)
    took_s = ends.until(lambda: any(e.outcome is Outcome.LOST for e in receiver.ended.values()), 4.0)
    assert took_s < QUICK.join_s + 0.8, "past every limit"
    ends.arrives(other, receiver, 8)
    ends.join(sender, receiver)
    ends.arrives(sender, receiver, 9)


@pytest.mark.parametrize("verb", ["init", "async", "send", "recv", "group", "abort"])
def test_a_call_that_hangs_is_seen_by_the_worker(ends: Ends, verb: str) -> None:
    """Guards against a worker that lives on with a transfer thread that does not: `Mover.beat` counts what `poll` comes
    back from, and the worker's watchdog ends the process."""
    one, two = ends.pair(1, 5)
    if verb == "abort":
        ends.arrives(one, two, 3)
    scripted = Fault(verb, HANG, rank=-1 if verb == "group" else 0)
    calls = 0

    def drive() -> None:
        nonlocal calls
        if verb == "abort":
            one.transport.disconnect(two.me)
        while not done:
            one.turn()
            calls += 1

    done = False
    thread = threading.Thread(target=drive)
    thread.start()
    began_s = time.monotonic()
    dog = Watchdog(0.5)
    while not dog.is_stuck(calls, time.monotonic()):
        assert time.monotonic() - began_s < 5, "the call came back"
        two.turn()
        time.sleep(0.01)
    assert scripted.taken
    done = True
    fake().fake_release()
    thread.join(5)
    assert not thread.is_alive()


def test_an_abort_that_fails_is_told_and_survived(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    one, two = ends.pair(1, 5)
    ends.arrives(one, two, 3)
    scripted = Fault("abort", FAIL, rank=1)
    two.transport.disconnect(one.me)
    assert scripted.taken and "abort of the communicator" in caplog.text
    ends.join(one, two)
    ends.arrives(one, two, 4)


def test_a_device_that_does_not_stop_ends_the_worker(ends: Ends) -> None:
    """Guards against a slot that is used again while kernels of an aborted communicator may write to it."""
    one, two = ends.pair(1, 5)
    ends.arrives(one, two, 3)
    lane = two.device.streams[1]
    scripted = Fault("recv", STALL, rank=1)
    _, ticket = ends.chunk(one, two, [1], [4])
    ends.until(lambda: scripted.taken)
    fake().fake_stall_stream(lane.handle, 1)
    began_s = time.monotonic()
    try:
        with pytest.raises(StuckStreamError):
            ends.until(lambda: False)
        assert time.monotonic() - began_s > QUICK.drain_s
        assert two.ended.get(ticket) is None or two.ended[ticket].outcome is Outcome.LOST
    finally:
        fake().fake_stall_stream(lane.handle, 0)


def test_both_directions_at_once_in_many_pieces(ends: Ends) -> None:
    """Guards against two ends that wait for each other, each with its own send before the other's."""
    one, two = ends.pair(1, 5)
    for block in range(20):
        one.fill(block, 10 + block)
        two.fill(block, 100 + block)
    tickets = [ends.chunk(one, two, list(range(20)), list(range(20, 40))) for _ in range(3)]
    back = [ends.chunk(two, one, list(range(20)), list(range(20, 40))) for _ in range(3)]
    assert QUICK.piece_bytes < 20 * LAYOUT.block_bytes, "one piece each: nothing is shown"
    assert all(ends.outcome(two, received) is Outcome.DONE for _, received in tickets)
    assert all(ends.outcome(one, received) is Outcome.DONE for _, received in back)
    assert all(two.has(20 + n, 10 + n) and one.has(20 + n, 100 + n) for n in range(20))


@pytest.mark.parametrize("hub", [0, 50], ids=["leads all", "follows all"])
def test_more_peers_than_communicators(ends: Ends, hub: int) -> None:
    """Guards against device memory that grows with the number of peers: at no time are there more than allowed."""
    config = msgspec.structs.replace(QUICK, communicators=2, join_s=5.0)
    middle = ends.end(hub, config)
    peers = [ends.end(10 + n, config) for n in range(5)]
    for peer in peers:
        ends.join(peer, middle)
    for lap in range(2):
        for n, peer in enumerate(peers):
            ends.arrives(peer, middle, 10 * lap + n + 1)
    assert middle.most_communicators == 2
    assert middle.transport.report.dropped >= 8 and middle.transport.report.lost == 0


def test_five_at_once_through_two_communicators(ends: Ends) -> None:
    """Guards against a pair that starves because others always have something to do."""
    config = msgspec.structs.replace(QUICK, communicators=2, join_s=5.0)
    middle = ends.end(50, config)
    peers = [ends.end(10 + n, config) for n in range(5)]
    tickets = []
    for n, peer in enumerate(peers):
        ends.join(peer, middle)
        peer.fill(1, n + 1)
        tickets += [ends.chunk(peer, middle, [1], [8 * n + k])[1] for k in range(8)]
    assert all(ends.outcome(middle, ticket, 20.0) is Outcome.DONE for ticket in tickets)
    assert all(middle.has(8 * n + k, n + 1) for n in range(5) for k in range(8))
    assert middle.most_communicators == 2


def test_a_communicator_is_there_before_the_first_request(ends: Ends) -> None:
    """Guards against the 0.7 s of a first operation in somebody's time to first token."""
    one, two = ends.pair(1, 5)
    ends.until(lambda: one.transport.report.built == two.transport.report.built == 1)
    made = count("made")
    ends.arrives(one, two, 3)
    assert count("made") == made


def test_a_cancel_while_bytes_are_on_their_way(ends: Ends) -> None:
    """Guards against blocks that are written after their owner got them back: what was launched lands nowhere."""
    one, two = ends.pair(1, 5)
    ends.arrives(one, two, 3)
    one.fill(1, 77)
    scripted = Fault("settle", STALL, rank=0)  # the sender's half does not start: the receive waits in its kernel
    _, ticket = ends.chunk(one, two, [1], [9])
    ends.until(lambda: scripted.taken and count("running") > 0)
    before = two.transport.scrapped_bytes
    assert two.transport.cancel(ticket)
    two.fill(9, 200)
    assert ends.outcome(two, ticket) is Outcome.CANCELLED
    ends.until(lambda: one.transport.report.lost == 1)
    assert two.has(9, 200) and two.transport.scrapped_bytes == before


def test_a_cancel_between_pieces(ends: Ends) -> None:
    """What is under way is drained, what is not is never sent, and the next chunk is whole."""
    one, two = ends.pair(1, 5)
    ends.arrives(one, two, 3)
    for block in range(16):
        one.fill(block, 60 + block)
    for block in range(20, 36):
        two.fill(block, 200)
    sent, ticket = ends.chunk(one, two, list(range(16)), list(range(20, 36)))
    ends.until(lambda: two.has(20, 60))
    assert two.transport.cancel(ticket)
    untouched = [block for block in range(20, 36) if two.has(block, 200)]
    assert untouched, "all of it had landed: nothing is shown"
    assert ends.outcome(one, sent) is Outcome.DONE
    ends.arrives(one, two, 5)
    assert all(two.has(block, 200) for block in untouched)


def test_the_sender_withdraws(ends: Ends) -> None:
    one, two = ends.pair(1, 5)
    for source, target in ((one, two), (two, one)):
        sent, received = ends.chunk(source, target, [1], [4])
        assert source.transport.cancel(sent)
        assert ends.outcome(source, sent) is Outcome.CANCELLED
        assert ends.outcome(target, received) is Outcome.FAILED
        ends.arrives(source, target, 6)


def test_chunks_that_do_not_match_break_the_pair(ends: Ends) -> None:
    """Guards against bytes of one chunk in the place of another."""
    one, two = ends.pair(1, 5)
    name = Handoff(RequestId("r"), 1, 1, two.me, one.me)
    two.fill(4, 200)
    one.transport.send(two.me, Move(name, 0, local=(BlockId(1),)))
    landing = IntoDevice(two.transport, two.pool, [4])
    other = msgspec.structs.replace(name, attempt=2)
    received = two.transport.recv(one.me, Move(other, 0, remote=((BlockId(1), 0),)), landing)
    assert ends.outcome(two, received) is Outcome.LOST
    assert two.has(4, 200)


def test_who_cannot_be_a_pair_is_told_why(ends: Ends) -> None:
    one, two = ends.end(1), ends.end(5, msgspec.structs.replace(QUICK, share_gpu="no"))
    every = whole(LAYOUT)
    found = dict(one.transport.describe(two.me).details)
    with pytest.raises(TransferError, match="one GPU"):
        two.meet(one)
    endpoint = Endpoint(transport="nccl", details={**found, "gpu": "another", "version": 23007})
    with pytest.raises(TransferError, match=r"2\.30\.7 there, 2\.28\.9 here"):
        two.transport.connect(one.me, endpoint, every, every)
    with pytest.raises(TransferError, match="no block 48"):
        ends.join(one, ends.end(9))
        ends.chunk(one, ends.all[-1], [BLOCKS], [0])


def test_a_library_that_makes_no_two_ranks_on_one_device(ends: Ends) -> None:
    """Guards against workers that wait for a communicator that cannot be made."""
    with pytest.raises(TransferError, match=r"NCCL 2\.28\.9 makes no two ranks on one device: 2\.30\.0 does"):
        ends.end(1, msgspec.structs.replace(QUICK, share_gpu="multi_rank"))


def test_nobody_listens(ends: Ends) -> None:
    """Guards against a leader that dials for ever."""
    one, two = ends.end(1), ends.end(5)
    endpoint = two.transport.describe(one.me)
    one.transport.connect(two.me, endpoint, whole(LAYOUT), whole(LAYOUT))
    two.close()
    ends.all.remove(two)
    began_s = time.monotonic()
    ends.until(lambda: one.transport.report.lost == 1)
    assert QUICK.join_s <= time.monotonic() - began_s < QUICK.join_s + 1

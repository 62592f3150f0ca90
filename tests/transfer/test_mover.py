"""The transfer thread and both pure sides together, over every transport: whole handoffs, and their failures."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from engine.messages import Endpoint, Handoff
from engine.types import Incarnation, RequestId
from tests.transfer.pair import DECODE, LAYOUT, PREFILL, H, Pair
from tests.transfer.wire import WAYS
from transfer.handoff.commands import (
    Arrived,
    Broken,
    Connect,
    Fenced,
    MoverCommand,
    MoverDied,
    PostRecv,
    PostScrap,
    Received,
    Settled,
    Unreachable,
)
from transfer.handoff.negotiation import Agreement
from transfer.host.loopback import FaultKind, ScriptedFault
from transfer.transport import Move


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(kind: str = "loopback", threaded: bool = False, digest_share: float = 1.0) -> Pair:
        pairs.append(Pair(kind, threaded, digest_share))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("kind", WAYS)
def test_a_whole_handoff(make_pair: Callable[..., Pair], kind: str, threaded: bool) -> None:
    """Chunks in flight at once, a partial last block; both sides let go in the end."""
    pair = make_pair(kind, threaded)
    pair.start(9, last_tokens=3)
    pair.offer(0, 1, 2)
    pair.offer(3)
    pair.offer(4, 5, 6, 7)
    pair.offer(8)
    pair.at_prefill(pair.sender.close(H))
    pair.until(lambda: Arrived(H) in pair.told and Settled(H) in pair.told)
    assert all(pair.same(index) for index in range(9))
    assert len(pair.told) == 2
    received = [event for event in pair.events if isinstance(event, Received)]
    assert sum(event.nbytes for event in received) == 9 * LAYOUT.block_bytes
    assert all(event.seconds > 0 for event in received)
    assert pair.prefill.mover.outstanding == pair.decode.mover.outstanding == 0


@pytest.mark.parametrize("kind", WAYS)
def test_stop_in_the_middle(make_pair: Callable[..., Pair], kind: str) -> None:
    """Later chunks of a stopped handoff are drained, and the next handoff over the same pair is whole."""
    pair = make_pair(kind)
    pair.start(4)
    pair.offer(0)
    pair.offer(1, 2)
    pair.at_decode(pair.receiver.stop(H))
    pair.offer(3) if pair.sender.is_open(H) else None
    pair.until(lambda: bool(pair.told) and any(isinstance(t, Settled) for t in pair.told))
    assert any(isinstance(told, Fenced) for told in pair.told)
    again = Handoff(RequestId("again"), 1, 1, DECODE, PREFILL)
    pair.start(4, handoff=again)
    pair.offer(0, 1, 2, 3, handoff=again)
    pair.until(lambda: Arrived(again) in pair.told)
    assert all(pair.same(index) for index in range(4))


@pytest.mark.parametrize(
    "fault",
    [
        ScriptedFault(FaultKind.CORRUPT, flip=(5,)),
        ScriptedFault(FaultKind.CORRUPT, flip=(LAYOUT.block_bytes - 1,)),
        ScriptedFault(FaultKind.SWAP),
    ],
    ids=["first bytes", "last byte", "blocks swapped"],
)
def test_wrong_bytes_are_caught(make_pair: Callable[..., Pair], fault: ScriptedFault) -> None:
    """Guards against a wrong answer with status OK. That the fault took effect is proven without digests."""
    pair = make_pair()
    pair.hub.faults.append(fault)
    pair.start(2)
    pair.offer(0, 1)
    pair.until(lambda: bool(pair.told))
    (broken,) = pair.told
    assert isinstance(broken, Broken) and "digest mismatch" in broken.why

    fault.applied = 0
    blind = make_pair(digest_share=0.0)
    blind.hub.faults.append(fault)
    blind.start(2)
    blind.offer(0, 1)
    blind.until(lambda: Arrived(H) in blind.told)
    assert fault.applied == 1 and not blind.same(0)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_both_sides_take_the_same_sample(make_pair: Callable[..., Pair], share: float) -> None:
    """Guards against a receiver that looks for a digest which the sender did not make, and the other way round."""
    pair = make_pair(digest_share=share)
    pair.start(30)
    for first in range(0, 30, 3):
        pair.offer(first, first + 1, first + 2)
    pair.until(lambda: Arrived(H) in pair.told)
    made, verified = pair.prefill.mover.digests.made, pair.decode.mover.digests.verified
    assert made == verified and (made == 30 * share or 5 < made < 25)
    assert pair.decode.mover.digests.mismatched == 0


def test_a_sample_catches_what_is_in_it_and_nothing_else(make_pair: Callable[..., Pair]) -> None:
    """What `sampled` promises, and what not: a spoiled block passes where it is not in the sample."""
    caught, passed = 0, 0
    for attempt in range(24):
        pair = make_pair(digest_share=0.5)
        fault = ScriptedFault(FaultKind.CORRUPT)
        pair.hub.faults.append(fault)
        name = Handoff(RequestId("r"), 1, attempt, DECODE, PREFILL)
        pair.start(1, handoff=name)
        pair.offer(0, handoff=name)
        pair.until(lambda pair=pair: bool(pair.told))  # type: ignore[misc]
        assert fault.applied == 1, "the fault did not take effect"
        made = pair.prefill.mover.digests.made
        assert isinstance(pair.told[0], Broken if made else Arrived)
        assert pair.decode.mover.digests.mismatched == made
        caught, passed = caught + made, passed + 1 - made
    assert caught and passed


def test_bytes_behind_the_valid_rows_do_not_count(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.hub.faults.append(ScriptedFault(FaultKind.CORRUPT, flip=(LAYOUT.block_bytes - 1,)))
    pair.start(1, last_tokens=3)
    pair.offer(0)
    pair.until(lambda: Arrived(H) in pair.told)
    assert not pair.same(0)


@pytest.mark.parametrize("kind", [FaultKind.DELAY, FaultKind.STALL])
def test_a_slow_chunk_holds_up_no_other(make_pair: Callable[..., Pair], kind: FaultKind) -> None:
    pair = make_pair()
    fault = ScriptedFault(kind, seq=0, polls=50)
    pair.hub.faults.append(fault)
    pair.start(2)
    pair.offer(0)
    pair.offer(1)
    pair.until(lambda: any(isinstance(e, Received) and e.seq == 1 for e in pair.events))
    assert fault.applied and Arrived(H) not in pair.told
    pair.hub.release()
    pair.until(lambda: Arrived(H) in pair.told)


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.STALL])
def test_the_fence_of_a_chunk_that_never_comes(
    make_pair: Callable[..., Pair], kind: FaultKind
) -> None:
    """Guards against target blocks that are never given back, and against bytes that come after the fence."""
    pair = make_pair()
    pair.hub.faults.append(ScriptedFault(kind, seq=1))
    pair.start(2)
    pair.offer(0)
    pair.offer(1)
    pair.until(lambda: pair.decode.mover.outstanding == 1 and pair.same(0))
    pair.at_decode(pair.receiver.stop(H))
    pair.until(lambda: Fenced(H, (0,)) in pair.told and Settled(H) in pair.told)
    pair.hub.release()
    for _ in range(20):
        pair.turn()
    assert not pair.same(1)


def test_a_scripted_failure_breaks_the_attempt(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.hub.faults.append(ScriptedFault(FaultKind.FAIL, seq=0))
    pair.start(1)
    pair.offer(0)
    pair.until(lambda: bool(pair.told))
    assert isinstance(pair.told[0], Broken) and "scripted" in pair.told[0].why


@pytest.mark.parametrize("kind", WAYS)
def test_a_lost_peer_ends_what_is_outstanding(make_pair: Callable[..., Pair], kind: str) -> None:
    """Guards against blocks that wait for a peer that is gone."""
    pair = make_pair(kind)
    pair.start(2)
    pair.offer(0)
    pair.prefill.mover.run_once()
    pair.at_prefill(pair.sender.peer_lost(DECODE))
    pair.at_decode(pair.receiver.peer_lost(PREFILL))
    pair.at_decode(pair.receiver.stop(H))
    pair.until(lambda: any(isinstance(told, Fenced) for told in pair.told))
    pair.at_prefill(pair.sender.peer_dead(DECODE))
    pair.until(lambda: Settled(H) in pair.told)
    assert pair.prefill.mover.outstanding == pair.decode.mover.outstanding == 0


def test_a_peer_that_cannot_be_reached_is_reported(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("shm")
    for endpoint in (Endpoint(transport="shm"), Endpoint(transport="carrier-pigeon")):
        pair.decode.mover.submit(Connect(Incarnation(5), endpoint, Agreement(LAYOUT)))
        pair.turn()
        assert isinstance(pair.events[-1], Unreachable)


def test_a_peer_that_breaks_a_transport_costs_itself_alone(make_pair: Callable[..., Pair]) -> None:
    """Guards against an endpoint of a kind that nobody thought of, which ends the worker that is told it."""
    pair = make_pair("shm")

    def fail(*_: object) -> None:
        raise OverflowError("unthought of")

    pair.decode.transport.connect = fail  # type: ignore[assignment,method-assign]
    pair.decode.mover.submit(Connect(Incarnation(5), Endpoint(transport="shm"), Agreement(LAYOUT)))
    pair.turn()
    assert isinstance(told := pair.events[-1], Unreachable) and "unthought of" in str(told)


def test_what_nobody_wants_and_cannot_be_drained_costs_its_peer_alone(make_pair: Callable[..., Pair]) -> None:
    """Guards against a number in an offer that ends the worker which does not want it."""
    pair = make_pair("tcp")
    pair.decode.mover.submit(PostScrap(PREFILL, Move(H, 1 << 32)))
    pair.turn()
    assert isinstance(told := pair.events[-1], Unreachable) and told.peer == PREFILL and "4294967295" in told.error
    assert pair.decode.mover.outstanding == 0


@pytest.mark.parametrize("kind", ["loopback", "shm", "tcp"])
def test_a_landing_that_raises_anything_fails_alone(make_pair: Callable[..., Pair], kind: str) -> None:
    """Guards against a number in an offer that ends the thread where a block is checked, and with it the worker."""
    pair = make_pair(kind)
    submit = pair.decode.mover.submit

    def forge(command: MoverCommand) -> None:
        if isinstance(command, PostRecv):
            blocks = tuple(msgspec.structs.replace(block, generation=-1) for block in command.blocks)
            command = msgspec.structs.replace(command, blocks=blocks)
        submit(command)

    pair.decode.mover.submit = forge  # type: ignore[method-assign]
    pair.start(1)
    pair.offer(0)
    pair.until(lambda: any(isinstance(told, Broken) for told in pair.told))
    assert "argument out of range" in str(pair.told[-1])
    assert any(isinstance(event, Unreachable) for event in pair.events) == (kind == "tcp")


def test_a_bad_command_fails_alone(make_pair: Callable[..., Pair]) -> None:
    """Guards against one bad chunk that ends the thread, and with it the worker."""
    pair = make_pair()
    pair.start(2)
    stranger = Handoff(RequestId("r"), 1, 1, Incarnation(77), PREFILL)
    pair.sender.open(stranger, True)
    pair.at_prefill(pair.sender.offer(stranger, [pair.outgoing[0]]))
    pair.until(lambda: any(isinstance(told, Broken) for told in pair.told))
    assert "not connected" in str(pair.told[0])
    pair.offer(0, 1)
    pair.until(lambda: Arrived(H) in pair.told)


def test_the_death_of_the_thread_is_told(make_pair: Callable[..., Pair]) -> None:
    """Guards against a worker that goes on without its transfer thread."""
    pair = make_pair("shm", threaded=True)

    def fail(timeout_s: float) -> None:
        raise RuntimeError("out of order")

    pair.decode.transport.poll = fail  # type: ignore[assignment,method-assign]
    pair.start(1)
    pair.offer(0)
    pair.until(lambda: any(isinstance(event, MoverDied) for event in pair.events))
    (died,) = [event for event in pair.events if isinstance(event, MoverDied)]
    assert "out of order" in died.error


def test_an_idle_thread_sleeps(make_pair: Callable[..., Pair]) -> None:
    """Guards against busy polling, which would take the engine's core."""
    for kind in WAYS:
        pair = make_pair(kind, threaded=True)
        pair.start(1)
        pair.offer(0)
        pair.until(lambda pair=pair: Arrived(H) in pair.told)  # type: ignore[misc]
        thread = next(t for t in threading.enumerate() if t is pair.decode.mover._thread)
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        before_s = time.clock_gettime(clock)
        time.sleep(0.3)
        assert time.clock_gettime(clock) - before_s < 0.05, kind


@pytest.mark.skipif(not Path("/proc/thread-self/comm").exists(), reason="threads are named in Linux' /proc")
def test_the_thread_has_its_name_for_others(make_pair: Callable[..., Pair]) -> None:
    """Guards its processor time, which nobody could tell from that of other threads."""
    pair = make_pair("shm", threaded=True)
    thread = next(t for t in threading.enumerate() if t is pair.decode.mover._thread)
    name = Path(f"/proc/self/task/{thread.native_id}/comm")
    deadline = time.monotonic() + 5
    while name.read_text() != "transfer\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert name.read_text() == "transfer\n"

"""One-sided transfers against the scripted library: into a ring, never into a pool; every call fails, hangs or dies."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.transfer.conftest import Process, Rig, RigFactory, end
from tests.transfer.fake_device import ASYNC, FAIL, ONE_SIDED_VARIABLE, STALL, Fault, fake
from tests.transfer.nccl.ends import LAYOUT, QUICK, End, Ends
from tests.transfer.nccl.far import (
    Pattern,
    begun,
    far_rig,
    is_lost_when_frozen,
    is_lost_when_it_ends_in,
    is_lost_when_killed,
    sender_of,
    still_works,
)
from transfer.nccl.library import ONE_SIDED
from transfer.transport import Outcome

PUTS = msgspec.structs.replace(QUICK, one_sided=True, put_bytes=4 * LAYOUT.block_bytes)


@pytest.fixture(autouse=True)
def as_new_as_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_VERSION", str(ONE_SIDED))


def rings(*ends: End) -> list[bool]:
    return [puts for end in ends for puts in rings_of(end.transport)]


def rings_of(transport: Any) -> list[bool]:
    """Return, for each communicator of a worker, whether it puts."""
    found = [peer.communicator for peer in transport._peers.values()]
    return [one is not None and one.puts is not None for one in found]


def test_both_directions_in_many_pieces(ends: Ends) -> None:
    """Guards slots that are filled before they are empty, and flags that are taken for another piece's."""
    one, two = ends.pair(1, 5, PUTS)
    for block in range(20):
        one.fill(block, 10 + block)
        two.fill(block, 100 + block)
    sends = Fault("send", FAIL)
    tickets = [ends.chunk(one, two, list(range(20)), list(range(20, 40))) for _ in range(3)]
    back = [ends.chunk(two, one, list(range(20)), list(range(20, 40))) for _ in range(3)]
    assert all(ends.outcome(two, received) is Outcome.DONE for _, received in tickets)
    assert all(ends.outcome(one, received) is Outcome.DONE for _, received in back)
    assert all(two.has(20 + n, 10 + n) and one.has(20 + n, 100 + n) for n in range(20))
    assert rings(one, two) == [True, True] and not sends.taken, "something was sent, not put"
    assert one.transport.report.pair_bytes == 0 or one.transport.report.pair_bytes > PUTS.put_bytes


@pytest.mark.parametrize("which", ["leader", "follower", "old library", "no windows"])
def test_where_one_end_cannot_both_send(
    ends: Ends, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards an end that waits for a put while the other sends."""
    if which == "old library":
        monkeypatch.setenv("FAKE_NCCL_VERSION", str(ONE_SIDED - 1))
    if which == "no windows":
        monkeypatch.setenv("FAKE_NCCL_NO_WINDOWS", "1")
    one = ends.end(1, QUICK if which == "leader" else PUTS)
    two = ends.end(5, QUICK if which == "follower" else PUTS)
    ends.join(one, two)
    ends.arrives(one, two, 3)
    ends.arrives(two, one, 4)
    assert rings(one, two) == [False, False]


@pytest.mark.parametrize("verb", ["alloc", "register", "registering", "put"])
@pytest.mark.parametrize("rank", [0, 1])
def test_who_cannot_put_after_all_sends_from_the_next_meeting_on(
    ends: Ends, verb: str, rank: int
) -> None:
    """Guards a pair that is lost and made anew for ever, since its library has the verbs and refuses them."""
    one, two = ends.end(1, PUTS), ends.end(5, PUTS)
    scripted = Fault(verb, FAIL, code=5, rank=-1 if verb == "alloc" else rank, skip=rank if verb == "alloc" else 0)
    ends.join(one, two)
    ends.until(lambda: scripted.taken and one.transport.report.lost + two.transport.report.lost > 0)
    ends.until(lambda: one.transport.report.lost == two.transport.report.lost == 1)
    ends.join(one, two)
    ends.arrives(one, two, 3)
    ends.arrives(two, one, 4)
    assert rings(one, two) == [False, False]


FAULTS = {
    "windows are never made": ("registering", STALL, 0),
    "state cannot be asked": ("async", FAIL, 9),
    "an error later": ("async", ASYNC, 14),
    "a put is refused": ("put", FAIL, 1),
    "the flag's put is refused": ("put", FAIL, 2),
    "a put never ends": ("put", STALL, 1),
    "the flag's put never ends": ("put", STALL, 2),
    "a put never starts": ("settle", STALL, 1),
}


@pytest.mark.parametrize("leads", [True, False], ids=["sender leads", "receiver leads"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_the_pair_and_nobody_else(ends: Ends, fault: str, leads: bool) -> None:
    """Guards against a receive that never ends, and blocks that a piece without its flag was scattered into."""
    sender, receiver = ends.end(2 if leads else 7, PUTS), ends.end(5, PUTS)
    other = ends.end(3, PUTS)
    ends.join(other, receiver)
    ends.arrives(other, receiver, 7)
    verb, action, skip = FAULTS[fault]
    rank = 0 if leads else 1
    scripted = Fault(verb, action, rank=rank, skip=skip)
    ends.join(sender, receiver)
    sender.fill(1, 40)
    receiver.fill(4, 200)
    tickets: list[Any] = []

    def is_taken() -> bool:
        if len(tickets) < 30 and all(t in receiver.ended for t in tickets):
            tickets.append(ends.chunk(sender, receiver, [1], [4])[1])
        return scripted.taken

    ends.until(is_taken)
    took_s = ends.until(lambda: any(e.outcome is Outcome.LOST for e in receiver.ended.values()), 4.0)
    assert took_s < PUTS.join_s + 0.8, "past every limit"
    done = any(receiver.ended[t].outcome is Outcome.DONE for t in tickets if t in receiver.ended)
    # A pair that is lost after its piece, but before the receive was told of, has landed it whole.
    may_have_landed = not done and verb == "async" and receiver.has(4, 40)
    assert receiver.has(4, 40 if done else 200) or may_have_landed
    ends.arrives(other, receiver, 8)
    ends.until(lambda: sender.transport.report.lost >= 1)
    ends.join(sender, receiver)
    ends.arrives(sender, receiver, 9)


def test_rings_come_and_go_with_their_communicators(ends: Ends) -> None:
    """Guards device memory that grows with every pair there ever was, and a ring that is freed under a copy."""
    before = fake().fake_memories()
    middle = ends.end(50, msgspec.structs.replace(PUTS, communicators=2, join_s=5.0))
    peers = [ends.end(10 + n, PUTS) for n in range(5)]
    for peer in peers:
        ends.join(peer, middle)
    for lap in range(2):
        for n, peer in enumerate(peers):
            ends.arrives(peer, middle, 10 * lap + n + 1)
    assert middle.transport.report.dropped >= 8 and middle.transport.report.lost == 0
    ends.until(lambda: fake().fake_memories() - before == 2 * middle.transport.communicators)
    for worker in ends.all:
        worker.close()
    ends.all.clear()
    assert fake().fake_memories() == before


def test_a_cancelled_receive_lands_nowhere(ends: Ends) -> None:
    one, two = ends.pair(1, 5, PUTS)
    ends.arrives(one, two, 3)
    one.fill(1, 77)
    scripted = Fault("settle", STALL, rank=0)
    _, ticket = ends.chunk(one, two, [1], [9])
    ends.until(lambda: scripted.taken)
    assert two.transport.cancel(ticket)
    two.fill(9, 200)
    assert ends.outcome(two, ticket) is Outcome.CANCELLED
    ends.until(lambda: one.transport.report.lost == 1)
    assert two.has(9, 200)


# ---- the sender in another process


@pytest.fixture(scope="module")
def newer_spares() -> Iterator[list[Process]]:
    """Processes whose library is a newer one, and puts."""
    spares: list[Process] = []
    yield spares
    for process in spares:
        end(process)


@pytest.fixture
def far(
    make_rig: RigFactory, newer_spares: list[Process], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rig]:
    monkeypatch.setenv(ONE_SIDED_VARIABLE, "1")
    shared, make_rig.spares = make_rig.spares, newer_spares
    yield far_rig(make_rig, newer_spares, 2)
    for rig in make_rig.rigs:
        rig.close()
    make_rig.rigs.clear()
    make_rig.spares = shared


def test_the_peer_is_killed_in_the_middle(far: Rig, pattern: Pattern) -> None:
    """Guards the wait that no abort ends: the receiver looks at flags, and waits for no signal."""
    victim, other = sender_of(far), sender_of(far)
    ticket = begun(far, victim)
    # The other's communicator may still be under way.
    assert rings_of(far.transport)[0], "it was sent, not put"
    is_lost_when_killed(far, victim, ticket)
    still_works(far, other, pattern)


def test_a_thawed_peers_puts_land_nowhere(far: Rig, pattern: Pattern) -> None:
    """Guards one-sided memory that is used again while a peer that was given up can still write to it."""
    victim, other = sender_of(far), sender_of(far)
    is_lost_when_frozen(far, victim, other, begun(far, victim), pattern)


@pytest.mark.parametrize("verb", ["alloc", "register", "put"])
def test_the_peer_ends_in_a_call(far: Rig, pattern: Pattern, verb: str) -> None:
    is_lost_when_it_ends_in(far, verb, 0, pattern)

"""Who dials whom, and who is let in. Pairs that meet and transfer are in test_transport.py, peers that die, freeze or
end in a call in test_processes.py."""

import time
from collections.abc import Callable

import msgspec
import pytest

from engine.messages import Endpoint
from engine.types import Incarnation
from tests.transfer.nccl.ends import LAYOUT
from tests.transfer.wire import whole
from transfer.nccl.meeting import Meeting
from transfer.nccl.peer import NcclPeer
from transfer.nccl.wire import Gone, Said
from transfer.transport import TransferError

EVERY = whole(LAYOUT)


class Worker:
    """A meeting, and what it is told."""

    def __init__(self, me: int, limit_s: float = 10.0) -> None:
        self.me = Incarnation(me)
        self.peers: dict[Incarnation, NcclPeer] = {}
        self.heard: list[Said] = []
        self.meeting = Meeting(
            self.me, "127.0.0.1", 10.0, limit_s, self.peers, lambda peer, said: self.heard.append(said), self.lose, bool
        )

    def lose(self, peer: NcclPeer, why: str) -> None:
        self.meeting.leave(peer)
        peer.lost = why

    def begin(self, other: "Worker") -> NcclPeer:
        details = other.meeting.details(self.me, LAYOUT.block_bytes, 1, "gpu")
        peer = self.peers[other.me] = self.meeting.begin(other.me, details, EVERY, EVERY)
        return peer

    def turn(self) -> None:
        self.meeting.step(time.monotonic())
        self.meeting.reactor.wait(0.005)
        self.meeting.flush()


def _until(holds: Callable[[], bool], *workers: Worker) -> None:
    end_s = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < end_s
        for worker in workers:
            worker.turn()


def test_the_smaller_dials_until_the_other_knows_it() -> None:
    """Guards the order in which two workers hear of each other: the leader may be much earlier."""
    one, two = Worker(1), Worker(2)
    leader = one.begin(two)
    leader.say(Gone(True, 3))
    for _ in range(10):
        one.turn()
        two.turn()
    assert leader.pair.leads and not leader.is_met and not leader.lost and one.meeting.is_dialling
    follower = two.begin(one)
    assert follower.dial is None and not follower.pair.leads
    _until(lambda: leader.is_met and bool(two.heard), one, two)
    assert two.heard == [Gone(True, 3)] and not one.meeting.is_dialling, "what was said before they met"
    two.meeting.leave(follower)
    _until(lambda: bool(leader.lost), one)
    one.meeting.close()
    two.meeting.close()


def test_who_is_never_met_is_given_up() -> None:
    one, two = Worker(1, limit_s=0.05), Worker(2)
    leader = one.begin(two)
    _until(lambda: bool(leader.lost), one, two)
    assert leader.lost == "cannot be met within 0.05 s"
    one.meeting.close()
    two.meeting.close()


def test_one_that_listens_in_a_peers_place_is_told_nothing() -> None:
    """Guards what a leader says first, and its communicators, from whoever has the port that a peer had."""
    one, false = Worker(1), Worker(2)
    details = false.meeting.details(one.me, LAYOUT.block_bytes, 1, "gpu")
    leader = one.peers[false.me] = one.meeting.begin(
        false.me, msgspec.structs.replace(details, key="00" * 32), EVERY, EVERY
    )
    leader.say(Gone(True, 3))
    false.begin(one)
    _until(lambda: bool(leader.lost), one, false)
    assert "not the peer" in leader.lost
    for _ in range(10):
        one.turn()
        false.turn()
    assert false.heard == [] and leader.wire is None and not false.peers[one.me].is_met
    one.meeting.close()
    false.meeting.close()


def test_another_version_is_refused_before_anybody_dials() -> None:
    one, two = Worker(1), Worker(2)
    details = two.meeting.details(one.me, LAYOUT.block_bytes, 22809, "gpu")
    endpoint = Endpoint(transport="nccl", details=msgspec.structs.asdict(details))
    assert one.meeting.check(endpoint, EVERY, 22809).gpu == "gpu"
    with pytest.raises(TransferError, match="they must be equal"):
        one.meeting.check(endpoint, EVERY, 22810)
    one.meeting.close()
    two.meeting.close()

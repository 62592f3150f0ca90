"""What wakes the transfer thread, and what it then finds. Every transport built on it is in test_conformance.py, the
thread that sleeps on it in test_mover.py."""

import select

import pytest

from engine.messages import Endpoint
from engine.types import Incarnation
from transfer.host.peer_file import PoolFileDetails
from transfer.polling import Bell, CompletionQueue, PeerTable, details_of
from transfer.transport import Completion, Outcome, TransferError


def _rings(bell: Bell) -> bool:
    return bool(select.select([bell], [], [], 0.0)[0])


def test_a_bell_rings_until_it_is_hushed() -> None:
    bell = Bell()
    bell.hush()
    assert not _rings(bell)
    bell.ring()
    bell.ring()
    bell.wait(10.0)
    assert _rings(bell)
    bell.hush()
    assert not _rings(bell), "twice is once"
    bell.close()
    bell.close()


def test_what_has_ended_is_told_once_and_wakes() -> None:
    rung: list[bool] = []
    queue = CompletionQueue(lambda: rung.append(True))
    one, two = queue.ticket(), queue.ticket()
    assert one != two
    queue.add([])
    assert not rung, "nothing has ended"
    queue.end(two, Outcome.DONE)
    queue.end(one, Outcome.FAILED, "why")
    assert len(rung) == 2
    assert queue.take() == [Completion(two, Outcome.DONE), Completion(one, Outcome.FAILED, "why")]
    assert queue.take() == []


def test_a_stranger_and_a_strange_endpoint_fail_the_attempt_alone() -> None:
    """Guards the transfer thread: a KeyError would end it, and with it the worker."""
    with pytest.raises(TransferError, match="7 is not connected"):
        PeerTable[str]()[Incarnation(7)]
    with pytest.raises(TransferError, match="not a shm endpoint"):
        details_of(Endpoint(transport="shm", details={"pid": "none"}), PoolFileDetails)

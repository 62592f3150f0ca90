"""Who is given a communicator, and whose is taken. More peers than communicators are in test_transport.py, rings that
come and go in test_ring.py."""

from typing import Any, cast

import pytest

from engine.types import Incarnation
from tests.transfer.nccl.ends import LAYOUT
from tests.transfer.wire import whole
from transfer.liveness import Watchdog
from transfer.nccl.budget import is_due, spare
from transfer.nccl.communicator import Communicator, Stage
from transfer.nccl.pair import Pair
from transfer.nccl.peer import NcclPeer
from transfer.nccl.wire import Ready
from transfer.transport import Ticket


class Known:
    """A communicator, as far as a budget looks at it."""

    epoch = 1

    def __init__(self, used_s: float, began_s: float = 0.0, stage: Stage = Stage.WARM) -> None:
        self.used_s, self.began_s, self.stage = used_s, began_s, stage


def _peer(communicator: Known | None = None, leads: bool = True, **state: Any) -> NcclPeer:
    every = whole(LAYOUT)
    peer = NcclPeer(Incarnation(1), every, every, None, Watchdog(1.0), Pair(leads), is_met=True, **state)
    peer.communicator = cast("Communicator | None", communicator)
    return peer


def _posted(peer: NcclPeer, by_both: bool = True) -> NcclPeer:
    peer.pair.post(True, Ticket(1), key=5, blocks=1)
    if by_both:
        peer.pair.heard(Ready(False, 0, 5))
    return peer


@pytest.mark.parametrize(
    ("peer", "has_room", "due"),
    [
        (_peer(), True, True),
        (_peer(), False, False),
        (_peer(epoch=1), True, False),
        (_posted(_peer(epoch=1)), False, True),
        (_posted(_peer(), by_both=False), False, False),
        (_posted(_peer(leads=False), by_both=False), True, False),
        (_posted(_peer(lost="gone")), True, False),
        (_peer(Known(1.0)), True, False),
    ],
    ids=["new", "no room", "had one", "wanted", "by one", "follows", "lost", "has one"],
)
def test_a_pair_is_given_one_at_its_meeting_and_when_both_want(peer: NcclPeer, has_room: bool, due: bool) -> None:
    assert is_due(peer, has_room) is due


def test_the_idle_one_that_was_used_least_recently_goes_first() -> None:
    old, new = _peer(Known(2.0)), _peer(Known(3.0))
    served, fresh = _posted(_peer(Known(1.0))), _posted(_peer(Known(0.0)))
    assert spare([served, new, old, fresh], busy=None) is old
    assert spare([served, new, old, fresh], busy=old) is new
    assert spare([served, fresh], busy=None) is served
    assert spare([fresh, _peer()], busy=None) is None, "it has not served those that wait for it"


@pytest.mark.parametrize("leaving", [_peer(Known(9.0, stage=Stage.DROPPING)), _peer(Known(9.0), spare_asked=True)])
def test_one_at_a_time_makes_room(leaving: NcclPeer) -> None:
    """Guards all communicators from being dropped for one that is still to come."""
    assert spare([_peer(Known(1.0)), leaving], busy=None) is None

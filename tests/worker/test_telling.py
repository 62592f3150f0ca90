"""Tellings alone: who is told from the beginning, who goes on where it was, and what is kept meanwhile. Over streams
that break: tests/router/test_holding.py; what a telling names: tests/engine/kv/test_holding.py."""

import pytest

from engine.handshake import Party
from engine.kv.manager import KVCacheManager
from engine.types import Incarnation
from worker.telling import HELLO_S, LATE_S, MOST_CUT, RESUME_S, Tellings

SIZE, PROMPTS = 2, 6
ROUTER, OTHER = Party("router", "r", Incarnation(1)), Party("router", "r", Incarnation(2))


def filled() -> KVCacheManager:
    """A cache of prompts of one block each."""
    kv = KVCacheManager(PROMPTS, SIZE, "m")
    for number in range(PROMPTS):
        lease = kv.acquire(b"", [number] * SIZE, match_limit=0, room_tokens=SIZE)
        assert lease is not None
        kv.commit(lease, [number] * SIZE)
        kv.release(lease)
    return kv


def numbers(tellings: Tellings, now: float = 0.0, turns: int = 1) -> list[tuple[int, int]]:
    """The links and numbers of what is told in so many turns, a prompt in each."""
    said = [one for _ in range(turns) for one in tellings.take(1, now)]
    assert all(len(told.runs) == 1 for _, told in said)
    return [(link, told.number) for link, told in said]


def cut(heard: int, router: Party = ROUTER, back_s: float = 1.0) -> Tellings:
    """One router was told four prompts, and lost; `router` is back and says how much it has heard."""
    tellings = Tellings(filled())
    tellings.attached(1, ROUTER, 0.0)
    assert numbers(tellings, turns=4) == [(1, n) for n in range(1, 5)] and tellings
    tellings.lost(1, 0.0)
    assert not tellings
    tellings.tick(back_s)
    tellings.attached(2, router, back_s)
    tellings.greeted(2, heard)
    assert tellings
    return tellings


@pytest.mark.parametrize(("heard", "first"), [(4, 5), (3, 4), (1, 2), (0, 1), (5, 1), (-1, 1)])
def test_it_goes_on_behind_what_was_heard(heard: int, first: int) -> None:
    """Guards a summary that starts over with every broken connection; what cannot have been heard is no cursor."""
    tellings = cut(heard)
    assert numbers(tellings, 1.0, turns=9) == [(2, n) for n in range(first, PROMPTS + 1)] and not tellings


def test_another_life_is_told_all() -> None:
    """Guards a router that has begun anew, under the same name, against half of what it must know."""
    assert numbers(cut(4, OTHER), 1.0, turns=9) == [(2, n) for n in range(1, PROMPTS + 1)]


def test_who_comes_too_late_is_told_all() -> None:
    assert numbers(cut(4, back_s=RESUME_S), RESUME_S, turns=9) == [(2, n) for n in range(1, PROMPTS + 1)]
    assert numbers(cut(4, back_s=RESUME_S - 0.1), RESUME_S, turns=9) == [(2, 5), (2, 6)]


def test_nothing_is_told_before_it_is_known_what_was_heard() -> None:
    """Guards against pieces that are told twice, and against a router of an older release, which never says it."""
    tellings = Tellings(filled())
    tellings.attached(1, ROUTER, 0.0)
    numbers(tellings, turns=4)
    tellings.attached(2, ROUTER, 5.0)  # the end of the first stream has not been noticed yet
    tellings.lost(1, 5.1)
    tellings.tick(5.0 + HELLO_S - 0.1)
    assert not tellings and numbers(tellings, 5.5) == []
    tellings.tick(5.0 + HELLO_S)
    assert numbers(tellings, 6.0, turns=9) == [(2, n) for n in range(1, PROMPTS + 1)]
    tellings.greeted(2, 3)
    tellings.greeted(7, 3)
    assert not tellings, "later it says nothing"


def test_what_was_said_last_may_not_have_been_heard() -> None:
    """Guards the last pieces, which are on their way when nothing is left to be told; later all is told once more."""
    for lost_s, first in ((LATE_S - 0.1, 6), (LATE_S, 1)):
        tellings = Tellings(filled())
        tellings.attached(1, ROUTER, 0.0)
        assert len(numbers(tellings, turns=9)) == PROMPTS and not tellings
        tellings.tick(lost_s)
        tellings.lost(1, lost_s)
        tellings.attached(2, ROUTER, lost_s)
        tellings.greeted(2, 5)
        assert numbers(tellings, lost_s, turns=9) == [(2, n) for n in range(first, PROMPTS + 1)]


def test_what_went_and_came_back_is_told_again() -> None:
    """Guards a block that was told, evicted, of which the router hears, and cached again for another router."""
    tellings = cut(4)
    tellings.lost(2, 1.0)
    kv = tellings._kv
    kv._evict(b"")  # of the six the oldest, not told yet
    lease = kv.acquire(b"", [9] * SIZE, match_limit=0, room_tokens=SIZE)
    assert lease is not None
    kv.commit(lease, [9] * SIZE)
    newest = kv.cache.node(lease.blocks[0])
    assert newest is not None
    tellings._cut[ROUTER][0]._told[newest.identity] = 1  # as if it had been told before it went
    tellings.evicted([newest.identity, *kv.take_evicted()])
    tellings.attached(3, ROUTER, 1.0)
    tellings.greeted(3, 4)
    assert numbers(tellings, 1.0, turns=20) == [(3, 5), (3, 6)], "the newest, and the one that was never told"


def test_no_more_are_kept_than_may_be() -> None:
    tellings = Tellings(filled())
    for life in range(MOST_CUT + 5):
        tellings.attached(life, Party("router", "r", Incarnation(life)), 0.0)
        tellings.lost(life, 0.0)
        tellings.lost(life, 0.0)
    assert len(tellings._cut) == MOST_CUT and ROUTER not in tellings._cut
    tellings.tick(RESUME_S)
    assert not tellings._cut

"""Tellings alone: who is told from the beginning, who goes on where it was, and what is kept meanwhile. Over streams
that break: tests/router/test_holding.py; what a telling names: tests/engine/kv/test_holding.py."""

import pytest

import worker.telling
from engine.handshake import Party
from engine.identity import SHORT_BYTES, chain
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


def told(tellings: Tellings, now: float = 0.0, turns: int = 1) -> list[tuple[int, int, int]]:
    """The link, number and prompt of each record in so many turns, a prompt in each: 1 is the latest used."""
    root = tellings._kv.cache.root_identity(b"")
    prompts = {chain(root, [n] * SIZE, SIZE)[0][:SHORT_BYTES]: PROMPTS - n for n in range(PROMPTS)}
    said = [one for _ in range(turns) for one in tellings.take(1, now)]
    assert all(len(told.runs) == 1 for _, told in said)
    return [(link, told.number, prompts[told.runs[0].blocks]) for link, told in said]


def told_of(link: int, first: int, number: int) -> list[tuple[int, int, int]]:
    """What the rest of a telling is from this prompt on, where its first record has this number."""
    return [(link, number + at, prompt) for at, prompt in enumerate(range(first, PROMPTS + 1))]


def cut(heard: int, router: Party = ROUTER, back_s: float = 1.0) -> Tellings:
    """One router was told four prompts, and lost; `router` is back and says how much it has heard."""
    tellings = Tellings(filled())
    tellings.attached(1, ROUTER, 0.0)
    assert told(tellings, turns=4) == told_of(1, 1, 1)[:4] and tellings
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
    assert told(tellings, 1.0, turns=9) == told_of(2, first, 5) and not tellings


def test_another_life_is_told_all() -> None:
    """Guards a router that has begun anew, under the same name, against half of what it must know."""
    assert told(cut(4, OTHER), 1.0, turns=9) == told_of(2, 1, 5)


def test_who_comes_too_late_is_told_all() -> None:
    assert told(cut(4, back_s=RESUME_S), RESUME_S, turns=9) == told_of(2, 1, 5)
    assert told(cut(4, back_s=RESUME_S - 0.1), RESUME_S, turns=9) == told_of(2, 5, 5)


def test_nothing_is_told_before_it_is_known_what_was_heard() -> None:
    """Guards against pieces that are told twice, and against a router of an older release, which never says it."""
    tellings = Tellings(filled())
    tellings.attached(1, ROUTER, 0.0)
    told(tellings, turns=4)
    tellings.attached(2, ROUTER, 5.0)  # the end of the first stream has not been noticed yet
    tellings.lost(1, 5.1)
    tellings.tick(5.0 + HELLO_S - 0.1)
    assert not tellings and told(tellings, 5.5) == []
    tellings.tick(5.0 + HELLO_S)
    assert told(tellings, 6.0, turns=9) == told_of(2, 1, 5)
    tellings.greeted(2, 3)
    tellings.greeted(7, 3)
    assert not tellings, "later it says nothing"


def test_what_was_said_last_may_not_have_been_heard() -> None:
    """Guards the last pieces, which are on their way when nothing is left to be told; later all is told once more."""
    for lost_s, first in ((LATE_S - 0.1, 6), (LATE_S, 1)):
        tellings = Tellings(filled())
        tellings.attached(1, ROUTER, 0.0)
        assert len(told(tellings, turns=9)) == PROMPTS and not tellings
        tellings.tick(lost_s)
        tellings.lost(1, lost_s)
        tellings.attached(2, ROUTER, lost_s)
        tellings.greeted(2, 5)
        assert told(tellings, lost_s, turns=9) == told_of(2, first, PROMPTS + 1)


def test_what_was_heard_of_an_earlier_telling_is_nothing_of_this_one() -> None:
    """Guards blocks that no router would ever hear of: a telling was heard to its end and forgotten, and the next broke
    off before any of it was heard. The numbers of both began at 1, and "six heard" were taken for those of the second.
    """
    tellings = Tellings(filled())
    tellings.attached(1, ROUTER, 0.0)
    assert told(tellings, turns=9) == told_of(1, 1, 1)
    tellings.tick(LATE_S)
    tellings.lost(1, 3.0)
    tellings.attached(2, ROUTER, 4.0)
    assert told(tellings, 4.0, turns=9) == told_of(2, 1, PROMPTS + 1)
    tellings.lost(2, 4.5)
    tellings.attached(3, ROUTER, 5.0)
    tellings.greeted(3, PROMPTS)
    assert told(tellings, 5.0, turns=9) == told_of(3, 1, 2 * PROMPTS + 1)


def test_what_was_heard_before_it_began_anew_is_nothing_of_what_followed() -> None:
    """Guards the same where a router said too late what it had heard, and was told all; and another router's numbers,
    which are no number of this one's next telling."""
    tellings = cut(4)
    tellings.lost(2, 1.0)
    tellings.attached(3, ROUTER, 2.0)
    tellings.attached(4, OTHER, 2.0)
    tellings.tick(2.0 + HELLO_S)
    assert [one for one in told(tellings, 3.0, turns=9) if one[0] == 3] == told_of(3, 1, 5)
    tellings.lost(3, 3.0)
    tellings.attached(5, ROUTER, 4.0)
    tellings.greeted(5, 4)
    assert [one for one in told(tellings, 4.0, turns=9) if one[0] == 5] == told_of(5, 1, 11)
    tellings.attached(6, Party("router", "r", Incarnation(3)), 5.0)
    assert told(tellings, 5.0)[0] == (6, 17, 1)


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
    said = [one for _ in range(20) for one in tellings.take(1, 1.0)]
    assert [record.number for _, record in said] == [5, 6]
    assert said[0][1].runs[0].blocks == newest.identity[:SHORT_BYTES], "then the one that was never told"


def test_no_more_are_kept_than_may_be() -> None:
    tellings = Tellings(filled())
    for life in range(MOST_CUT + 5):
        tellings.attached(life, Party("router", "r", Incarnation(life)), 0.0)
        tellings.lost(life, 0.0)
        tellings.lost(life, 0.0)
    assert len(tellings._cut) == MOST_CUT and ROUTER not in tellings._cut
    tellings.tick(RESUME_S)
    assert not tellings._cut


def test_what_is_kept_of_a_telling_is_what_cannot_be_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a worker's memory: lists of a million blocks of every router that is gone, and what it was told, of
    which there is a limit for all together. The oldest go first."""
    monkeypatch.setattr(worker.telling, "MOST_CUT_BLOCKS", 2 * 4)
    tellings = Tellings(filled())
    routers = [Party("router", "r", Incarnation(life)) for life in range(3)]
    for link, router in enumerate(routers):
        tellings.attached(link, router, 0.0)
    told(tellings, turns=4)
    for link in (0, 1):
        tellings.lost(link, 0.0)
    assert list(tellings._cut) == routers[:2], "as much as may be"
    assert not any(holding for holding, _ in tellings._cut.values())
    tellings.lost(2, 0.0)
    assert list(tellings._cut) == routers[1:]
    told_blocks = [holding.told_blocks for holding, _ in tellings._cut.values()]
    assert told_blocks == [4, 4]
    monkeypatch.setattr(worker.telling, "MOST_CUT_BLOCKS", 3)
    tellings.attached(3, routers[2], 1.0)
    tellings.greeted(3, 4)
    tellings.lost(3, 1.0)
    assert not tellings._cut, "one alone may be too large"

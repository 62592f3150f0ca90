"""Requests that go from one living router to another, event by event, as both routers' cores see it. What a decode
worker makes of a claim is in tests/decode_worker/scheduler/leaving/test_orphans.py; on real processes it is tried in
tests/integration/test_routers.py."""

from functools import partial

import msgspec
import pytest

from engine.messages import Cancel, Claim, ClaimTold, Orphan, OrphansTold, Place, Taken, Tokens
from engine.types import FinishReason
from router.core.endings import RESUMED_ELSEWHERE
from router.core.events import (
    Adopt,
    ClaimWanted,
    ClientLeft,
    Fail,
    GivenOver,
    Ignored,
    Lost,
    TellWorker,
    WorkersNamed,
)
from router.hub import Hub
from router.status.observer import NullObserver
from tests.router.bench import A, Bench, is_told
from tests.router.core.leaving.test_adoption import cancel, orphan
from tests.router.fake_cluster import load

KEY = b"k" * 16


def keyed(*tokens: int, placement: int = 3) -> Orphan:
    found = orphan(*tokens, placement=placement)
    return msgspec.structs.replace(found, record=msgspec.structs.replace(found.record, resume_key=KEY))


def settled() -> Bench:
    bench = Bench(decodes=2)
    bench.do(WorkersNamed(("d0", "d1")))
    for worker in ("d0", "d1"):
        bench.hear(OrphansTold(), worker)
    assert bench.router.is_settled(bench.now)
    return bench


def test_every_decode_worker_is_asked_and_waited_for() -> None:
    """Guards against an answer that is handed out before the worker with the later placement has spoken."""
    bench = settled()
    asked = bench.do(ClaimWanted(KEY, b"acme"))
    assert asked == [TellWorker("d0", Claim(KEY, b"acme")), TellWorker("d1", Claim(KEY, b"acme"))]
    bench.hear(ClaimTold(KEY), "d0")
    assert bench.router.is_claiming(KEY)
    bench.hear(ClaimTold(KEY), "d1")
    assert not bench.router.is_claiming(KEY)
    bench.do(ClaimWanted(KEY))
    bench.hear(ClaimTold(KEY), "d1")
    bench.do(Lost("d0"))
    assert not bench.router.is_claiming(KEY), "it waits for a worker that is lost"
    bench.do(ClaimWanted(KEY))
    bench.join("d1", "decode", 9)
    assert not bench.router.is_claiming(KEY), "it waits for a former life, of whose loss it was not told"


def test_while_it_is_claimed_the_higher_placement_wins() -> None:
    """Guards against an older placement, whose cancel was lost, in the place of the one that the client has read."""
    bench = settled()
    bench.do(ClaimWanted(KEY))
    bench.hear(keyed(5, 6, placement=3), "d0")
    newer = keyed(5, 6, 7, placement=4)
    told = bench.hear(newer, "d1")
    assert told[0] == cancel("d0", 3) and Adopt(newer) in told
    bench.hear(ClaimTold(KEY), "d0")
    bench.hear(ClaimTold(KEY), "d1")
    assert bench.hear(keyed(5, placement=5), "d0") == [cancel("d0", 5)], "taken after it was handed out"


def test_what_another_router_has_taken_is_over_here_and_may_come_back() -> None:
    """Guards the reader that is left behind, and against a request that is refused since it was here before."""
    bench = settled()
    (place,) = bench.submit(A)
    assert isinstance(place, TellWorker)
    home = place.worker
    bench.accept(A, 1, home)
    bench.hear(Tokens(A, 1, 0, [5]), home)
    over, fail = bench.hear(Taken(A, 1), home)
    assert isinstance(over, GivenOver) and over.record.request == A
    assert fail == Fail(A, RESUMED_ELSEWHERE, FinishReason.CANCELLED) and bench.router.open == 0
    assert bench.hear(Tokens(A, 1, 1, [6]), home) == [Ignored("stale", 1)]
    for turn in range(2):
        bench.do(ClaimWanted(KEY))
        one = keyed(5, 6, placement=1)
        assert bench.hear(one, home) == [Adopt(one)], f"the {turn}. time"
        bench.hear(ClaimTold(KEY), "d0")
        bench.hear(ClaimTold(KEY), "d1")
        assert len(bench.hear(Taken(A, 1), home)) == 2


def test_one_whose_client_has_been_answered_is_only_forgotten() -> None:
    bench = settled()
    bench.do(ClaimWanted(KEY))
    bench.hear(keyed(5), "d0")
    bench.do(ClientLeft(A))
    assert bench.hear(Taken(A, 3), "d0") == [] and bench.router.open == 0


def test_placements_of_a_router_that_began_later_are_passed() -> None:
    """Guards the names of placements: a sibling that began after this one, and adopted, has used higher numbers than
    this one's own beginning."""
    bench = settled()
    bench.now = 100.0
    bench.do(ClaimWanted(KEY))
    bench.hear(keyed(5, placement=3), "d0")
    bench.hear(load(), "p0")
    bench.hear(load(), "d1")
    *_, place = bench.do(Lost("d0"))
    assert is_told(place, Place) and place.record.placement > 90_000


@pytest.mark.parametrize("has_room", [False, True])
def test_a_higher_placement_takes_the_place_of_one_that_waits_or_is_offered(has_room: bool) -> None:
    """Guards a claim whose first report's worker was lost: what is offered by then is cancelled where it is, and nobody
    is told of one that only waits."""
    bench = settled()
    bench.do(ClaimWanted(KEY))
    bench.hear(keyed(5, placement=3), "d0")
    bench.hear(load(active=0 if has_room else 64), "d1")
    placed = [c for c in bench.do(Lost("d0")) if isinstance(c, TellWorker) and isinstance(c.record, Place)]
    assert [one.worker for one in placed] == (["d1"] if has_room else [])
    newer = keyed(5, 6, placement=4)
    told = bench.hear(newer, "d1")
    cancels = [c for c in told if isinstance(c, TellWorker) and isinstance(c.record, Cancel)]
    assert [(c.worker, c.record) for c in cancels] == [
        ("d1", Cancel(A, one.record.placement, FinishReason.CANCELLED)) for one in placed
    ]
    assert Adopt(newer) in told and bench.router.open == 1


def test_who_claims_hears_when_the_last_worker_has_answered_or_is_lost() -> None:
    """Guards a client who waits for nothing any more, or in vain: once for each who asks, however often it was asked,
    and at once where there is no worker."""
    bench, told = Bench(decodes=2), list[str]()
    hub = Hub(bench.router, lambda: bench.now, NullObserver())
    hub.connect(lambda worker, record: None)
    one, other = partial(told.append, "one"), partial(told.append, "other")
    for _ in range(2):
        hub.claim(KEY, None, one)
    hub.claim(KEY, None, other)
    hub.heard("d0", [ClaimTold(b"another"), ClaimTold(KEY)])
    assert told == []
    hub.heard("d1", [ClaimTold(KEY)])
    hub.heard("d1", [ClaimTold(KEY)])
    assert told == ["one", "other"] and not hub._claims
    hub.claim(KEY, None, one)
    hub.heard("d1", [ClaimTold(KEY)])
    hub.lost("d0")
    assert told[2:] == ["one"]
    hub.lost("d1")
    hub.claim(KEY, None, other)
    assert told[3:] == ["other"] and not hub._claims

"""Resumable requests outlive their router: whose they are, who is told of them, and when they end. Event by event; with
routers that crash and freeze in tests/sim, and on real processes in tests/chaos."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from decode_worker.scheduler.events import (
    Command,
    Event,
    FromRouter,
    PeerDown,
    PeerUp,
    RouterLost,
    Tell,
)
from decode_worker.scheduler.leaving import orphans
from decode_worker.scheduler.leaving.orphans import ResumeIndex
from decode_worker.scheduler.scheduler import DecodeScheduler
from engine.kv.manager import KVCacheManager
from engine.messages import (
    Cancel,
    Claim,
    ClaimTold,
    Ended,
    Finish,
    NeedPrefill,
    Orphan,
    OrphansTold,
    PeerAddress,
    Place,
    Record,
    RouterHello,
    StartPrefill,
    Taken,
    Tokens,
    frames,
)
from engine.packed_logprobs import PackedLogprobs
from engine.plan import MAX_OUTPUT_VALUES
from engine.types import FinishReason, Incarnation, RequestId, RequestRecord, TokenLogprobs
from transfer.handoff.commands import Emit
from transfer.handoff.receiver import KVReceiver
from worker.config import DecodeConfig
from worker.rpc import MAX_FRAME_BYTES

A, B, C = Incarnation(11), Incarnation(22), Incarnation(33)
R = RequestId("r")
HERE = PeerAddress("", "")
SECRET = b"the token"
KEEP_S = 30.0


class Bench:
    """A decode worker whose step draws tokens 100, 101 and so on. `now` is its clock; every event is checked."""

    def __init__(self, blocks: int = 64) -> None:
        self.kv = KVCacheManager(blocks, 4, "m")
        self.scheduler = DecodeScheduler(
            config=DecodeConfig(orphan_s=KEEP_S),
            kv=self.kv,
            receiver=KVReceiver(),
            name="d0",
            incarnation=Incarnation(1),
            fingerprint="m",
            vocab=1000,
            context_tokens=1000,
            stop_ids=frozenset(),
            block_bytes=1,
        )
        self.now = 0.0
        self._next = 100

    def do(self, event: Event) -> Sequence[Command]:
        commands = self.scheduler.handle(event, self.now)
        self.scheduler.check()
        return commands

    def hear(self, link: int, record: Record) -> list[tuple[int, Record]]:
        return told(self.do(FromRouter(link, record)))  # type: ignore[arg-type]

    def lose(self, link: int) -> list[tuple[int, Record]]:
        return told(self.do(RouterLost(link)))

    def place(
        self,
        link: int,
        name: RequestId = R,
        context: bytes = SECRET,
        prefill: PeerAddress = HERE,
        **more: object,
    ) -> list[tuple[int, Record]]:
        record = RequestRecord(
            request=name,
            tokens=[1, 2, 3, 4, 5, 6],
            prompt_tokens=6,
            max_tokens=8,
            seed=1,
            context=context,
            **more,  # type: ignore[arg-type]
        )
        return self.hear(link, Place(record=record, placement=3, prefill=prefill, losses=2))

    def step(self, count: int = 1) -> list[tuple[int, Record]]:
        """Steps; what routers are told meanwhile."""
        said = []
        for _ in range(count):
            plan, commands = self.scheduler.plan(self.now)
            said += told(commands)
            assert plan is not None, "nothing to compute"
            drawn = []
            for row in plan.rows:
                if row.draw:
                    drawn.append(self._next)
                    self._next += 1
            said += told(self.scheduler.complete(plan, drawn, self.now))
            self.scheduler.check()
        return said

    def tick(self, now: float) -> list[tuple[int, Record]]:
        self.now = now
        commands = self.scheduler.tick(now)
        self.scheduler.check()
        return told(commands)

    def is_quiet(self) -> bool:
        counts = self.kv.pool.counts()
        return counts["free"] + counts["cached"] == self.kv.pool.total


def told(commands: Sequence[Command]) -> list[tuple[int, Record]]:
    return [(c.link, c.record) for c in commands if isinstance(c, Tell)]


def reasons(said: list[tuple[int, Record]]) -> list[tuple[str, FinishReason]]:
    return [(r.request, r.reason) for _, r in said if isinstance(r, Ended)]


def running(bench: Bench, tokens: int = 3) -> None:
    """Router A on stream 1, and its request with so many tokens."""
    assert bench.hear(1, RouterHello(A)) == [(1, OrphansTold())]
    bench.place(1)
    bench.step(tokens)


def test_another_router_takes_over_a_running_request() -> None:
    """Guards against a request that ends with its router, and against tokens lost or doubled when it is handed over."""
    bench = Bench()
    running(bench)
    assert bench.lose(1) == [], "it ended with its router"
    bench.now = 2.0
    bench.step()
    (two, orphan), last = bench.hear(2, RouterHello(B))
    assert isinstance(orphan, Orphan) and last == (2, OrphansTold()) and two == 2
    assert orphan.tokens == [100, 101, 102, 103] and orphan.record.context == SECRET
    assert (orphan.placement, orphan.losses, orphan.age_s, orphan.prefill) == (3, 2, 2.0, "")
    assert bench.step() == [(2, Tokens(R, 3, 4, [104]))]
    *_, (link, ended) = bench.step(3)
    assert link == 2 and isinstance(ended, Ended) and ended.reason is FinishReason.LENGTH
    assert bench.is_quiet()


def test_the_same_router_has_placed_it_again() -> None:
    """Guards against a request that runs twice after a cut stream, here and where its router has placed it since."""
    bench = Bench()
    running(bench)
    bench.lose(1)
    said = bench.hear(2, RouterHello(A))
    assert reasons(said) == [(R, FinishReason.CANCELLED)] and said[-1] == (2, OrphansTold())
    assert bench.is_quiet() and not len(bench.scheduler.endings.orphans)


def test_the_same_router_may_be_back_before_the_cut_is_heard_of() -> None:
    """Guards against an old request that talks on over a half-open stream."""
    bench = Bench()
    running(bench)
    assert reasons(bench.hear(2, RouterHello(A))) == [(R, FinishReason.CANCELLED)]
    assert bench.lose(1) == [(2, OrphansTold())] and bench.is_quiet()


def test_a_router_that_is_dead_may_be_taken_for_alive() -> None:
    """Guards against a new router that is told that there is nothing, while the old one's stream is not closed yet."""
    bench = Bench()
    running(bench)
    assert bench.hear(2, RouterHello(B)) == [], (
        "taken from a router that may live, or called complete"
    )
    assert bench.step() == [(1, Tokens(R, 3, 3, [103]))]
    (_, orphan), last = bench.lose(1)
    assert isinstance(orphan, Orphan) and orphan.tokens == [100, 101, 102, 103]
    assert last == (2, OrphansTold())


def test_what_was_told_on_a_stream_that_broke_is_told_again() -> None:
    """Guards against a handover into nothing: the router never heard of it, and must not be taken to have placed it.

    Found by the simulator: the decode worker had been frozen while the router's first stream to it broke."""
    bench = Bench()
    running(bench)
    bench.place(1, RequestId("ended"))
    bench.step(5)
    bench.lose(1)
    first = bench.hear(2, RouterHello(B))
    bench.lose(2)
    again = bench.hear(3, RouterHello(B))
    names = [
        [r.record.request for _, r in said if isinstance(r, Orphan)] for said in (first, again)
    ]
    assert sorted(names[0]) == sorted(names[1]) == ["ended", "r"]
    assert bench.hear(3, RouterHello(B)) == [(3, OrphansTold())], "told twice on one stream"


def test_who_placed_a_request_is_told_of_its_end_once() -> None:
    """Guards a router that never lost its side: what it has forgotten since would be adopted anew."""
    bench = Bench()
    running(bench, 4)
    assert any(isinstance(record, Ended) for _, record in bench.step(4))
    assert bench.hear(2, RouterHello(A)) == [(2, OrphansTold())]


def test_an_end_told_on_a_stream_whose_end_is_not_heard_of_yet() -> None:
    """Guards a router that takes "all told" for a promise: it lost its first stream here, came back on another, and of
    what had been said on the first it knows nothing.

    Found by the simulator (seed 7006052): both the death of a router and the cut of its heir's stream came late."""
    bench = Bench()
    running(bench, 4)
    bench.hear(2, RouterHello(B))
    bench.step(4)
    said = bench.lose(1)
    assert [type(record) for _, record in said] == [Orphan, Ended, OrphansTold]
    again = bench.hear(3, RouterHello(B))
    assert again == [(3, record) for _, record in said]
    assert bench.lose(2) == [(3, OrphansTold())], "told twice on one stream"


def test_without_a_context_nobody_can_come_back() -> None:
    """Guards against blocks held for a client that has been told UNAVAILABLE."""
    bench = Bench()
    bench.hear(1, RouterHello(A))
    bench.place(1, context=b"")
    bench.step()
    assert reasons(bench.lose(1)) == [(R, FinishReason.CANCELLED)] and bench.is_quiet()
    assert bench.hear(2, RouterHello(B)) == [(2, OrphansTold())]


def test_an_orphan_that_nobody_takes_is_ended() -> None:
    """Guards against blocks held for ever for a router that does not come back."""
    bench = Bench()
    running(bench)
    bench.lose(1)
    assert bench.tick(KEEP_S - 0.1) == [] and not bench.is_quiet()
    assert reasons(bench.tick(KEEP_S)) == [(R, FinishReason.CANCELLED)]
    assert bench.is_quiet() and bench.scheduler.endings.orphans.expired == 1
    assert bench.hear(2, RouterHello(B)) == [(2, OrphansTold())]


def test_a_deadline_ends_an_orphan_and_its_client_is_told() -> None:
    """Guards against an orphan that outlives its caller's patience, and one whose end its client never learns."""
    bench = Bench()
    bench.hear(1, RouterHello(A))
    bench.place(1, remaining_s=5.0)
    bench.step()
    bench.lose(1)
    assert reasons(bench.tick(5.0)) == [(R, FinishReason.DEADLINE)] and bench.is_quiet()
    (_, orphan), (_, ended), _ = bench.hear(2, RouterHello(B))
    assert isinstance(orphan, Orphan) and orphan.remaining_s == 0.0
    assert isinstance(ended, Ended) and ended.reason is FinishReason.DEADLINE


@pytest.mark.parametrize("alive", [True, False])
def test_an_end_that_nobody_may_have_read_is_told(alive: bool) -> None:
    """Guards the tail: the worker has finished, the router dies before its client has read it."""
    bench = Bench()
    running(bench, 4)
    if not alive:
        bench.lose(1)
    bench.step(4)
    assert bench.is_quiet(), "an ended request holds blocks"
    if alive:
        bench.lose(1)
    (_, orphan), (_, ended), last = bench.hear(2, RouterHello(B))
    assert isinstance(orphan, Orphan) and orphan.tokens == list(range(100, 108))
    assert (
        isinstance(ended, Ended) and ended.stats.output_tokens == 8 and last == (2, OrphansTold())
    )
    bench.tick(KEEP_S)
    bench.lose(2)
    assert bench.hear(3, RouterHello(C)) == [(3, OrphansTold())], "remembered for ever"


def test_a_cut_answer_is_remembered_as_it_was_cut() -> None:
    """Guards against output behind a stop string, which contradicts the count and fails the request."""
    bench = Bench()
    running(bench, 4)
    bench.hear(1, Finish(R, 3, 2))
    bench.lose(1)
    (_, orphan), (_, ended), _ = bench.hear(2, RouterHello(B))
    assert isinstance(orphan, Orphan) and isinstance(ended, Ended)
    assert orphan.tokens == [100, 101] and ended.stats.output_tokens == 2


def test_a_client_that_left_is_not_remembered() -> None:
    """Guards against an answer for somebody who has cancelled it."""
    bench = Bench()
    running(bench)
    bench.hear(1, Cancel(R, 3, FinishReason.CANCELLED))
    bench.lose(1)
    assert bench.hear(2, RouterHello(B)) == [(2, OrphansTold())]


def test_memory_of_ended_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a worker that grows with every request it has served."""
    monkeypatch.setattr(orphans, "MAX_REMEMBERED", 3)
    bench = Bench()
    bench.hear(1, RouterHello(A))
    for number in range(5):
        bench.place(1, RequestId(f"r{number}"))
        bench.step(8)
    assert len(bench.scheduler.endings.orphans) == 3
    monkeypatch.setattr(orphans, "MAX_REMEMBERED_BYTES", 1)
    bench.place(1, RequestId("big"))
    bench.step(8)
    assert len(bench.scheduler.endings.orphans) == 0 and bench.scheduler.endings.orphans._bytes == 0


def test_what_kills_routers_is_not_handed_on_for_ever() -> None:
    """Guards a cluster against one request whose text kills every router that adopts it."""
    bench = Bench()
    running(bench)
    bench.lose(1)
    for life in range(2, 2 + orphans.MAX_HANDOVERS):
        said = bench.hear(life, RouterHello(Incarnation(life)))
        assert [type(record) for _, record in said] == [Orphan, OrphansTold]
        bench.lose(life)
    said = bench.hear(99, RouterHello(C))
    assert reasons(said) == [(R, FinishReason.CANCELLED)] and bench.is_quiet()


@pytest.mark.parametrize("asked_before", [True, False])
def test_an_orphan_asks_nobody_for_a_prefill_worker(asked_before: bool) -> None:
    """Guards against a request that waits, with its blocks, for the answer of a router that is dead."""
    bench = Bench()
    peer = PeerAddress("p0", "p0:1")
    bench.hear(1, RouterHello(A))
    bench.place(1, prefill=peer)
    if asked_before:
        ((_, ask),) = told(bench.do(PeerDown(peer, None, "gone")))
        assert isinstance(ask, NeedPrefill)
        bench.lose(1)
    else:
        bench.lose(1)
        assert told(bench.do(PeerDown(peer, None, "gone"))) == []
    (_, orphan), _ = bench.hear(2, RouterHello(B))
    assert isinstance(orphan, Orphan) and (orphan.tokens, orphan.prefill) == ([], "")
    assert bench.step() == [(2, Tokens(R, 3, 0, [100]))]


def test_prefill_workers_and_reprs_do_not_see_the_context() -> None:
    """Guards the resume token, with which anybody could read the answer, and the caller's text."""
    bench = Bench()
    peer = PeerAddress("p0", "p0:1")
    bench.place(1, prefill=peer)
    (command,) = bench.do(PeerUp(Incarnation(5), peer, "shm", 4))
    assert isinstance(command, Emit) and isinstance(command.record, StartPrefill)
    assert command.record.record.context == b"" and command.record.record.tokens == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    (request,) = bench.scheduler._requests.values()
    assert request.record.context == SECRET
    assert repr(request.record) == "RequestRecord(r: 6 prompt tokens, 0 emitted, at most 8)"
    assert "token'" not in repr(request) and "b'the" not in repr(request)


def test_a_stream_that_was_no_router_leaves_nothing_to_anybody() -> None:
    """Guards the promise that orphans are told once: whoever connects and goes, says nothing of them."""
    bench = Bench()
    bench.hear(1, RouterHello(A))
    assert bench.lose(99) == []


def test_the_name_of_a_router_that_is_attached_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a worker beside a router that restarts again and again: it forgot the name of one that had lived longer
    than all of these, and ended when it looked for it."""
    monkeypatch.setattr(orphans, "MAX_NAMES", 3)
    bench = Bench()
    bench.hear(1, RouterHello(A, "long-lived"))
    bench.place(1, R, SECRET)
    for life in range(6):
        bench.hear(2, RouterHello(Incarnation(100 + life), "restarts"))
        assert bench.lose(2) == []
    bench.hear(3, RouterHello(B, "another"))
    assert bench.scheduler._requests[R].link == 1
    assert [type(record) for _, record in bench.lose(1)] == [], "nobody of its name is there"
    assert [record.record.request for _, record in bench.hear(4, RouterHello(C, "long-lived"))
            if isinstance(record, Orphan)] == [R]  # fmt: skip


def test_of_the_names_of_routers_that_are_gone_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory, and one that came again: its requests would be told to routers of every name."""
    monkeypatch.setattr(orphans, "MAX_NAMES", 2)
    bench = Bench()
    for link, router in enumerate((A, B, A, C), 1):
        bench.hear(link, RouterHello(router, "router"))
        bench.lose(link)
    assert list(bench.scheduler.endings.orphans._names) == [A, C]


def test_what_belongs_to_other_streams_stays() -> None:
    """Guards requests of a router that lives, when another one is lost."""
    bench = Bench()
    bench.hear(1, RouterHello(A))
    bench.hear(2, RouterHello(B))
    for link, name, context in ((1, "a", b""), (1, "b", SECRET), (2, "c", b"")):
        bench.place(link, RequestId(name), context)
    told_of = bench.lose(1)
    assert [record.record.request for _, record in told_of if isinstance(record, Orphan)] == ["b"]
    assert set(bench.scheduler._requests) == {"b", "c"}
    assert bench.scheduler._requests[RequestId("c")].link == 2


def test_an_orphan_is_told_with_the_time_that_is_left() -> None:
    """Guards a deadline that begins anew with each router, or is gone with the first."""
    for remaining_s, left_s in ((None, None), (30.0, 26.0)):
        bench = Bench()
        bench.hear(1, RouterHello(A))
        bench.place(1, remaining_s=remaining_s)
        bench.lose(1)
        bench.now = 4.0
        (first, last) = bench.hear(2, RouterHello(B))
        orphan = first[1]
        assert isinstance(orphan, Orphan) and isinstance(last[1], OrphansTold)
        assert (orphan.remaining_s, orphan.age_s, orphan.losses) == (left_s, 4.0, 2)


def test_what_has_ended_is_remembered_for_so_long_and_by_its_size() -> None:
    """Guards an answer that the next router asks for, and memory: what is forgotten is counted no more."""
    bench = Bench()
    bench.hear(1, RouterHello(A))
    bench.place(1)
    bench.step(8)
    kept = bench.scheduler.endings.orphans
    assert len(kept) == 1 and kept._bytes == orphans.TOKEN_BYTES * 14 + len(SECRET)
    bench.now = KEEP_S - 0.5
    bench.scheduler.tick(bench.now)
    assert len(kept) == 1
    bench.now = KEEP_S
    bench.scheduler.tick(bench.now)
    assert len(kept) == 0 and kept._bytes == 0


def test_nothing_is_remembered_where_nobody_is_waited_for() -> None:
    kept = orphans.Orphans(0.0)
    bench = Bench()
    bench.place(1)
    request = bench.scheduler._requests[R]
    ended = next(record for _, record in bench.step(8) if isinstance(record, Ended))
    kept.remember(request, ended, [1], 0.0)
    assert len(kept) == 0 and not kept.is_untold


def test_a_router_that_takes_its_own_requests_back_hands_nothing_on() -> None:
    """Guards the limit of handovers: a router that only connects again is the same one."""
    bench = Bench()
    bench.hear(1, RouterHello(A))
    bench.place(1)
    kept, request = bench.scheduler.endings.orphans, bench.scheduler._requests[R]
    kept.joined(2, A, "router")
    assert kept.adopt(request, 2) and (request.link, request.owner.handovers) == (2, 0)
    kept.joined(3, B, "router")
    kept.left(1)
    kept.left(2)
    assert kept.adopt(request, 3) and (request.owner.router, request.owner.handovers) == (B, 1)


def test_what_runs_on_a_stream_whose_end_is_not_heard_of_is_told_on_the_next() -> None:
    """Guards a request that was handed to a router which came back on another stream: it talks on over the old one."""
    bench = Bench()
    running(bench)
    bench.lose(1)
    bench.hear(2, RouterHello(B))
    (link, orphan), last = bench.hear(3, RouterHello(B))
    assert link == 3 and isinstance(orphan, Orphan) and last == (3, OrphansTold())
    assert bench.step() == [(3, Tokens(R, 3, 3, [103]))]
    assert bench.lose(2) == [(3, OrphansTold())]


def test_what_one_router_was_told_of_is_not_told_to_another() -> None:
    """Guards an answer that two routers would have: the one that took it over is there still."""
    bench = Bench()
    running(bench, 4)
    bench.step(4)
    bench.lose(1)
    said = bench.hear(2, RouterHello(B))
    assert [type(record) for _, record in said] == [Orphan, Ended, OrphansTold]
    assert bench.hear(3, RouterHello(C)) == []


def test_memory_of_ended_requests_is_full_at_its_limit_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "MAX_REMEMBERED_BYTES", orphans.TOKEN_BYTES * 14 + len(SECRET))
    bench = Bench()
    bench.hear(1, RouterHello(A))
    bench.place(1)
    bench.step(8)
    assert len(bench.scheduler.endings.orphans) == 1


KEY, OTHER_KEY = b"k" * 16, b"o" * 16


def two_routers(bench: Bench, tokens: int = 3) -> None:
    """Routers of two names on streams 1 and 2, and a request of the first with so many tokens."""
    assert bench.hear(1, RouterHello(A, "router-0")) == [(1, OrphansTold())]
    assert bench.hear(2, RouterHello(B, "router-1")) == [(2, OrphansTold())], "it waits for what another one may leave"
    bench.place(1, resume_key=KEY, namespace=b"acme")
    bench.step(tokens)


def test_a_router_claims_what_a_live_one_has() -> None:
    """Guards a resumption at another router: all tokens so far, the rest to the claimer alone, the former one told."""
    bench = Bench()
    two_routers(bench)
    taken, (two, orphan), last = bench.hear(2, Claim(KEY))
    assert taken == (1, Taken(R, 3)) and last == (2, ClaimTold(KEY)) and two == 2
    assert isinstance(orphan, Orphan) and orphan.tokens == [100, 101, 102]
    assert bench.step() == [(2, Tokens(R, 3, 3, [103]))]
    assert bench.hear(2, Claim(KEY)) == [(2, ClaimTold(KEY))], "its own is claimed from itself"
    assert reasons(bench.lose(1)) == [], "it ended with the router that had it"
    assert bench.step() == [(2, Tokens(R, 3, 4, [104]))]


@pytest.mark.parametrize("word", [Cancel(R, 3, FinishReason.CANCELLED), Finish(R, 3, 1)])
def test_what_the_former_router_still_says_changes_nothing(word: Cancel | Finish) -> None:
    """Guards a stream that goes on elsewhere against the end of its window where it was, on its way at the time."""
    bench = Bench()
    two_routers(bench)
    bench.hear(2, Claim(KEY))
    said = bench.hear(1, word)
    assert all(link == 1 for link, _ in said), "its new router is told of an end"
    assert bench.step() == [(2, Tokens(R, 3, 3, [103]))]
    place = Place(record=bench.scheduler._requests[R].record, placement=4, prefill=HERE)
    assert bench.hear(1, place) == [(1, Taken(R, 4))], "placed again by who has lost it"
    assert bench.step() == [(2, Tokens(R, 3, 4, [104]))]


@pytest.mark.parametrize("claimer_lives", [True, False])
@pytest.mark.parametrize("placement", [3, 2])
def test_an_offer_of_what_another_router_goes_on_with_is_always_answered(claimer_lives: bool, placement: int) -> None:
    """Guards a request that stays offered for ever: its router has not heard that it was claimed, and counts placements
    from a life before the claimer's."""
    bench = Bench()
    two_routers(bench)
    bench.hear(2, Claim(KEY))
    if not claimer_lives:
        bench.lose(2)
    place = Place(record=bench.scheduler._requests[R].record, placement=placement, prefill=HERE)
    assert bench.hear(1, place) == [(1, Taken(R, placement))]
    bench.step()
    link, orphan = bench.hear(1, Claim(KEY))[-2]
    assert link == 1 and isinstance(orphan, Orphan) and orphan.tokens == [100, 101, 102, 103], "its client cannot go on"
    assert bench.hear(1, place) == [], "its own is taken from it"


def test_only_what_is_claimed_is_given() -> None:
    """Guards other requests, and those of another tenant, against a claim."""
    bench = Bench()
    two_routers(bench)
    for key, namespace in ((OTHER_KEY, None), (KEY, b"other"), (KEY, b"")):
        assert bench.hear(2, Claim(key, namespace)) == [(2, ClaimTold(key))]
    assert bench.hear(2, Claim(b"")) == [], "those without a token have one key"
    assert bench.step() == [(1, Tokens(R, 3, 3, [103]))]
    assert bench.hear(3, Claim(KEY)) == [], "a stream that has not said who it is"
    assert [type(record) for _, record in bench.hear(2, Claim(KEY, b"acme"))] == [Taken, Orphan, ClaimTold]


def test_a_salt_does_not_hide_a_request_from_its_owner() -> None:
    """Guards a resumption at another router, which knows the tenant and not the salt that parts its cache."""
    acme, salt = b"acme".ljust(16), b"salt".ljust(16)
    index: ResumeIndex[str] = ResumeIndex()
    record = RequestRecord(
        request=R, tokens=[1], prompt_tokens=1, max_tokens=1, seed=0, namespace=acme + salt, resume_key=KEY
    )
    index.add(record, "kept")
    assert index.find(Claim(KEY, acme)) == ["kept"]
    assert index.find(Claim(KEY, salt)) == []


def test_a_dead_routers_requests_wait_for_its_next_life_or_a_claim() -> None:
    """Guards live routers against requests that a broken stream alone would push on them, while their router lives."""
    bench = Bench()
    two_routers(bench)
    assert bench.lose(1) == [], "pushed on a sibling"
    bench.step()
    assert [type(record) for _, record in bench.hear(2, Claim(KEY))] == [Orphan, ClaimTold]
    bench.lose(2)
    (link, orphan), last = bench.hear(3, RouterHello(C, "router-1"))
    assert link == 3 and isinstance(orphan, Orphan) and last == (3, OrphansTold())


def test_a_router_that_comes_anew_is_given_nothing_of_another_name() -> None:
    """Guards a dead router's requests, which its next life will ask for: who comes first is not who comes next."""
    bench = Bench()
    two_routers(bench)
    bench.lose(1)
    assert not any(isinstance(record, Orphan) for _, record in bench.hear(3, RouterHello(C, "router-2")))
    said = bench.hear(4, RouterHello(Incarnation(44), "router-0"))
    assert [type(record) for _, record in said] == [Orphan, OrphansTold]


def test_what_has_ended_is_claimed_too() -> None:
    bench = Bench()
    two_routers(bench)
    bench.step(5)
    orphan, ended, last = (record for _, record in bench.hear(2, Claim(KEY)))
    assert isinstance(orphan, Orphan) and len(orphan.tokens) == 8
    assert isinstance(ended, Ended) and ended.reason is FinishReason.LENGTH and last == ClaimTold(KEY)


def test_a_client_may_go_to_and_fro() -> None:
    """Guards against the limit of handovers, which is for what kills routers."""
    bench = Bench()
    two_routers(bench, 1)
    for turn in range(2 * orphans.MAX_HANDOVERS):
        link = 2 - turn % 2
        assert Orphan in [type(record) for _, record in bench.hear(link, Claim(KEY))]
    assert bench.scheduler._requests[R].owner.handovers == 0


def test_a_claim_looks_at_what_has_its_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the engine's thread against unknown tokens: no request, live or remembered, is looked at for one."""
    bench = Bench()
    two_routers(bench)
    looked = list[str]()

    class Watched(dict):  # type: ignore[type-arg]
        def values(self) -> object:  # type: ignore[override]
            looked.append("all")
            return super().values()

    orphaned = bench.scheduler.endings.orphans
    bench.scheduler.admission.requests = Watched(bench.scheduler.admission.requests)
    monkeypatch.setattr(orphaned, "_ended", Watched(orphaned._ended))
    claimed = bench.scheduler.endings.claim
    assert claimed(2, Claim(OTHER_KEY), bench.now) == [Tell(2, ClaimTold(OTHER_KEY))]
    assert len(claimed(2, Claim(KEY), bench.now)) == 3 and looked == []


@pytest.mark.parametrize("alternatives", [0, 1, 20])
def test_the_longest_answer_with_log_probabilities_fits_into_a_message(alternatives: int) -> None:
    """Guards a router that comes back, and the next worker: a record beyond the limit breaks the stream, again and
    again. Its log probabilities stood in it twice."""
    count = MAX_OUTPUT_VALUES // (alternatives + 1)
    one = TokenLogprobs(200_000, -0.1, tuple((200_000 + at, -0.1) for at in range(alternatives)))
    record = RequestRecord(
        request=R,
        tokens=[200_000] * count,
        prompt_tokens=1,
        max_tokens=count,
        seed=1,
        logprobs=alternatives,
        emitted_logprobs=(one,) * count,
        context=b"x",
    )
    place = Place(record=record, placement=1, prefill=HERE)
    packed = PackedLogprobs()
    packed.extend([one] * count)
    request: Any = SimpleNamespace(
        record=record,
        placement=1,
        prefill=SimpleNamespace(worker=SimpleNamespace(name="p0")),
        logprobs=packed,
        accepted=0.0,
        deadline=0.0,
        owner=SimpleNamespace(losses=0),
    )
    told = orphans.orphan(request, [200_000] * count, 1.0)
    assert told.logprobs == [one] * count
    for message in (place, told):
        assert len(frames([message])[0]) < MAX_FRAME_BYTES


def test_what_has_killed_too_many_routers_is_not_claimed_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards routers against a request that ends each of them, also where its client brings it."""
    asked: list[int] = []
    index: Any = SimpleNamespace(find=lambda claim: ["a", "b", "c"])
    kept = [SimpleNamespace(request=name) for name in index.find(None)]
    one = orphans.Orphans(30.0)
    monkeypatch.setattr(one, "_by_key", SimpleNamespace(find=lambda claim: kept))
    monkeypatch.setattr(one, "adopt", lambda request, link: asked.append(link) or request != "b")
    claimed: Any = one.claim_ended(7, Claim(b"key", None))
    assert [found.request for found in claimed] == ["a", "c"] and asked == [7, 7, 7]

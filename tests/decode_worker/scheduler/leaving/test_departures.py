"""A leaving decode worker alone: what it refuses, when it yields, whom it serves, and when its blocks go. The router's
side is tried in tests/router/core/leaving/test_moves.py, both together in tests/integration/test_leaving.py, with
faults at every step in tests/sim."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from decode_worker.scheduler.events import Command, FromPeer, FromRouter, PeerUp, RouterLost, Tell
from decode_worker.scheduler.scheduler import DecodeScheduler
from engine.kv.groups import LayerGroup
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.tiers import Tiers
from engine.messages import (
    Accepted,
    Cancel,
    Ended,
    Fault,
    FirstToken,
    Handoff,
    Landed,
    Offer,
    Orphan,
    PeerAddress,
    Place,
    PrefillFailed,
    Record,
    Refused,
    Release,
    RouterHello,
    StartPrefill,
    Stop,
    Tokens,
    Yield,
    Yielded,
)
from engine.plan import STAGES
from engine.step import DeadEnd, Drawn, DrawnRun, StepPlan
from engine.types import FinishReason, Incarnation, RequestId, RequestRecord, SamplingParams
from transfer.handoff.commands import (
    Emit,
    FromReader,
    Leave,
    Posted,
    PostSend,
    ReaderDead,
    ReaderLost,
    ReaderUp,
    Sent,
)
from transfer.handoff.receiver import KVReceiver
from worker.config import DecodeConfig

ME, SOURCE, READER = Incarnation(1), Incarnation(2), Incarnation(3)
A = RequestId("a")
PROMPT = list(range(100, 110))
LINK = 4


class Bench:
    """A scheduler of 4-token blocks; every step draws the next of 1, 2, 3 …; sends end at once, landings are told."""

    def __init__(
        self, blocks: int = 32, tiers: Tiers | None = None, groups: Sequence[LayerGroup] = (), **config: int
    ) -> None:
        own = DecodeConfig(**config)  # type: ignore[arg-type]
        self.scheduler = DecodeScheduler(
            config=own,
            kv=KVCacheManager(blocks, 4, "m", tiers, groups, ahead_tokens=2 * (own.local_chunk_tokens + 1)),
            receiver=KVReceiver(),
            name="decode-0",
            incarnation=ME,
            fingerprint="m",
            vocab=1000,
            context_tokens=256,
            stop_ids=frozenset(),
            block_bytes=1,
        )
        self.now = 0.0
        self.drawn = 0
        self.told: list[Record] = []
        self.emitted: list[Record] = []
        self.sends: list[PostSend] = []

    def tell(self, event: object) -> None:
        self._do(self.scheduler.handle(event, self.now))  # type: ignore[arg-type]
        self.scheduler.check()

    def router(self, record: object) -> None:
        self.tell(FromRouter(LINK, record))  # type: ignore[arg-type]

    def step(self) -> StepPlan | None:
        self.now += 1.0
        self._do(self.scheduler.tick(self.now))
        plan, commands = self.scheduler.plan(self.now)
        self._do(commands)
        if plan is not None:
            drawn = [self.drawn + n + 1 for n, row in enumerate(r for r in plan.rows if r.draw)]
            self.drawn += len(drawn)
            self._do(self.scheduler.complete(plan, drawn, self.now))
        self.scheduler.check()
        return plan

    def plan(self) -> StepPlan | None:
        """Plan a step, and leave it under way."""
        plan, commands = self.scheduler.plan(self.now)
        self._do(commands)
        return plan

    def complete(self, plan: StepPlan | None, drawn: Drawn) -> None:
        """End a step of one row that draws."""
        assert plan is not None
        self._do(self.scheduler.complete(plan, [drawn], self.now))
        self.scheduler.check()

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Tell(_, record):
                    self.told.append(record)
                case Emit(_, record):
                    self.emitted.append(record)
                case PostSend(_, move, blocks):
                    self.sends.append(command)
                    self.tell(Posted(move.handoff, move.seq, tuple(0 for _ in blocks)))
                    self.tell(Sent(move.handoff, move.seq, "", 0.0))

    def running(self, tokens: int = 3, max_tokens: int = 12, **more: object) -> list[int]:
        """Request A, prefilled here, with so many output tokens; returns all its tokens."""
        record = RequestRecord(
            request=A,
            tokens=list(PROMPT),
            prompt_tokens=len(PROMPT),
            max_tokens=max_tokens,
            seed=0,
            sampling=SamplingParams(temperature=0.0),
            **more,  # type: ignore[arg-type]
        )
        self.router(Place(record=record, placement=1, prefill=PeerAddress("", "")))
        for _ in range(tokens):
            self.step()
        return [*PROMPT, *(i for r in self.told if isinstance(r, Tokens) for i in r.ids)]

    def ask(self, tokens: list[int], have: int = 0, attempt: int = 0) -> Handoff:
        handoff = Handoff(A, 2, attempt, READER, ME)
        record = RequestRecord(
            request=A, tokens=tokens, prompt_tokens=len(PROMPT), max_tokens=12, seed=0
        )
        start = StartPrefill(handoff=handoff, record=record, have_tokens=have)
        self.tell(FromReader(READER, start))
        return handoff

    def land_all(self) -> None:
        for send in self.sends:
            self.tell(FromReader(READER, Landed(send.move.handoff, send.move.seq)))
        self.sends.clear()

    def of(self, kind: type[Record]) -> list[Record]:
        return [record for record in [*self.told, *self.emitted] if isinstance(record, kind)]

    @property
    def pool(self) -> dict[str, int]:
        return {state: n for state, n in self.scheduler.kv.pool.counts().items() if n}


def depart(bench: Bench, tokens: int = 3) -> list[int]:
    """Request A yielded and complete: its last row computed, the next token drawn."""
    whole = bench.running(tokens)
    bench.tell(Leave(30.0))
    bench.router(Yield(A, 1))
    bench.step()
    return whole


def test_a_leaving_worker_takes_nothing_and_yields_what_it_has() -> None:
    """Guards against tokens told after the yield, which nobody would believe, and work taken that must move again."""
    bench = Bench()
    whole = depart(bench)
    (yielded,) = bench.of(Yielded)
    assert isinstance(yielded, Yielded) and yielded.stats.output_tokens == 3
    assert bench.told[-1] is yielded and len(whole) == 13
    assert bench.scheduler.running_requests == 0 and not bench.scheduler.is_idle
    record = RequestRecord(
        request=RequestId("b"), tokens=[1], prompt_tokens=1, max_tokens=2, seed=0
    )
    bench.router(Place(record=record, placement=1, prefill=PeerAddress("", "")))
    assert isinstance(bench.told[-1], Refused)


def test_whoever_goes_on_gets_every_block_and_the_next_token() -> None:
    """Guards against a move that lacks the last row, or the token behind it; and blocks that stay for ever."""
    bench = Bench()
    whole = depart(bench)
    bench.tell(ReaderUp(READER, True))
    bench.ask(whole, have=4)
    offers = bench.of(Offer)
    assert [b.index for o in offers if isinstance(o, Offer) for b in o.blocks] == [1, 2, 3]
    (first,) = bench.of(FirstToken)
    assert isinstance(first, FirstToken) and first.token == bench.drawn and first.chunks == 1
    assert first.cached_tokens == len(PROMPT)
    assert len(bench.of(Tokens)) == 3, "the next token is the next worker's to tell"
    bench.router(Release(A, 1))
    assert bench.pool["active"] == 4, "freed while it is read"
    bench.land_all()
    assert bench.scheduler.is_idle and bench.pool == {"free": 28, "cached": 4}


def test_a_reader_that_is_early_gets_whole_blocks_at_once() -> None:
    bench = Bench()
    whole = bench.running()
    bench.tell(ReaderUp(READER, True))
    bench.tell(Leave(30.0))
    bench.router(Yield(A, 1))
    bench.now += 1.0
    plan, commands = bench.scheduler.plan(bench.now)
    assert plan is not None and isinstance(commands[0], Tell)
    bench.ask(whole)
    assert [b.index for o in bench.of(Offer) if isinstance(o, Offer) for b in o.blocks] == [0, 1, 2]
    assert not bench.of(FirstToken)
    bench._do(bench.scheduler.complete(plan, [77], bench.now))
    (first,) = bench.of(FirstToken)
    assert isinstance(first, FirstToken) and (first.token, first.chunks) == (77, 2)


def test_a_run_is_computed_to_its_end_though_steps_are_planned_ahead() -> None:
    """Guards a departure that waits until everybody else has ended: a step had no room for all of its run, and whoever
    departs has rows only in steps behind which nothing is under way."""
    bench = Bench(64, local_chunk_tokens=2)
    bench.running(7, max_tokens=60)
    other = RequestRecord(request=RequestId("b"), tokens=[1, 2], prompt_tokens=2, max_tokens=60, seed=0)
    bench.router(Place(record=other, placement=1, prefill=PeerAddress("", "")))
    bench.step()
    bench.step()
    plan, _ = bench.scheduler.plan(bench.now)
    assert plan is not None and [row.request for row in plan.rows] == [A, "b"]
    drawn = [DrawnRun((90, 91, 92, 93, 94, 95)) if row.request == A else 7 for row in plan.rows]
    bench._do(bench.scheduler.complete(plan, drawn, bench.now))
    bench.tell(Leave(30.0))
    bench.router(Yield(A, 1))
    under_way, computed = list[StepPlan](), 0
    for _ in range(12):
        plan, commands = bench.scheduler.plan(bench.now)
        bench._do(commands)
        if plan is not None:
            under_way.append(plan)
            computed += sum(row.end - row.start for row in plan.rows if row.request == A)
        if plan is None or len(under_way) == 2:
            one = under_way.pop(0)
            bench._do(bench.scheduler.complete(one, [8 for row in one.rows if row.draw], bench.now))
        bench.scheduler.check()
    assert computed == 6 and bench.scheduler.running_requests == 1


def test_another_attempt_is_served_until_the_release() -> None:
    """Guards against KV that is gone when the first who asked for it fails."""
    bench = Bench()
    whole = depart(bench)
    bench.tell(ReaderUp(READER, True))
    first = bench.ask(whole)
    bench.tell(FromReader(READER, Stop(first)))
    bench.sends.clear()
    assert not bench.scheduler.is_idle
    bench.ask(whole, have=8, attempt=1)
    assert len(bench.of(FirstToken)) == 2
    bench.land_all()
    bench.router(Release(A, 7))
    assert not bench.scheduler.is_idle, "a release of another placement"
    bench.router(Release(A, 1))
    assert bench.scheduler.is_idle


@pytest.mark.parametrize("what", ["unknown", "other tokens", "too much"])
def test_what_cannot_be_served_is_said_at_once(what: str) -> None:
    """Guards against a reader that waits for blocks that will never come, or gets those of other tokens."""
    bench = Bench()
    whole = depart(bench)
    bench.tell(ReaderUp(READER, True))
    if what == "unknown":
        bench.router(Release(A, 1))
    asked = [*whole, 5] if what == "other tokens" else whole
    bench.ask(asked, have=len(whole) if what == "too much" else 0)
    (failed,) = bench.of(PrefillFailed)
    assert isinstance(failed, PrefillFailed) and failed.fault.code == "UNAVAILABLE"
    assert not bench.of(Offer)


def test_a_lost_reader_keeps_its_blocks_in_quarantine_until_it_is_dead() -> None:
    bench = Bench()
    whole = depart(bench)
    bench.tell(ReaderUp(READER, True))
    bench.ask(whole)
    bench.tell(ReaderLost(READER))
    assert "quarantined" not in bench.pool, "another reader may come"
    bench.router(Release(A, 1))
    assert bench.pool["quarantined"] == 4 and not bench.scheduler.is_idle
    bench.tell(ReaderDead(READER))
    assert bench.scheduler.is_idle and bench.pool["cached"] == 4


@pytest.mark.parametrize("how", ["cancel", "deadline", "router lost"])
def test_whatever_ends_the_request_ends_its_departure(how: str) -> None:
    """Guards blocks that a leaving worker keeps, and so a worker that never leaves."""
    bench = Bench()
    bench.running(remaining_s=30.0)
    bench.tell(Leave(300.0))
    bench.router(Yield(A, 1))
    bench.step()
    assert not bench.scheduler.is_idle
    if how == "cancel":
        bench.router(Cancel(A, 1, FinishReason.CANCELLED))
        assert isinstance(bench.told[-1], Ended)
    elif how == "deadline":
        bench.now = 31.0
        bench.step()
    else:
        bench.tell(RouterLost(LINK))
    assert bench.scheduler.is_idle


def test_a_yield_waits_until_the_kv_is_complete() -> None:
    """Guards against a request that is handed on with blocks that have not landed here."""
    bench = Bench()
    record = RequestRecord(
        request=A, tokens=list(PROMPT), prompt_tokens=len(PROMPT), max_tokens=12, seed=0
    )
    address = PeerAddress("prefill-0", "p:1")
    bench.tell(PeerUp(SOURCE, address, "shm", 4))
    bench.router(Place(record=record, placement=1, prefill=address))
    handoff = Handoff(A, 1, 0, ME, SOURCE)
    first = FirstToken(
        handoff=handoff, token=5, chunks=1, queue_s=0.0, run_s=0.0, cached_tokens=0
    )
    bench.tell(FromPeer(SOURCE, first))
    bench.tell(Leave(30.0))
    bench.router(Yield(A, 1))
    assert bench.step() is None and not bench.of(Yielded)
    assert [type(r) for r in bench.told] == [Accepted, Tokens]


@pytest.mark.parametrize("asked", [False, True])
def test_a_router_that_dies_in_a_move_loses_nobody_who_comes_back(asked: bool) -> None:
    """Guards the request that no router knows of, between two decode workers: who has it says so to the next router.
    `asked`: the other worker has been here, and will say so itself."""
    bench = Bench()
    bench.running(context=b"resumable")
    bench.tell(Leave(300.0))
    bench.router(Yield(A, 1))
    bench.step()
    if asked:
        bench.tell(ReaderUp(READER, True))
        bench.ask([*PROMPT, 1, 2, 3])
        bench.land_all()
    bench.tell(RouterLost(LINK))
    assert bench.scheduler.is_idle == asked
    bench.tell(FromRouter(LINK + 1, RouterHello(Incarnation(9))))
    orphans = [record for record in bench.told if isinstance(record, Orphan)]
    assert [orphan.tokens for orphan in orphans] == ([] if asked else [[1, 2, 3, 4]])
    while bench.step() is not None:
        pass
    assert bench.scheduler.is_idle
    if not asked:
        ended = bench.told[-1]
        assert isinstance(ended, Ended) and ended.stats.output_tokens == 12
        assert not ended.stats.stages.keys() - {*STAGES}


def test_an_orphan_forgets_that_it_was_to_be_yielded() -> None:
    """Guards a request whose yield still waited for its blocks when the router died: it must not depart with nobody to
    be told of it, since the next router then never hears of it."""
    bench = Bench()
    record = RequestRecord(
        request=A,
        tokens=list(PROMPT),
        prompt_tokens=len(PROMPT),
        max_tokens=3,
        seed=0,
        context=b"resumable",
    )
    bench.router(Place(record=record, placement=1, prefill=PeerAddress("", "")))
    bench.tell(Leave(30.0))
    bench.router(Yield(A, 1))
    bench.tell(RouterLost(LINK))
    bench.step()
    bench.step()
    bench.tell(FromRouter(LINK + 1, RouterHello(Incarnation(9))))
    (told,) = [record for record in bench.told if isinstance(record, Orphan)]
    assert told.record.request == A and told.tokens == [1, 2]


def test_only_a_leaving_worker_yields() -> None:
    """Guards the rule that between two lives blocks go one way only."""
    bench = Bench()
    bench.running()
    bench.router(Yield(A, 1))
    bench.step()
    assert not bench.of(Yielded) and bench.scheduler.running_requests == 1


def test_a_departure_is_computed_once_and_kept_while_nobody_lets_it_go() -> None:
    """Guards steps that draw a second token, and blocks that are gone because time passes, or another router leaves."""
    bench = Bench()
    depart(bench)
    assert bench.step() is None
    bench.tell(RouterLost(LINK + 5))
    bench.now += 1_000.0
    assert bench.step() is None and not bench.scheduler.is_idle


def test_a_departure_lasts_to_its_deadline_and_no_longer() -> None:
    bench = Bench()
    bench.running(remaining_s=30.0)
    bench.tell(Leave(300.0))
    bench.router(Yield(A, 1))
    bench.step()
    bench.now = 28.0
    bench.step()
    assert not bench.scheduler.is_idle
    bench.step()
    assert bench.now == 30.0 and bench.scheduler.is_idle
    assert bench.scheduler.departures.source.quarantined_since == [], "nobody read it"


def test_what_is_told_with_the_next_token_is_true() -> None:
    """Guards the next account of the request: how long its reader waited, and how much of the prompt was here."""
    bench = Bench()
    whole = bench.running(tokens=1)
    assert len(whole) == len(PROMPT) + 1
    bench.tell(ReaderUp(READER, True))
    bench.tell(Leave(30.0))
    bench.router(Yield(A, 1))
    plan, _ = bench.scheduler.plan(bench.now)
    assert plan is not None
    bench.ask(whole)
    bench.now += 2.0
    bench._do(bench.scheduler.complete(plan, [77], bench.now))
    (first,) = bench.of(FirstToken)
    assert isinstance(first, FirstToken)
    assert (first.queue_s, first.run_s, first.cached_tokens) == (0.0, 2.0, len(PROMPT))


@pytest.mark.parametrize("have", [0, 12])
def test_a_reader_may_have_all_but_the_last_token(have: int) -> None:
    bench = Bench()
    whole = depart(bench)
    bench.tell(ReaderUp(READER, True))
    bench.ask(whole, have=have)
    assert bench.of(FirstToken) and not bench.of(PrefillFailed)


def test_a_reader_of_another_tenant_or_with_less_than_nothing_gets_nothing() -> None:
    """Guards another namespace's KV, which the same tokens would name."""
    bench = Bench()
    whole = depart(bench)
    bench.tell(ReaderUp(READER, True))
    bench.ask(whole, have=-1)
    record = RequestRecord(
        request=A, tokens=whole, prompt_tokens=len(PROMPT), max_tokens=12, seed=0, namespace=b"other"
    )
    bench.tell(FromReader(READER, StartPrefill(handoff=Handoff(A, 2, 1, READER, ME), record=record, have_tokens=0)))
    assert len(bench.of(PrefillFailed)) == 2 and not bench.of(Offer)


@pytest.mark.parametrize("first", ["released", "lost"])
def test_blocks_are_in_quarantine_from_when_only_lost_readers_keep_them(first: str) -> None:
    """Guards the age of a quarantine, and a reader that is served from blocks which are never written again."""
    bench = Bench()
    whole = depart(bench)
    bench.tell(ReaderUp(READER, True))
    bench.ask(whole)
    bench.now = 50.0
    events = [lambda: bench.router(Release(A, 1)), lambda: bench.tell(ReaderLost(READER))]
    for event in events if first == "released" else reversed(events):
        assert "quarantined" not in bench.pool
        event()
        bench.now += 10.0
    assert bench.pool["quarantined"] == 4
    bench.router(Cancel(A, 1, FinishReason.CANCELLED))
    other = Incarnation(8)
    bench.tell(ReaderUp(other, True))
    bench.tell(
        FromReader(
            other,
            StartPrefill(
                handoff=Handoff(A, 2, 1, other, ME),
                record=RequestRecord(request=A, tokens=whole, prompt_tokens=len(PROMPT), max_tokens=12, seed=0),
                have_tokens=0,
            ),
        )
    )
    assert bench.of(PrefillFailed)
    bench.tell(ReaderDead(READER))
    assert bench.scheduler.departures.source.quarantined_since == [60.0]
    assert bench.pool == {"free": 28, "cached": 4}


def test_a_router_that_dies_before_the_last_row_is_computed() -> None:
    """Guards an answer with a token that nobody drew: the request runs on here, from where it was."""
    bench = Bench()
    bench.running(context=b"resumable")
    bench.tell(Leave(300.0))
    bench.router(Yield(A, 1))
    plan, commands = bench.scheduler.plan(bench.now)
    bench._do(commands)
    assert plan is not None and bench.of(Yielded)
    bench.tell(RouterLost(LINK))
    (request,) = bench.scheduler._requests.values()
    assert request.tokens == [*PROMPT, 1, 2, 3]
    bench._do(bench.scheduler.complete(plan, [77], bench.now))
    assert request.tokens == [*PROMPT, 1, 2, 3, 77]


def test_a_reader_that_is_lost_before_the_last_row_is_offered_no_more() -> None:
    """Guards the worker: to offer blocks to a lost reader is a mistake of its own, which ends it."""
    bench = Bench()
    whole = bench.running()
    bench.tell(ReaderUp(READER, True))
    bench.tell(Leave(30.0))
    bench.router(Yield(A, 1))
    plan, _ = bench.scheduler.plan(bench.now)
    assert plan is not None
    bench.ask(whole)
    bench.tell(ReaderLost(READER))
    bench._do(bench.scheduler.complete(plan, [77], bench.now))
    assert len(bench.of(Offer)) == 1 and not bench.of(FirstToken)


def test_who_is_taken_back_before_its_last_row_says_nothing_yet() -> None:
    """Guards a client's stream: all of its tokens would come again, the prompt's among them."""
    bench = Bench()
    bench.running(context=b"x")
    bench.tell(Leave(30.0))
    bench.router(Yield(A, 1))
    plan, commands = bench.scheduler.plan(bench.now)
    bench._do(commands)
    assert plan is not None and bench.of(Yielded)
    before = len(bench.of(Tokens))
    bench.tell(RouterLost(LINK))
    assert bench.scheduler._requests and len(bench.of(Tokens)) == before
    bench._do(bench.scheduler.complete(plan, [77], bench.now))
    bench.scheduler.check()


def test_a_dead_end_of_one_that_is_gone_or_of_another_life_ends_nobody() -> None:
    """Guards a departure that has the name of one that was let go while its last row was computed."""
    bench = Bench()
    bench.running()
    bench.tell(Leave(30.0))
    bench.router(Yield(A, 1))
    bench.step()
    departures, why = bench.scheduler.departures, DeadEnd("INVALID_ARGUMENT", "no token can follow")
    (departure,) = departures._departures.values()
    other = replace(departure.request, placement=9)
    drawn = departure.drawn
    assert departures.give_up(other, why, 1.0) == departures.complete(other, (9,), 1.0) == []
    assert list(departures._departures.values()) == [departure] and departure.drawn == drawn
    for _ in range(2):
        assert departures.give_up(departure.request, why, 1.0) == [] and not departures._departures
    assert departures.complete(departure.request, (9,), 1.0) == []


def test_a_dead_end_of_one_that_departs_is_told_to_who_asks_and_to_no_router() -> None:
    """Guards a request that goes on elsewhere: the router that has placed it there again would hear of its end."""
    bench = Bench()
    bench.running()
    bench.tell(Leave(30.0))
    bench.router(Yield(A, 1))
    plan, commands = bench.scheduler.plan(1.0)
    bench._do(commands)
    assert plan is not None and bench.of(Yielded)
    bench.told.clear()
    bench._do(bench.scheduler.complete(plan, [DeadEnd("INVALID_ARGUMENT", "no token can follow")], 1.0))
    assert not bench.told and not bench.scheduler.departures._departures
    bench.scheduler.check()


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("have", [0, 12], ids=["all of it", "what was computed"])
def test_a_dead_end_behind_all_that_was_landed_ends_the_departure(have: int, readers: int) -> None:
    """Guards a leaving worker that died of a request's end, and all its others with it: readers who owe it nothing are
    settled by the failure itself."""
    bench = _departing()
    plan = bench.plan()
    for attempt in range(readers):
        handoff = bench.ask([*PROMPT, 1, 2, 3], have, attempt)
        for sent in [one for one in bench.sends if one.move.handoff == handoff]:
            bench.tell(FromReader(READER, Landed(handoff, sent.move.seq)))
    bench.complete(plan, DeadEnd("nothing can follow"))
    failed = [record.fault for record in bench.emitted if isinstance(record, PrefillFailed)]
    assert failed == [Fault("INVALID_ARGUMENT", "nothing can follow", "constraint")] * readers
    assert bench.plan() is None and not bench.scheduler.departures
    bench.ask([*PROMPT, 1, 2, 3], 0, readers)
    refused = bench.emitted[-1]
    assert isinstance(refused, PrefillFailed) and refused.fault.code == "UNAVAILABLE"


def test_a_dead_end_is_computed_once_while_its_reader_still_reads() -> None:
    """Guards against a row without tokens in each step from then on, of which the model's step dies."""
    bench = _departing()
    plan = bench.plan()
    handoff = bench.ask([*PROMPT, 1, 2, 3])
    bench.complete(plan, DeadEnd("nothing can follow"))
    assert bench.plan() is None, "nothing of it is left to compute"
    other = bench.ask([*PROMPT, 1, 2, 3], 0, 1)
    assert bench.emitted[-1] == PrefillFailed(other, Fault("UNAVAILABLE", "no token can follow it"))
    for sent in bench.sends:
        bench.tell(FromReader(READER, Landed(handoff, sent.move.seq)))
    assert [type(record) for record in bench.emitted].count(PrefillFailed) == 2
    assert not bench.scheduler.departures and "0 active, 0 reserved, 0 quarantined" in repr(bench.scheduler.kv)


def _departing() -> Bench:
    """With three output tokens, yielded while its last row is to be computed."""
    bench = Bench()
    bench.running()
    bench.tell(Leave(60.0))
    bench.router(Yield(A, 1))
    bench.tell(ReaderUp(READER, True))
    return bench

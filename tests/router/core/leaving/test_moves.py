"""Requests on workers that leave, event by event: who is asked for, when, from whom its KV comes, and what it cost. The
leaving worker's side is tried in tests/decode_worker/scheduler/leaving/test_departures.py, both together in
tests/integration/test_leaving.py, with faults in tests/sim."""

import msgspec
import pytest

from engine.messages import (
    Accepted,
    Cancel,
    NeedPrefill,
    Place,
    Release,
    RequestStats,
    Tokens,
    UsePrefill,
    WorkerInfo,
    Yield,
    Yielded,
)
from engine.types import FinishReason, RequestId, RequestRecord
from router.core.call import Call, State
from router.core.core import MOVES_S
from router.core.events import (
    Begin,
    ClientLeft,
    Complete,
    Deliver,
    Ignored,
    Lost,
    Moved,
    StopFound,
    TellWorker,
)
from router.core.leaving import moves
from router.core.leaving.moves import due_moves
from router.core.policy import Demand
from router.core.worker_views import demand
from tests.router.bench import A, B, Bench, ended, is_told
from tests.router.core.parts import Parts, request_record
from tests.router.core.test_recovery import running
from tests.router.fake_cluster import load

C = RequestId("c")
SPENT = RequestStats(
    stages={"prefill_run": 2.0, "decode_run": 3.0},
    prefill_cached_tokens=16,
    decode_cached_tokens=8,
    migrated_blocks=3,
    migrated_bytes=300,
)


def leave(bench: Bench, worker: str, **more: int) -> list[object]:
    """What the worker's report brings about."""
    return list(bench.hear(msgspec.structs.replace(load(**more), leaving=True), worker))


def yielded(request: RequestId = A, placement: int = 1) -> Yielded:
    return Yielded(request=request, placement=placement, stats=SPENT)


def moving(bench: Bench, *ids: int) -> tuple[str, TellWorker]:
    """A request that was yielded by its worker, and its next placement."""
    home = running(bench, *ids)
    assert leave(bench, home) == [TellWorker(home, Yield(A, 1))]
    moved, place = bench.hear(yielded(), home)
    assert moved == Moved(A, home, SPENT.stages) and is_told(place, Place)
    return home, place


def test_a_request_goes_on_from_the_kv_that_it_leaves_behind() -> None:
    """Guards against a move that computes anything again, blames anybody, or keeps the source's blocks for ever."""
    bench = Bench(decodes=2)
    home, place = moving(bench, 7, 8)
    record = place.record.record
    assert place.worker != home and place.record.prefill.name == home
    assert record.tokens == [*range(40), 7, 8] and place.record.placement == 2
    assert bench.accept(A, 2, place.worker) == [Begin(A)]
    assert bench.hear(Tokens(A, 2, 2, [9]), place.worker) == [
        Deliver(A, [9]),
        TellWorker(home, Release(A, 1)),
    ]
    assert bench.hear(Tokens(A, 2, 3, [10]), place.worker) == [Deliver(A, [10])]
    call = bench.router._calls[A]
    assert call.losses == 0 and not call.victims
    last = ended(A, 2, FinishReason.STOP, output_tokens=4, migrated_blocks=4, migrated_bytes=400)
    (done,) = bench.hear(last, place.worker)
    assert isinstance(done, Complete)
    stats = done.stats
    assert (stats.prefill_cached_tokens, stats.decode_cached_tokens) == (16, 8)
    assert (stats.migrated_blocks, stats.migrated_bytes) == (7, 700)


def test_nobody_is_asked_for_what_no_other_worker_could_hold() -> None:
    """Guards against a request that stops running only to wait in line."""
    bench = Bench(decodes=2, blocks=6)
    home = running(bench, 7)
    other = {"d0": "d1", "d1": "d0"}[home]
    bench.hear(load(active=4, blocks=6), other)
    assert leave(bench, home) == [] and not bench.router._calls[A].yielding
    assert bench.hear(load(blocks=6), other) == [], "it was asked a moment ago: reports come by the hundred"
    bench.now += MOVES_S
    assert bench.hear(load(blocks=6), other) == [TellWorker(home, Yield(A, 1))]


def test_a_few_at_a_time_and_not_those_without_tokens() -> None:
    """Guards against a whole batch that stands still while it moves, and a prompt that is moved half computed."""
    bench = Bench(moves_at_once=1)
    for name in (A, B, C):
        bench.submit(name, tokens=20, max_tokens=8)
        bench.accept(name)
        if name != A:
            bench.hear(Tokens(name, 1, 0, [5]))
    bench.join("d1", "decode", 1)
    assert leave(bench, "d0") == [TellWorker("d0", Yield(B, 1))]
    assert leave(bench, "d0") == []
    _, place = bench.hear(yielded(B))
    assert is_told(place, Place) and place.record.prefill.name == "d0"
    assert leave(bench, "d0") == [], "the first move is not over"
    bench.accept(B, 2, "d1")
    assert bench.hear(Tokens(B, 2, 1, [6]), "d1") == [
        Deliver(B, [6]),
        TellWorker("d0", Release(B, 1)),
        TellWorker("d0", Yield(C, 1)),
    ]


def test_the_last_token_is_not_worth_a_move() -> None:
    bench = Bench(decodes=2)
    home = running(bench, 1, 2, max_tokens=3)
    assert leave(bench, home) == []


def test_a_leaving_worker_gets_nothing_new_but_is_alive() -> None:
    """Guards against placements on a worker that says no, and against requests that fail while it finishes."""
    bench = Bench(prefills=2)
    leave(bench, "p0")
    (place,) = bench.submit(A)
    assert is_told(place, Place) and place.record.prefill.name == "p1"
    leave(bench, "d0")
    assert bench.submit(B) == []
    bench.now = 9.0
    leave(bench, "d0")
    assert bench.router.waiting == 1
    (place,) = bench.join("d1", "decode", 1)
    assert is_told(place, Place) and place.worker == "d1"


def test_a_prefill_worker_that_has_left_is_no_victim() -> None:
    """Guards a request that meets two leaving workers against being refused as poisonous."""
    bench = Bench(prefills=3)
    bench.submit(A)
    bench.accept(A)
    for _ in range(2):
        name = bench.router._calls[A].prefill
        leave(bench, name)
        bench.do(Lost(name))
        (answer,) = bench.hear(NeedPrefill(A, 1, name))
        assert is_told(answer, UsePrefill) and answer.record.prefill is not None
    assert not bench.router._calls[A].victims


def test_a_worker_that_ends_with_requests_in_hand_had_said_so() -> None:
    """Guards the budget and the patience for losses against workers that leave before all has moved."""
    bench = Bench(decodes=2, max_placements=1, retry_reserve=0)
    home = running(bench, 7)
    bench.hear(load(active=63), {"d0": "d1", "d1": "d0"}[home])
    assert leave(bench, home) == []
    bench.do(Lost(home))
    call = bench.router._calls[A]
    assert call.losses == 0 and not call.victims and call.record.tokens[-1] == 7


@pytest.mark.parametrize("again", [True, False])
def test_the_next_worker_dies_before_its_first_token(again: bool) -> None:
    """Guards against KV that is forgotten with the first who came for it; `again`: nothing has been emitted since."""
    bench = Bench(decodes=3)
    home, place = moving(bench, 7)
    bench.accept(A, 2, place.worker)
    if not again:
        bench.hear(Tokens(A, 2, 1, [8]), place.worker)
    *_, third = bench.do(Lost(place.worker))
    assert is_told(third, Place)
    assert third.record.prefill.name == (home if again else "p0")


def test_a_source_that_dies_is_replaced_by_a_prefill_worker() -> None:
    bench = Bench(decodes=2)
    home, place = moving(bench, 7)
    bench.accept(A, 2, place.worker)
    bench.do(Lost(home))
    (answer,) = bench.hear(NeedPrefill(A, 2, home), place.worker)
    assert is_told(answer, UsePrefill) and answer.record.prefill is not None
    assert answer.record.prefill.name == "p0"
    assert bench.hear(Tokens(A, 2, 1, [8]), place.worker) == [Deliver(A, [8])]


def test_a_source_that_will_not_do_is_released() -> None:
    bench = Bench(decodes=2)
    home, place = moving(bench, 7)
    bench.accept(A, 2, place.worker)
    release, answer = bench.hear(NeedPrefill(A, 2, home), place.worker)
    assert release == TellWorker(home, Release(A, 1)) and is_told(answer, UsePrefill)


def test_ends_that_cross_the_yield() -> None:
    """Guards against a client that never hears of its end, and blocks kept for a request that is over."""
    bench = Bench(decodes=2)
    home = running(bench, 5, 6, 7)
    leave(bench, home)
    bench.do(StopFound(A, 2))
    release, done = bench.hear(yielded(), home)
    assert release == TellWorker(home, Release(A, 1)) and isinstance(done, Complete)
    assert done.stats.output_tokens == 2 and bench.router.open == 0

    bench = Bench(decodes=2)
    home = running(bench, 5)
    leave(bench, home)
    told = bench.do(ClientLeft(A))[-1]
    assert told == TellWorker(home, Cancel(A, 1, FinishReason.CANCELLED))
    assert bench.hear(yielded(), home) == [TellWorker(home, Release(A, 1))]
    assert bench.router.open == 0


def test_a_client_that_leaves_while_it_waits_frees_the_source() -> None:
    bench = Bench(decodes=2)
    home, place = moving(bench, 7)
    bench.hear(load(active=63), place.worker)
    bench.do(Lost(place.worker))
    assert bench.router.waiting == 1
    assert bench.do(ClientLeft(A))[-1] == TellWorker(home, Release(A, 1))


def test_what_a_ghost_yields_is_released() -> None:
    """Guards blocks that a worker keeps for a placement which the router has given up."""
    bench = Bench(decodes=2)
    assert bench.hear(yielded(C, 4), "d0") == [
        TellWorker("d0", Release(C, 4)),
        Ignored("stale", 0),
    ]


def test_a_yield_before_the_acceptance_is_not_believed() -> None:
    bench = Bench()
    bench.submit(A)
    assert bench.hear(yielded()) == [Ignored("early", 0)]
    assert bench.hear(Accepted(A, 1, 0)) == [Begin(A)]


class Leaving(Parts):
    """A decode worker that leaves, `d0`, and another of eight blocks. Every request needs four."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("d0", "d1"):
            self.join(name, blocks=8)
        self.report("d0", leaving=True)
        self.report("d1", blocks=8)

    def call(self, name: str, state: State = State.RUNNING, emitted: int = 1) -> Call:
        call = self.table.open(request_record(name), None, state)
        call.emitted.extend(range(emitted))
        if state is not State.WAITING:
            call.decode = "d0"
        return call

    def due(self, at_once: int = 8) -> list[str]:
        leaving = [worker for worker in self.registry if worker.leaving]
        due = due_moves(self.table.calls.values(), leaving, self.placer, at_once, 0.0)
        return [call.record.request for call in due]


@pytest.mark.parametrize("older", [True, False])
def test_who_waits_and_is_older_is_placed_first(older: bool) -> None:
    """Guards a request that leaves its worker to stand in line behind another one."""
    parts = Leaving()
    for name in ("waits", "runs") if older else ("runs", "waits"):
        parts.call(name, State.WAITING if name == "waits" else State.RUNNING)
    assert parts.due() == ([] if older else ["runs"])


@pytest.mark.parametrize("state", [State.WAITING, State.RUNNING])
def test_room_that_others_are_about_to_take_is_no_room(state: State) -> None:
    """Guards requests that move at the same time to where there is room for all but one of them."""
    parts = Leaving()
    parts.call("first")
    assert parts.due() == ["first"]
    for name in ("second", "third"):
        parts.call(name, state).yielding = state is State.RUNNING
    assert parts.due() == []


@pytest.mark.parametrize(("emitted", "due"), [(0, []), (1, ["a"]), (22, ["a"]), (23, [])])
def test_who_has_a_token_and_more_than_one_to_come_moves(emitted: int, due: list[str]) -> None:
    parts = Leaving()
    parts.call("a", emitted=emitted)
    assert parts.due() == due


@pytest.mark.parametrize(("at_once", "due"), [(1, ["a"]), (2, ["a", "b"]), (3, ["a", "b"])])
def test_so_many_move_at_a_time_as_there_is_room_for(at_once: int, due: list[str]) -> None:
    parts = Leaving()
    for name in "abc":
        parts.call(name)
    assert parts.due(at_once) == due


def test_what_moves_off_one_worker_counts_where_another_leaves_too() -> None:
    """Guards the room that two leaving workers' requests are to have: it is there once."""
    parts = Leaving()
    parts.join("d2", blocks=8)
    parts.report("d2", leaving=True)
    for name, home in (("a", "d0"), ("b", "d2"), ("c", "d2")):
        parts.call(name).decode = home
    assert parts.due() == ["a", "b"]


def test_all_that_wait_are_added_up_once_for_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the event loop, which looks at each report while a worker leaves: many run there, and many wait."""
    parts, asked = Leaving(), list[str]()

    def counted(record: RequestRecord, info: WorkerInfo) -> Demand:
        asked.append(record.request)
        return demand(record, info)

    monkeypatch.setattr(moves, "demand", counted)
    for i in range(10):
        parts.call(f"runs{i}")
    for i in range(20):
        parts.call(f"waits{i}", State.WAITING)
    assert parts.due() == [] and len(asked) == 20


@pytest.mark.parametrize("state", [State.OFFERED, State.FINISHING, State.CLOSING])
def test_only_who_runs_moves(state: State) -> None:
    """Guards an order that its worker could not follow: it has not taken the request yet, or is about to end it."""
    parts = Leaving()
    parts.call("a", state)
    assert parts.due() == []


def test_a_token_moves_nobody_unless_it_ends_a_move() -> None:
    """Guards the loop that every token passes: who leaves is looked at with the reports."""
    bench = Bench(decodes=2)
    bench.submit(A)
    home = bench.router._calls[A].decode
    bench.accept(worker=home)
    assert leave(bench, home) == []
    assert bench.hear(Tokens(A, 1, 0, [7]), home) == [Deliver(A, [7])]
    assert leave(bench, home) == [TellWorker(home, Yield(A, 1))]


def test_what_moves_off_one_worker_does_not_hold_up_another() -> None:
    parts = Leaving()
    parts.join("d2", blocks=8)
    parts.report("d2", leaving=True)
    parts.report("d1", blocks=64)
    parts.join("d3", blocks=64)
    parts.call("first").yielding = True
    parts.call("second").decode = "d2"
    assert parts.due(at_once=1) == ["second"]


def test_who_was_asked_to_move_is_not_asked_again() -> None:
    parts = Leaving()
    parts.call("a").yielding = True
    assert parts.due(3) == []

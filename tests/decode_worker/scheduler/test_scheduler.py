"""The scheduler as its shell sees it: events in, commands out, and what a worker says when it holds nothing. Its parts
have tests of their own beside this one; all of it together is what tests/sim and tests/integration try."""

import pytest

from decode_worker.scheduler.events import FromRouter, PeerDown, PeerUp, RouterLost
from decode_worker.scheduler.request import RequestState
from engine.messages import Cancel, Ended, Finish, Orphan, RouterHello, Tokens, UsePrefill, Yield, Yielded
from engine.types import BeamParams, FinishReason, Incarnation, RequestId
from tests.decode_worker.scheduler.bench import HERE, POOL, Fetching, P
from tests.decode_worker.scheduler.leaving.test_departures import LINK
from transfer.handoff.commands import Leave

PROMPT = list(range(10))
A = RequestId("a")


def test_what_is_no_event_ends_the_worker() -> None:
    """Guards against an event that is swallowed."""
    bench = Fetching()
    with pytest.raises(TypeError, match="not an event"):
        bench.scheduler.handle(object(), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", [1, 2])
def test_a_cancel_is_always_answered(placement: int) -> None:
    """Guards the router's CLOSING: it waits for the word that nothing is held here any more."""
    bench = Fetching()
    bench.place("a", PROMPT)
    bench.router(Cancel(A, placement, FinishReason.CANCELLED))
    ended = bench.last(Ended)
    assert isinstance(ended, Ended) and ended.placement == placement
    assert (A in bench.scheduler._requests) == (placement == 2), "another placement's word ends nothing"


def test_a_stop_string_cuts_the_answer_and_ends_it() -> None:
    bench = Fetching()
    bench.place("a", PROMPT)
    for _ in range(4):
        bench.step()
    bench.router(Finish(A, 1, 2))
    ended = bench.last(Ended)
    assert isinstance(ended, Ended) and ended.reason is FinishReason.STOP
    assert ended.stats.output_tokens == 2 and bench.scheduler.is_idle


def test_a_prompt_whose_first_token_is_its_last_is_never_ready() -> None:
    """Guards against a request that ended in a step and joins the batch in the same: it would draw on."""
    bench = Fetching()
    bench.place("a", PROMPT, max_tokens=1)
    bench.step()
    assert bench.of(Ended) and not bench.scheduler.batch.ready and bench.scheduler.is_idle
    assert len(bench.of(Tokens)) == 1


def test_who_is_counted_as_waiting_or_running() -> None:
    bench = Fetching()
    bench.place("a", PROMPT)
    bench.place("b", PROMPT, POOL)
    assert (bench.scheduler.running_requests, bench.scheduler.waiting_requests) == (0, 2)
    bench.step()
    bench.step()
    assert (bench.scheduler.running_requests, bench.scheduler.waiting_requests) == (1, 1)
    assert not bench.scheduler.is_idle


def test_a_leaving_worker_has_no_more_rows_in_a_step_than_its_memory_was_counted_for() -> None:
    """Guards a GPU that is full: all requests are yielded at once, those that wait for a row as well."""
    bench = Fetching(max_batch=2)
    for number in range(5):
        assert bench.place(f"r{number}", [50 * number, 1, 2], POOL)
        handoff = bench.asked().handoff
        bench.land(handoff)
        bench.name_token(handoff)
    bench.tell(Leave(30.0))
    for number in range(5):
        bench.router(Yield(RequestId(f"r{number}"), 1))
    rows = []
    while (plan := bench.step()) is not None:
        rows.append(len(plan.rows))
    assert rows == [2, 2, 1] and len(bench.of(Yielded)) == 5


def test_who_makes_way_for_another_does_so_before_the_step() -> None:
    """Guards a row that stays empty: a request that is ready takes that of one that has just been preempted."""
    bench = Fetching(growth_tokens=4, max_batch=2)
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        assert bench.place(name, [ord(name), 1, 2], max_tokens=40, priority=priority)
    requests = {name: bench.request(name) for name in "abc"}
    kv = bench.scheduler.kv
    while not bench.scheduler.batch.wants(requests["a"])[0][1]:
        bench.step()
    assert requests["c"].state is RequestState.READY
    assert kv.promise(b"", kv.available) is not None
    bench.scheduler.plan(bench.now)
    states = {name: request.state for name, request in requests.items()}
    assert states == {"a": RequestState.RUNNING, "b": RequestState.PREEMPTED, "c": RequestState.RUNNING}


def test_who_lacks_a_block_for_its_next_row_does_not_depart() -> None:
    """Guards a departure that could never be completed: it has all blocks that it will ever want."""
    bench = Fetching(5, growth_tokens=4, preemption="recompute")
    assert bench.place("a", list(range(7)), max_tokens=9)
    bench.step()
    lease = bench.scheduler.kv.acquire(b"", [], match_limit=0, room_tokens=8)
    assert lease is not None
    while bench.step() is not None:
        pass
    request = bench.request("a")
    assert len(request.tokens) == 13
    bench.tell(Leave(30.0))
    bench.router(Yield(RequestId("a"), 1))
    assert bench.step() is None and not bench.of(Yielded)
    bench.scheduler.kv.release(lease)
    assert bench.step() is not None and bench.of(Yielded)


def test_who_has_its_last_blocks_departs_though_no_more_are_there() -> None:
    bench = Fetching(5, growth_tokens=4, preemption="recompute")
    assert bench.place("a", list(range(7)), max_tokens=9)
    bench.step()
    assert bench.scheduler.kv.acquire(b"", [], match_limit=0, room_tokens=8) is not None
    while len(bench.request("a").tokens) < 12:
        bench.step()
    bench.tell(Leave(30.0))
    bench.router(Yield(RequestId("a"), 1))
    bench.step()
    assert bench.of(Yielded)


def test_a_search_is_not_yielded() -> None:
    """Guards a search that would be taken up by one of its hypotheses: it ends where it is."""
    bench = Fetching()
    assert bench.place("a", [1, 2, 3], beams=BeamParams(width=2, answers=1))
    bench.tell(Leave(30.0))
    bench.router(Yield(RequestId("a"), 1))
    assert not bench.request("a").yielding


@pytest.mark.parametrize("late", [UsePrefill(A, 1, POOL), Finish(A, 1, 0), Yield(A, 1)])
def test_orders_for_a_request_that_is_gone_change_nothing(late: object) -> None:
    """Guards the worker: a router's word may cross with the end of its request."""
    bench = Fetching()
    bench.router(late)
    assert not bench.told and bench.scheduler.is_idle


def test_slots_of_a_prompt_on_its_way_count_what_is_cached() -> None:
    """Guards utilization: of three reserved blocks two hold what an older answer left."""
    bench = Fetching()
    assert bench.place("old", list(range(10)), max_tokens=1)
    bench.step()
    assert bench.place("a", list(range(10)), POOL)
    assert bench.scheduler.slots == (8, 12)


def test_what_is_placed_again_is_not_told_as_ended() -> None:
    """Guards a client that would read an end in the middle: the request had ended once, and was placed anew."""
    bench = Fetching(orphan_s=30.0)
    bench.tell(FromRouter(LINK, RouterHello(Incarnation(11))))
    assert bench.place("a", [1, 2, 3], context=b"resumable", max_tokens=1)
    bench.step()
    assert bench.of(Ended)
    bench.told.clear()
    assert bench.place("a", [1, 2, 3], context=b"resumable", placement=2)
    bench.tell(RouterLost(LINK))
    assert not bench.scheduler.is_idle
    bench.tell(FromRouter(LINK + 1, RouterHello(Incarnation(12))))
    assert not bench.of(Ended) and len(bench.of(Orphan)) == 1


def test_a_worker_that_remembers_an_end_for_a_router_to_come_is_not_idle() -> None:
    """Guards an answer that is lost when a leaving worker goes before the next router has been told of it."""
    bench = Fetching(orphan_s=30.0)
    bench.tell(FromRouter(LINK, RouterHello(Incarnation(11))))
    assert bench.place("a", [1, 2, 3], context=b"resumable", max_tokens=1)
    bench.step()
    assert bench.scheduler.is_idle, "its router has been told"
    bench.tell(RouterLost(LINK))
    assert not bench.scheduler.is_idle
    bench.tell(FromRouter(LINK + 1, RouterHello(Incarnation(12))))
    assert bench.scheduler.is_idle


@pytest.mark.parametrize("state", [RequestState.HANDOFF, RequestState.LOCAL])
def test_the_account_of_what_is_cancelled_early_names_its_worker_and_its_time(state: RequestState) -> None:
    bench = Fetching(local_chunk_tokens=2)
    assert bench.place("a", list(range(10)), POOL if state is RequestState.HANDOFF else HERE)
    bench.step()
    bench.now = 3.0
    assert bench.request("a").state is state
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    ended = bench.last(Ended)
    assert isinstance(ended, Ended)
    assert ended.stats.prefill_worker == (POOL.name if state is RequestState.HANDOFF else "decode-0")
    assert (ended.stats.prompt_tokens, ended.stats.output_tokens) == (10, 0)
    waited = {"prefill_queue": 0.0, "prefill_run": 0.0, "migrate": 3.0}
    if state is RequestState.LOCAL:
        waited = {"prefill_queue": 1.0, "prefill_run": 2.0, "migrate": 0.0}
    assert ended.stats.stages == waited


def test_the_account_says_what_travelled() -> None:
    """Guards bytes in 8 bits that would be counted as they are stored; and who prefilled, whatever came after."""
    bench = Fetching()
    bench.tell(PeerUp(P, POOL, "tcp", 4, block_bytes=7))
    assert bench.place("a", list(range(10)), POOL, max_tokens=3)
    handoff = bench.asked().handoff
    bench.land(handoff)
    bench.name_token(handoff)
    bench.scheduler.preemption.preempt([bench.request("a")], bench.now)
    while bench.step() is not None:
        pass
    ended = bench.last(Ended)
    assert isinstance(ended, Ended)
    assert (ended.stats.migrated_bytes, ended.stats.transport) == (21, "tcp")
    assert ended.stats.prefill_worker == POOL.name


def test_the_wait_for_a_lost_prefill_worker_is_told_apart_from_computing() -> None:
    bench = Fetching()
    assert bench.place("a", list(range(10)), POOL)
    bench.now = 2.0
    bench.tell(PeerDown(POOL, P, "gone"))
    bench.router(UsePrefill(A, 1, None))
    bench.step()
    seconds = bench.request("a").clock.seconds
    assert (seconds["prefill_queue"], seconds["prefill_run"], seconds["migrate"]) == (3.0, 0.0, 0.0)

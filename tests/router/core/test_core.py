"""The router core by table: each test drives it event by event and reads its commands. Its parts have tests of their
own beside this one, any order of events is tried in test_core_machine.py, workers and faults with it in tests/sim."""

import pytest

from engine.messages import Accepted, Cancel, Fault, Finish, Place, Refused, Tokens
from engine.types import FinishReason, RequestId
from router.core.events import (
    Begin,
    ClientLeft,
    Command,
    Complete,
    Deliver,
    Event,
    Fail,
    Ignored,
    Lost,
    StopFound,
    Tick,
    WorkerSaid,
)
from tests.router.bench import A, B, Bench, ended, is_told
from tests.router.fake_cluster import load


def test_life_of_a_request() -> None:
    """Guards the plain path: place, accept, tokens in order, end."""
    bench = Bench()
    (place,) = bench.submit(deadline_s=5.0)
    assert is_told(place, Place) and place.worker == "d0"
    assert (place.record.placement, place.record.prefill.name) == (1, "p0")
    assert place.record.record.remaining_s == 5.0
    assert bench.accept() == [Begin(A)]
    assert bench.hear(Tokens(A, 1, 0, [7])) == [Deliver(A, [7])]
    assert bench.hear(Tokens(A, 1, 1, [8, 9])) == [Deliver(A, [8, 9])]
    (done,) = bench.hear(ended(output_tokens=3))
    assert isinstance(done, Complete) and done.reason is FinishReason.STOP
    assert bench.router.open == 0


@pytest.mark.parametrize(
    ("tokens", "commands"),
    [
        (Tokens(A, 1, 0, [1, 2]), [Ignored("duplicate", 2)]),
        (Tokens(A, 1, 1, [2, 3]), [Ignored("duplicate", 1), Deliver(A, [3])]),
        (Tokens(A, 1, 3, [4]), [Ignored("gap", 1)]),
        (Tokens(A, 2, 2, [3]), [Ignored("stale", 1)]),
        (Tokens(A, 0, 2, [3]), [Ignored("stale", 1)]),
        (Tokens(B, 1, 0, [3]), [Ignored("stale", 1)]),
    ],
)
def test_only_the_next_token_of_the_current_placement(
    tokens: Tokens, commands: list[Command]
) -> None:
    """Guards against tokens that reach a client twice, out of order, or from an old placement."""
    bench = Bench()
    bench.submit()
    bench.accept()
    bench.hear(Tokens(A, 1, 0, [1, 2]))
    assert bench.hear(tokens) == commands


def test_tokens_of_another_worker_are_stale() -> None:
    """Guards against a worker that speaks for a request it does not hold."""
    bench = Bench(decodes=2)
    (place,) = bench.submit()
    assert is_told(place, Place)
    other = {"d0": "d1", "d1": "d0"}[place.worker]
    assert bench.hear(Accepted(A, 1, 0), other) == [Ignored("stale", 0)]


def test_an_answer_with_a_hole_is_an_error() -> None:
    """Guards against lost tokens that end in status OK."""
    bench = Bench()
    bench.submit()
    bench.accept()
    bench.hear(Tokens(A, 1, 1, [2]))
    (failed,) = bench.hear(ended(output_tokens=2))
    assert isinstance(failed, Fail) and failed.fault.code == "INTERNAL"


def test_refused_keeps_its_turn_and_waits_for_a_report() -> None:
    """Guards against a busy loop of offers, and against overtaking in the line."""
    bench = Bench()
    bench.submit(A)
    assert bench.hear(Refused(A, 1, 4)) == []
    assert bench.submit(B) == [], "B must not overtake A on a worker that said no"
    assert bench.hear(load(active=64)) == [], "the report shows no room"
    first, second = bench.hear(load(active=10))
    assert is_told(first, Place) and is_told(second, Place)
    assert (first.record.record.request, first.record.placement) == (A, 2)
    assert (second.record.record.request, second.record.placement) == (B, 1)


def test_refused_goes_to_another_worker_at_once() -> None:
    """Guards against waiting for one worker while another has room."""
    bench = Bench(decodes=2)
    (first,) = bench.submit(A)
    assert is_told(first, Place)
    (second,) = bench.hear(Refused(A, 1, 4), first.worker)
    assert is_told(second, Place) and second.worker != first.worker


def test_own_dispatches_count_until_a_report_does() -> None:
    """Guards against a burst that is sent to one worker beyond its pool."""
    bench = Bench(blocks=8)
    assert len(bench.submit(A)) == 1  # 4 of 8 blocks
    assert len(bench.submit(B)) == 1
    assert bench.submit(RequestId("c")) == []


def test_too_large_for_every_worker_fails_at_once() -> None:
    """Guards against a request that would wait in the line for ever."""
    bench = Bench(blocks=3)
    (failed,) = bench.submit(A)
    assert isinstance(failed, Fail)
    assert (failed.fault.code, failed.fault.field) == ("OUT_OF_RANGE", "max_tokens")


def test_too_large_is_noticed_when_workers_come_back() -> None:
    """Guards the head of the line: asked while no worker was there, it would wait, and hold up all others, for ever."""
    bench = Bench(blocks=3)
    bench.do(Lost("d0"))
    assert not any(isinstance(command, Fail) for command in bench.submit(A))
    (failed,) = bench.join("d0", "decode", 9, blocks=3)
    assert isinstance(failed, Fail) and failed.fault.code == "OUT_OF_RANGE"
    assert bench.router.open == 0


def test_full_line_and_no_workers() -> None:
    """Guards against an unbounded line, and against waiting for workers that never come."""
    bench = Bench(max_waiting=1, blocks=4)
    bench.submit(A)
    assert bench.submit(B) == []
    (failed,) = bench.submit(RequestId("c"))
    assert isinstance(failed, Fail) and failed.retry_after_s is not None
    assert failed.fault.code == "RESOURCE_EXHAUSTED"
    bench.do(Lost("d0"))
    bench.do(Tick())
    bench.now = 20.0
    failed_now = [c for c in bench.do(Tick()) if isinstance(c, Fail)]
    assert {c.fault.code for c in failed_now} == {"UNAVAILABLE"}
    assert all(c.retry_after_s is not None for c in failed_now)
    assert bench.router.open == 0


@pytest.mark.parametrize("state", ["waiting", "offered", "running", "finishing", "closing"])
@pytest.mark.parametrize("end", ["cancel", "deadline", "lost"])
def test_every_end_in_every_state(state: str, end: str) -> None:
    """Guards against a request that is answered twice or never, or stays on its worker."""
    bench = Bench()
    answers: list[Command] = []

    def do(event: Event) -> list[Command]:
        out = bench.do(event)
        answers.extend(c for c in out if isinstance(c, Fail | Complete))
        return out

    bench.submit(deadline_s=5.0)
    if state == "waiting":
        do(WorkerSaid("d0", Refused(A, 1, 4)))
    elif state != "offered":
        do(WorkerSaid("d0", Accepted(A, 1, 0)))
        do(WorkerSaid("d0", Tokens(A, 1, 0, [1, 2])))
        if state == "finishing":
            (finish,) = do(StopFound(A, 1))
            assert is_told(finish, Finish) and finish.record.tokens_kept == 1
        if state == "closing":
            do(ClientLeft(A))
    event: Event = {"cancel": ClientLeft(A), "deadline": Tick(), "lost": Lost("d0")}[end]
    bench.now = 6.0 if end == "deadline" else 1.0
    out = do(event)
    on_worker = state in ("offered", "running", "finishing")
    if end != "lost":
        assert sum(is_told(c, Cancel) for c in out) == on_worker
        if on_worker or state == "closing":
            do(WorkerSaid("d0", ended(reason=FinishReason.CANCELLED)))
    elif state in ("waiting", "offered", "running"):
        assert answers == [] and bench.router.waiting == 1
        (place,) = bench.join("d0", "decode", 2)
        assert is_told(place, Place) and place.record.placement == 2
        return
    assert len(answers) == 1
    assert isinstance(answers[0], Complete) == (state == "finishing" and end == "lost")
    assert bench.router.open == 0


def test_stop_string_found_wins_over_the_workers_end() -> None:
    """Guards against tokens past a stop string in the count, and against a lost end."""
    bench = Bench()
    bench.submit()
    bench.accept()
    bench.hear(Tokens(A, 1, 0, [1, 2, 3]))
    bench.do(StopFound(A, 2))
    assert bench.hear(Tokens(A, 1, 3, [4])) == [Ignored("overrun", 1)]
    (done,) = bench.hear(ended(reason=FinishReason.LENGTH, output_tokens=4))
    assert isinstance(done, Complete)
    assert (done.reason, done.stats.output_tokens) == (FinishReason.STOP, 2)


def test_faults_of_workers_reach_the_client() -> None:
    """Guards against a worker's reason being lost, or a code gRPC does not know."""
    bench = Bench()
    bench.submit()
    (failed,) = bench.hear(
        ended(reason=FinishReason.ERROR, fault=Fault("INVALID_ARGUMENT", "top_p: bad", "top_p"))
    )
    assert isinstance(failed, Fail) and failed.fault.field == "top_p"
    assert bench.router.open == 0


def test_trees_learn_and_are_corrected() -> None:
    """Guards against routing by cached blocks that the worker never had, or has evicted."""
    bench = Bench(decodes=2)
    (first,) = bench.submit(A, tokens=64)
    assert is_told(first, Place) and first.reason == "load"
    home = first.worker
    bench.hear(Accepted(A, 1, 0), home)
    bench.hear(Tokens(A, 1, 0, [1]), home)
    bench.hear(ended(output_tokens=1), home)
    (second,) = bench.submit(B, tokens=64)
    assert is_told(second, Place)
    assert (second.worker, second.reason) == (home, "affinity")
    bench.hear(Accepted(B, 1, 48), home)
    (done,) = bench.hear(ended(B, reason=FinishReason.LENGTH, prefill_cached_tokens=63), home)
    assert isinstance(done, Complete) and done.expected_tokens == 63
    chain = list(bench.router.index._trees[home]._nodes)
    bench.hear(load(evicted=chain), home)
    bench.hear(load(evicted=chain), "p0")
    (third,) = bench.submit(RequestId("c"), tokens=64)
    assert is_told(third, Place) and third.reason == "load"


def test_a_new_life_has_an_empty_cache_and_a_broken_stream_does_not() -> None:
    """Guards against beliefs that outlive a worker's memory, or die with a connection."""
    bench = Bench()
    bench.submit(A, tokens=64)
    bench.accept()
    bench.hear(ended(output_tokens=0))
    bench.do(Lost("d0"))
    bench.join("d0", "decode", 1)
    assert len(bench.router.index._trees["d0"]) == 4
    bench.do(Lost("d0"))
    bench.join("d0", "decode", 2)
    assert len(bench.router.index._trees["d0"]) == 0


def test_silent_workers_get_nothing_new() -> None:
    """Guards against requests sent to a worker whose engine stands still."""
    bench = Bench(decodes=2)
    bench.now = 30.0
    bench.hear(load(), "p0")
    bench.hear(load(), "d1")
    (place,) = bench.submit()
    assert is_told(place, Place) and place.worker == "d1"

"""Samples of one prompt in the router core: where they are offered, what they share, and what becomes of them. From
the caller to the workers and back they are tried in tests/router/front/test_samples.py, their tokens in tests/parity,
their shared blocks in tests/decode_worker/scheduler/samples."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import pytest

from engine.messages import Place, Refused, Tokens
from engine.types import RequestId, RequestRecord
from router.core.call import Call, State
from router.core.call_table import MIN_DEADLINES
from router.core.events import Begin, Command, Fail, Lost, Submit, Tick, WorkerSaid
from tests.router.bench import A, Bench, is_told
from tests.router.core.parts import Parts, request_record
from tests.router.fake_cluster import load

PROMPT = 40
"""Tokens: two whole blocks of 16, and a part of one."""


def name(at: int) -> RequestId:
    return A if at == 0 else RequestId(f"{A}.{at}")


def submit(bench: Bench, at: int, max_tokens: int = 24) -> list[Command]:
    record = RequestRecord(
        request=name(at),
        tokens=list(range(PROMPT)),
        prompt_tokens=PROMPT,
        max_tokens=max_tokens,
        seed=1,
        sample_index=at,
        group=A,
    )
    return bench.do(Submit(record))


def placed(commands: list[Command]) -> list[tuple[str, Place]]:
    return [(c.worker, c.record) for c in commands if is_told(c, Place)]


def test_samples_are_offered_beside_the_first_one() -> None:
    """Guards sharing: not to the worker with the least load, which is the other one, and with whose blocks."""
    bench = Bench(decodes=2)
    ((home, first),) = placed(submit(bench, 0))
    assert first.fork_of is None
    for at in (1, 2, 3):
        ((worker, place),) = placed(submit(bench, at))
        assert (worker, place.fork_of, place.prefill) == (home, A, first.prefill)


def test_only_what_is_not_shared_needs_room() -> None:
    """Guards admission: 4 blocks for the first, 2 for each other; the fourth does not fit and goes elsewhere."""
    bench = Bench(decodes=2, blocks=8)
    ((home, _),) = placed(submit(bench, 0))
    assert [placed(submit(bench, at))[0][0] for at in (1, 2)] == [home, home]
    ((other, place),) = placed(submit(bench, 3))
    assert other != home and place.fork_of is None
    ((worker, fifth),) = placed(submit(bench, 4))
    assert (worker, fifth.fork_of) == (other, name(3)), "it shares with the one that is there"


def test_a_sample_that_is_refused_stands_in_line_like_any_request() -> None:
    bench = Bench()
    submit(bench, 0)
    submit(bench, 1)
    assert bench.accept() == [Begin(A)]
    assert bench.hear(Refused(name(1), 1, 2)) == []
    ((_, again),) = placed(bench.hear(load(active=4)))
    assert (again.record.request, again.placement, again.fork_of) == (name(1), 2, A)


def test_samples_of_a_lost_worker_share_again_behind_their_own_tokens() -> None:
    """Guards recovery: each with its own history, in their old order, forked from the first on another worker."""
    bench = Bench(decodes=2)
    ((home, _),) = placed(submit(bench, 0))
    for at in (1, 2):
        submit(bench, at)
    for at in range(3):
        bench.accept(name(at), 1, home)
        bench.hear(Tokens(name(at), 1, 0, [7 + at] * (at + 1)), home)
    again = placed(bench.do(Lost(home)))
    assert [p.record.request for _, p in again] == [A, name(1), name(2)]
    assert [p.fork_of for _, p in again] == [None, A, A]
    assert [p.record.tokens[PROMPT:] for _, p in again] == [[7], [8, 8], [9, 9, 9]]
    assert all(worker != home for worker, _ in again)


@pytest.mark.parametrize("leaving", [True, False])
def test_a_worker_that_leaves_gets_no_further_sample(leaving: bool) -> None:
    bench = Bench(decodes=2)
    ((home, _),) = placed(submit(bench, 0))
    bench.accept(A, 1, home)
    bench.hear(load(active=4, leaving=leaving), home)
    ((worker, place),) = placed(submit(bench, 1))
    assert (worker != home, place.fork_of) == ((True, None) if leaving else (False, A))


def test_hosts_are_the_first_sample_on_each_worker_by_their_index() -> None:
    """Guards a sample that asks one worker twice, and one that would share with a request that is about to move."""
    parts = Parts()
    for index, decode in ((3, "d1"), (1, "d0"), (2, "d0"), (4, "d2"), (5, "d3")):
        call = parts.table.open(request_record(f"s{index}", group="g", sample_index=index), None, State.RUNNING)
        call.decode, call.yielding = decode, decode == "d2"
    parts.table.open(request_record("other", group="h"), None, State.RUNNING).decode = "d9"
    waits = parts.table.open(request_record("s0", group="g", sample_index=0), None)
    assert [host.record.request for host in parts.table.hosts(waits)] == ["s1", "s3", "s5"]


def test_calls_are_overdue_once_and_oldest_first() -> None:
    """Guards the order of their ends, which is that of their arrival and not of their deadlines; and a name that is
    used again, whose first call has ended."""
    parts = Parts()
    for name, deadline_s in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", 9.0), ("e", None)):
        parts.table.open(request_record(name), deadline_s)
    parts.table.forget(parts.table.calls[RequestId("c")], parts.out)
    parts.table.open(request_record("c"), 2.5)
    assert parts.table.overdue(0.5, 9) == []
    assert [call.record.request for call in parts.table.overdue(3.0, 2)] == ["b", "c"], "by deadline, then by age"
    assert [call.record.request for call in parts.table.overdue(3.0, 2)] == ["a"]
    assert parts.table.overdue(3.0, 9) == []


def test_deadlines_of_requests_that_are_over_are_not_kept() -> None:
    """Guards memory: requests end in a second, and their deadlines are minutes away."""
    parts = Parts()
    waits = parts.table.open(request_record("waits"), 700.0)
    most = 0
    for at in range(3 * MIN_DEADLINES):
        call = parts.table.open(request_record(f"r{at}"), 600.0 + at)
        most = max(most, len(parts.table._deadlines))
        parts.table.forget(call, parts.out)
    assert most == MIN_DEADLINES + 2 * 2 + 1, "twice as many as are open, and the newest"
    assert parts.table.overdue(900.0, 9) == [waits]


class Unseen(dict[RequestId, Call]):
    """The calls of a router that must not be looked through."""

    def _fail(self) -> NoReturn:
        raise AssertionError("all requests were looked at")

    def __iter__(self) -> Iterator[RequestId]:
        self._fail()

    def values(self) -> NoReturn:  # type: ignore[override]
        self._fail()

    def items(self) -> NoReturn:  # type: ignore[override]
        self._fail()


def test_ticks_and_reports_do_not_look_at_all_requests() -> None:
    """Guards the loop: with 10,000 open streams each look would take a millisecond, 20 times a second, and once more
    with every report while a worker leaves."""
    bench = Bench(decodes=2)
    ((home, _),) = placed(submit(bench, 0))
    bench.accept(A, 1, home)
    bench.submit(RequestId("late"), deadline_s=1.0)
    table = bench.router._table
    table.calls = bench.router._calls = Unseen(table.calls)
    router, bench.now = bench.router, 2.0
    late = [c for c in router.handle(Tick(), bench.now) if isinstance(c, Fail)]
    assert [fail.request for fail in late] == ["late"]
    told = router.handle(WorkerSaid(home, load(active=4, leaving=True)), bench.now)
    assert not told and router.waiting == 0


def test_what_was_offered_is_not_kept_whole_until_its_answer_would_be_late() -> None:
    """Guards memory: prompts of requests that are long over."""
    parts = Parts()
    parts.join("d0")
    call = parts.offer("a")
    assert parts.table.unanswered(-1.0) == []
    assert not any(part is call for offer in parts.table._offers for part in offer)
    again = parts.table.calls.pop(RequestId("a"))
    parts.table.calls[RequestId("a")] = replace(again, turn=again.turn + 1)
    assert parts.table.unanswered(0.0) == [], "another request of this name"


def test_deadlines_are_not_gone_through_with_each_request() -> None:
    """Guards a router of many open requests: the look is for what piles up, and not one for each that comes."""
    parts = Parts()
    for at in range(3):
        parts.table.forget(parts.table.open(request_record(f"r{at}"), 600.0), parts.out)
    assert len(parts.table._deadlines) == 3


def test_who_waits_does_not_move() -> None:
    """Guards the list of those that move, which each report of a leaving worker goes through."""
    parts = Parts()
    home = parts.join("d0")
    parts.join("d1")
    moves, waits = parts.run("a"), parts.wait("b", tokens=2000)
    moves.yielding = True
    parts.table.moves(moves)
    for _ in range(2):
        assert parts.table.around([home]) == [moves, waits]
        assert list(parts.table._moving) == ["a"]
    moves.yielding = False
    assert parts.table.around([]) == [waits] and not parts.table._moving


def test_who_is_forgotten_neither_moves_nor_hosts_a_sample() -> None:
    """Guards a sample that is placed beside one that is over, and lists that grow with every request."""
    parts = Parts()
    parts.join("d0")
    first, second = (parts.run(f"s{index}", group="g", sample_index=index) for index in (1, 2))
    first.yielding = True
    parts.table.moves(first)
    parts.table.forget(first, parts.out)
    waits = parts.wait("s0", group="g", sample_index=0)
    assert parts.table.around([]) == [waits] and not parts.table._moving
    assert list(parts.table.hosts(waits)) == [second]
    parts.table.forget(second, parts.out)
    assert not list(parts.table.hosts(waits)) and parts.table._groups == {"g": {0: waits}}
    parts.table.forget(waits, parts.out)
    assert not parts.table._groups


def test_the_next_deadline_is_found_among_those_that_are_left() -> None:
    """Guards a deadline that is passed over: of thousands those of requests that are over are dropped, and the earlier
    one of the two that are left was kept behind the later one."""
    parts, kept = Parts(), dict[str, Call]()
    for deadline_s in (1.0, 100.0, 2.0, 200.0, 201.0, 50.0, *(300.0 + at for at in range(2 * MIN_DEADLINES))):
        call = parts.table.open(request_record(f"r{deadline_s}"), deadline_s)
        if deadline_s in (50.0, 100.0):
            kept[call.record.request] = call
        else:
            parts.table.forget(call, parts.out)
    assert parts.table.overdue(60.0, 9) == [kept["r50.0"]]
    assert parts.table.overdue(250.0, 9) == [kept["r100.0"]]
    assert parts.table.overdue(9_000.0, 9) == [], "of those that are over nobody is told"

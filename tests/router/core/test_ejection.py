"""Which failures keep a worker from new requests, for how long, and how it comes back.

The state alone first, then the registry that never ejects more than half of a pool, then the core that hears of
failures.
"""

import pytest

from engine.messages import Fault, NeedPrefill, Place, Refused, Tokens
from engine.types import FinishReason, Incarnation, RequestId
from router.core.ejection import CLEAN_S, CONSECUTIVE, LONGEST_S, SHORTEST_S, WORKERS_FAULT, Ejections
from router.core.events import ClientLeft, Command, Ejected, Readmitted, Tick, WorkerSaid
from tests.router.bench import Bench, ended, is_told
from tests.router.core.parts import Parts
from tests.router.fake_cluster import load

LIFE = ("d0", Incarnation(1))
BROKEN = Fault("INTERNAL", "the step failed")


def fail(ejections: Ejections, now: float, times: int = CONSECUTIVE) -> float | None:
    found = [ejections.failed(LIFE, now, may_eject=True) for _ in range(times)]
    assert found[:-1] == [None] * (times - 1)
    return found[-1]


def test_one_failure_is_not_enough_and_a_success_between_begins_anew() -> None:
    ejections = Ejections()
    assert fail(ejections, 0.0, CONSECUTIVE - 1) is None and not ejections
    assert not ejections.succeeded(LIFE, 0.0)
    assert fail(ejections, 0.0, CONSECUTIVE - 1) is None and not ejections
    assert ejections.failed(LIFE, 0.0, may_eject=False) is None and not ejections.is_ejected(LIFE)
    assert ejections.failed(LIFE, 0.0, may_eject=True) == SHORTEST_S and ejections and ejections.is_ejected(LIFE)


def test_it_is_probed_by_one_request_and_fails_again_for_twice_as_long() -> None:
    ejections = Ejections()
    now, backoffs = 0.0, [fail(ejections, 0.0)]
    for _ in range(8):
        end = now + (backoffs[-1] or 0.0)
        assert not ejections.takes(LIFE, 0, end - 0.01), "within the backoff"
        assert ejections.failed(LIFE, end - 0.01, may_eject=True) is None, "what it had been given before"
        assert ejections.takes(LIFE, 0, end) and not ejections.takes(LIFE, 1, end), "one at a time"
        now = end
        backoffs.append(ejections.failed(LIFE, now, may_eject=False))
    assert backoffs == [min(SHORTEST_S * 2**number, LONGEST_S) for number in range(9)]


def test_it_returns_when_the_probe_ends_well() -> None:
    ejections = Ejections()
    assert fail(ejections, 0.0) == SHORTEST_S
    assert not ejections.succeeded(LIFE, SHORTEST_S - 0.1), "begun before it was ejected: it proves nothing"
    assert ejections.is_ejected(LIFE)
    assert ejections.succeeded(LIFE, SHORTEST_S)
    assert ejections.takes(LIFE, 5, SHORTEST_S) and not ejections
    assert not ejections.succeeded(LIFE, SHORTEST_S + 1.0), "it was taken already"
    assert fail(ejections, 9.0) == 2 * SHORTEST_S, "its record is not clean yet"
    assert ejections.succeeded(LIFE, 20.0)
    assert fail(ejections, 9.0 + CLEAN_S + 1.0) == SHORTEST_S


def test_records_go_with_their_lives() -> None:
    """Guards memory, and a new process against its predecessor's record."""
    ejections = Ejections()
    fail(ejections, 0.0)
    ejections.failed(("d0", Incarnation(2)), 0.0, may_eject=True)
    ejections.forget("d0", but=Incarnation(2))
    assert list(ejections._records) == [("d0", 2)] and not ejections
    ejections.succeeded(("d0", Incarnation(2)), 0.0)
    assert not ejections._records and repr(ejections) == "Ejections(none)"


def test_never_more_than_half_of_a_pool() -> None:
    """Guards a cluster that fails as a whole, which would have nobody left."""
    parts = Parts()
    lives = [parts.join(f"d{number}").life for number in range(3)]
    other = parts.join("d9", model="other").life
    found = [parts.registry.failed(life, 0.0) for life in [*lives, other] for _ in range(2 * CONSECUTIVE)]
    assert len([backoff for backoff in found if backoff]) == 1, "one of three, and not the only one of a model"
    assert [w.name for w in parts.registry.takers("decode", 0.0)] == ["d1", "d2", "d9"]
    assert parts.registry.failed(("d1", Incarnation(7)), 0.0) is None, "another life"


def test_the_last_that_is_left_is_taken_whatever_its_record() -> None:
    parts = Parts()
    lives = [parts.join(f"d{number}").life for number in range(2)]
    for _ in range(CONSECUTIVE):
        parts.registry.failed(lives[0], 0.0)
    assert [w.name for w in parts.registry.takers("decode", 0.0)] == ["d1"]
    parts.registry.leave("d1", 0.0)
    assert [w.name for w in parts.registry.takers("decode", 0.0)] == ["d0"]


# ---- what the core takes for a failure


def placed(commands: list[Command]) -> str:
    """The worker that a request was offered to."""
    (place,) = [command for command in commands if is_told(command, Place)]
    return getattr(place, "worker", "")


def run(bench: Bench, name: str) -> str:
    request = RequestId(name)
    worker = placed(bench.submit(request, 8, 4))  # too short to be cached anywhere
    bench.accept(request, 1, worker)
    return worker


def broken(bench: Bench, count: int, code: str = "INTERNAL") -> list[Command]:
    """Requests that end with a fault on `d0`, others well elsewhere."""
    out = list[Command]()
    for number in range(200):
        if not count:
            break
        name = f"{code}{number}"
        if (worker := run(bench, name)) == "d0":
            count -= 1
            fault = Fault(code, "so it is")
            out += bench.hear(ended(RequestId(name), 1, FinishReason.ERROR, fault), worker)
        else:
            bench.hear(ended(RequestId(name), 1), worker)
    assert not count
    return out


def test_a_worker_that_fails_its_requests_is_ejected_probed_and_taken_again() -> None:
    bench = Bench(decodes=2)
    out = broken(bench, CONSECUTIVE)
    assert [c for c in out if isinstance(c, Ejected)] == [Ejected("d0", "it ended a request with INTERNAL", SHORTEST_S)]
    assert {run(bench, f"a{number}") for number in range(4)} == {"d1"}
    bench.now = SHORTEST_S
    workers = [run(bench, f"b{number}") for number in range(4)]
    assert workers.count("d0") == 1, "one probe"
    probe = RequestId(f"b{workers.index('d0')}")
    assert bench.hear(ended(probe, 1))[-1] == Readmitted("d0")
    assert [run(bench, f"c{number}") for number in range(2)] == ["d0", "d0"], "it has the least to do"


def test_a_probe_that_fails_keeps_it_away_for_longer() -> None:
    bench = Bench(decodes=2)
    broken(bench, CONSECUTIVE)
    bench.now = SHORTEST_S
    out = broken(bench, 1, "UNAVAILABLE")
    assert [c.backoff_s for c in out if isinstance(c, Ejected)] == [2 * SHORTEST_S]


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "NOT_FOUND"])
def test_a_callers_bad_request_never_counts(code: str) -> None:
    assert code not in WORKERS_FAULT
    bench = Bench(decodes=2)
    assert not [c for c in broken(bench, 3 * CONSECUTIVE, code) if isinstance(c, Ejected)]
    assert not bench.router.registry.ejections._records


def test_a_refusal_and_a_deadline_never_count() -> None:
    """Guards against breakers that full workers, and impatient callers, open everywhere."""
    bench = Bench(decodes=2)
    for number in range(4 * CONSECUTIVE):
        request = RequestId(f"r{number}")
        worker = placed(bench.submit(request, 8, 4))
        bench.hear(Refused(request, 1, 9), worker)
        bench.hear(load(number), "d0")
        bench.hear(load(number), "d1")
        bench.accept(request, 2, bench.router._calls[request].decode)
        home = bench.router._calls[request].decode
        bench.hear(ended(request, bench.router._calls[request].placement, FinishReason.DEADLINE), home)
    assert not bench.router.registry.ejections._records


def test_an_offer_left_unanswered_counts_once() -> None:
    bench = Bench(decodes=2, prefills=0, worker_silent_s=10.0)
    workers = [placed(bench.submit(RequestId(f"r{number}"), 8, 4)) for number in range(2 * (CONSECUTIVE - 1))]
    assert workers.count("d0") == CONSECUTIVE - 1
    for step in range(1, 40):
        bench.now = step * 0.5
        for name in ("d0", "d1"):
            bench.hear(load(step), name)
        assert not [c for c in bench.do(Tick()) if isinstance(c, Ejected)]
    (record,) = [r for life, r in bench.router.registry.ejections._records.items() if life[0] == "d0"]
    assert record.failures == CONSECUTIVE - 1


@pytest.mark.parametrize(("was_full", "backoffs"), [(False, [SHORTEST_S]), (True, [])])
def test_a_prefill_worker_that_does_not_hand_over_is_ejected(was_full: bool, backoffs: list[float]) -> None:
    """Guards against prompts that are sent where they never come from; and a full line against being called broken."""
    bench = Bench(decodes=1, prefills=2, blocks=512)
    out = list[Command]()
    while len(bench.router._calls) < 40 and not [c for c in out if isinstance(c, Ejected)]:
        name = f"r{len(bench.router._calls)}"
        run(bench, name)
        if bench.router._calls[RequestId(name)].prefill == "p0":
            out += bench.hear(NeedPrefill(RequestId(name), 1, "p0", was_full))
    assert [c.backoff_s for c in out if isinstance(c, Ejected)] == backoffs
    if backoffs:
        bench.now = SHORTEST_S
        bench.hear(load(1))
        for name in ("p0", "p1"):
            bench.do(WorkerSaid(name, load(1)))
        names = [f"s{number}" for number in range(4)]
        for name in names:
            run(bench, name)
        probes = [name for name in names if bench.router._calls[RequestId(name)].prefill == "p0"]
        held = {r for w in bench.router.registry for r in w.own if w.name == "p0"}
        assert held == set(probes) and len(probes) == 1
        told = bench.hear(Tokens(RequestId(probes[0]), 1, 0, [7]))
        assert Readmitted("p0") in told, "its part is done with the first token"


def test_a_fault_of_a_request_that_was_cancelled_never_counts() -> None:
    bench = Bench(decodes=2)
    for number in range(2 * CONSECUTIVE):
        worker = run(bench, f"r{number}")
        bench.do(ClientLeft(RequestId(f"r{number}")))
        bench.hear(ended(RequestId(f"r{number}"), 1, FinishReason.ERROR, BROKEN), worker)
    assert not bench.router.registry.ejections._records


def failing_prefills(bench: Bench, count: int, between: list[RequestId]) -> list[Command]:
    """Requests whose prompts `p0` does not hand over; after each one an answer that has begun long ago ends."""
    out = list[Command]()
    for number in range(200):
        if not count:
            break
        request = RequestId(f"f{number}")
        bench.accept(request, 1, placed(bench.submit(request, 8, 4)))
        if bench.router._calls[request].prefill == "p0":
            count -= 1
            out += bench.hear(NeedPrefill(request, 1, "p0", False))
            if between:
                out += bench.hear(ended(between.pop(), 1, output_tokens=1))
    assert not count
    return out


def begun(bench: Bench, count: int) -> list[RequestId]:
    """Requests whose prompts `p0` has read, and whose answers go on."""
    found = list[RequestId]()
    for number in range(200):
        request = RequestId(f"old{number}")
        run(bench, request)
        bench.hear(Tokens(request, 1, 0, [7]))
        if bench.router._calls[request].prefill == "p0":
            found.append(request)
        if len(found) == count:
            return found
    raise AssertionError("p0 gets no prompt")


def test_the_end_of_an_answer_says_nothing_of_the_worker_that_read_its_prompt_long_ago() -> None:
    """Guards against a prefill worker that is never ejected, or readmitted unprobed, by streams that end elsewhere."""
    bench = Bench(decodes=1, prefills=2, blocks=4096)
    old = begun(bench, CONSECUTIVE + 1)
    out = failing_prefills(bench, CONSECUTIVE, old)
    assert [c.backoff_s for c in out if isinstance(c, Ejected)] == [SHORTEST_S]
    bench.now = SHORTEST_S
    assert not [c for c in bench.hear(ended(old.pop(), 1, output_tokens=1)) if isinstance(c, Readmitted)]


def test_a_probe_does_not_wait_for_answers_that_others_write() -> None:
    bench = Bench(decodes=1, prefills=2, blocks=4096)
    old = begun(bench, 2)
    failing_prefills(bench, CONSECUTIVE, [])
    worker = bench.router.registry.get("p0")
    assert worker is not None and set(old) <= set(worker.own), "their ends are still to come"
    bench.now = SHORTEST_S
    for number in range(8):
        run(bench, f"s{number}")
    probes = [r for r in worker.own if r.startswith("s")]
    assert len(probes) == 1, "one at a time, and not none"
    assert Readmitted("p0") in bench.hear(Tokens(RequestId(probes[0]), 1, 0, [7]))


def test_a_search_says_nothing_before_its_end_which_counts_for_both_workers() -> None:
    bench = Bench(decodes=1, prefills=1, blocks=4096)
    run(bench, "a")
    life = bench.router._calls[RequestId("a")].prefill_life
    assert life is not None
    bench.router.registry.failed(life, 0.0)
    bench.hear(ended(RequestId("a"), 1))
    assert not bench.router.registry.ejections._records


def test_offers_made_before_the_routers_own_sleep_are_not_called_unanswered() -> None:
    """Guards workers against a router that was stopped: their answers lie unread."""
    bench = Bench(decodes=2, prefills=0, worker_silent_s=10.0)
    bench.do(Tick())
    workers = [placed(bench.submit(RequestId(f"r{number}"), 8, 4)) for number in range(2 * CONSECUTIVE)]
    assert workers.count("d0") == CONSECUTIVE
    bench.now = 15.0
    assert bench.do(Tick()) == []
    assert not bench.router.registry.ejections._records
    out = list[Command]()
    while bench.now < 26.0:
        bench.now += 0.5
        for name in ("d0", "d1"):
            bench.hear(load(1), name)
        out += bench.do(Tick())
    assert [c.why for c in out if isinstance(c, Ejected)] == ["it left an offer unanswered"], "from then on they count"


@pytest.mark.parametrize(("later_s", "backoff_s"), [(CLEAN_S, 2 * SHORTEST_S), (CLEAN_S + 0.5, SHORTEST_S)])
def test_a_record_is_clean_after_so_long_and_not_before(later_s: float, backoff_s: float) -> None:
    ejections = Ejections()
    assert fail(ejections, 0.0) == SHORTEST_S and ejections.succeeded(LIFE, SHORTEST_S)
    assert fail(ejections, later_s) == backoff_s


@pytest.mark.parametrize("is_leaving", [False, True])
def test_who_leaves_and_gives_up_its_prompts_is_not_broken(is_leaving: bool) -> None:
    """Guards a rolling restart: a prefill worker that leaves hands nothing more over, and says so."""
    bench = Bench(decodes=1, prefills=2, blocks=512)
    for number in range(4 * CONSECUTIVE):
        run(bench, f"r{number}")
    mine = [name for name, call in bench.router._calls.items() if call.prefill == "p0"]
    assert len(mine) >= CONSECUTIVE
    bench.do(WorkerSaid("p0", load(1, leaving=is_leaving)))
    out = [command for name in mine for command in bench.hear(NeedPrefill(name, 1, "p0", False))]
    assert any(isinstance(command, Ejected) for command in out) != is_leaving
    assert bool(bench.router.registry.ejections._records) != is_leaving

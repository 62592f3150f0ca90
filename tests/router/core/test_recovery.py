"""Lost workers, event by event: who goes on, behind which tokens, how often, and who is given up. The losses alone are
tried in test_losses.py, any order of them in test_core_machine.py and tests/sim, real processes in tests/chaos."""

import pytest

from engine.messages import (
    Accepted,
    Cancel,
    NeedPrefill,
    PeerAddress,
    Place,
    Refused,
    Tokens,
    UsePrefill,
)
from engine.types import FinishReason, Incarnation, RequestId
from router.core.call import Call, Death
from router.core.events import (
    Begin,
    ClientLeft,
    Command,
    Complete,
    Condemn,
    DecodeLost,
    Deliver,
    Fail,
    Ignored,
    Lost,
    Poisonous,
    StopFound,
    TellWorker,
    Tick,
    WorkersNamed,
)
from router.core.placement import LOCAL
from router.core.recovery import MAX_UNHEARD, NEWS_S, POISON_VICTIMS, RetryBudget, is_suspect, obituary
from router.hub import Hub
from router.status.observer import NullObserver
from tests.router.bench import STOP_ID, A, B, Bench, ended, is_told
from tests.router.core.parts import request_record
from tests.router.fake_cluster import load

C = RequestId("c")


def running(bench: Bench, *ids: int, request: RequestId = A, **more: object) -> str:
    """Submit and run to the given tokens; the decode worker's name."""
    (place,) = bench.submit(request, **more)  # type: ignore[arg-type]
    assert is_told(place, Place)
    bench.accept(request, worker=place.worker)
    if ids:
        bench.hear(Tokens(request, 1, 0, list(ids)), place.worker)
    return place.worker


def lose(bench: Bench, worker: str) -> tuple[list[Command], TellWorker]:
    """Lose a decode worker; what came before the new placement, and that."""
    *before, place = bench.do(Lost(worker))
    assert is_told(place, Place)
    return before, place


@pytest.mark.parametrize("emitted", [0, 1, 2, 23])
def test_a_request_goes_on_behind_what_its_client_has(emitted: int) -> None:
    """Guards against tokens that are lost, doubled or sampled again when a decode worker is lost at token k."""
    bench = Bench(decodes=2)
    given = list(range(200, 200 + emitted))
    home = running(bench, *given, deadline_s=9.0)
    bench.now = 4.0
    bench.hear(load(), "p0")
    before, place = lose(bench, home)
    assert before == [DecodeLost(A, home, emitted)]
    record = place.record.record
    assert place.worker != home and place.record.placement == 2
    assert record.tokens == [*range(40), *given] and record.prompt_tokens == 40
    assert (record.seed, record.remaining_s, record.max_tokens) == (1, 5.0, 24)
    assert bench.hear(Tokens(A, 2, emitted, [7]), place.worker) == [Ignored("early", 1)]
    assert bench.accept(A, 2, place.worker) == [Begin(A)]
    held = bench.router.index.held_blocks(place.worker)
    assert held == (40 + emitted) // 16, "history is not in what the new worker will hold"
    assert bench.hear(Tokens(A, 1, emitted, [6]), place.worker) == [Ignored("stale", 1)]
    assert bench.hear(Tokens(A, 2, emitted, [7]), place.worker) == [Deliver(A, [7])]
    last = ended(A, 2, FinishReason.STOP, output_tokens=emitted + 1, prefill_cached_tokens=40)
    (done,) = bench.hear(last, place.worker)
    assert isinstance(done, Complete) and done.stats.output_tokens == emitted + 1
    assert done.stats.prefill_cached_tokens == 0, "this request computed its prompt itself, once"
    assert bench.router.open == 0


@pytest.mark.parametrize(
    ("last", "reason"), [(STOP_ID, FinishReason.STOP), (7, FinishReason.LENGTH)]
)
def test_an_answer_that_was_complete_is_not_placed_again(last: int, reason: FinishReason) -> None:
    """Guards against a token behind the end, and against a failed request whose client has all of it."""
    bench = Bench(decodes=2)
    home = running(bench, 5, 6, last, max_tokens=3)
    (done,) = bench.do(Lost(home))
    assert isinstance(done, Complete)
    assert (done.reason, done.stats.output_tokens, done.stats.stages) == (reason, 3, {})
    assert bench.router.open == 0


def test_a_found_stop_string_completes_without_its_worker() -> None:
    """Guards against placing an answer again whose end the router itself had found."""
    bench = Bench(decodes=2)
    home = running(bench, 5, 6, 7)
    bench.do(StopFound(A, 2))
    (done,) = bench.do(Lost(home))
    assert isinstance(done, Complete)
    assert (done.reason, done.stats.output_tokens) == (FinishReason.STOP, 2)


def test_a_client_that_left_is_not_placed_again() -> None:
    """Guards against work for nobody after a loss."""
    bench = Bench(decodes=2)
    home = running(bench, 5)
    bench.do(ClientLeft(A))
    assert bench.do(Lost(home)) == [] and bench.router.open == 0


def test_it_waits_at_the_head_of_the_line() -> None:
    """Guards against a running request that falls behind those that have not begun."""
    bench = Bench(blocks=8)
    home = running(bench, 5)
    running(bench, 6, request=B)
    assert bench.submit(C, tokens=100) == []
    assert bench.do(Lost(home)) == [DecodeLost(A, home, 1), DecodeLost(B, home, 1)]
    first, second = bench.join("d0", "decode", 2, 8)
    assert is_told(first, Place) and is_told(second, Place)
    assert [p.record.record.request for p in (first, second)] == [A, B]


def test_a_deadline_ends_the_waiting_for_another_worker() -> None:
    """Guards against a recovery that outlives the caller's patience."""
    bench = Bench()
    home = running(bench, 5, deadline_s=3.0)
    bench.do(Lost(home))
    bench.now = 3.0
    (failed,) = bench.do(Tick())
    assert isinstance(failed, Fail) and failed.outcome is FinishReason.DEADLINE


def test_deadlines_that_pass_together_place_nobody() -> None:
    """Guards a worker against the offer of a request that is cancelled in the same breath."""
    bench = Bench()
    bench.hear(load(active=60))
    assert bench.submit(A, tokens=500, deadline_s=3.0) == [], "there is no room for it"
    assert bench.submit(B, tokens=16, max_tokens=1, deadline_s=3.0) == [], "it does not overtake"
    bench.now = 3.0
    assert [type(command) for command in bench.do(Tick())] == [Fail, Fail]


def test_a_worker_that_never_took_it_is_no_victim() -> None:
    """Guards innocent requests against a router that was frozen and hears of all its broken streams at once."""
    bench = Bench(decodes=3)
    home = running(bench, 5)
    _, place = lose(bench, home)
    (again,) = bench.do(Lost(place.worker))
    assert is_told(again, Place) and again.worker not in (home, place.worker)


def test_offers_lost_unheard_are_no_lost_placements() -> None:
    """Guards against a router that gives a request up when it thaws: it hears of every broken stream one by one, and
    has offered the request on each. But nobody is offered without end."""
    bench = Bench(decodes=20, max_placements=2)
    (place,) = bench.submit(A)
    for offer in range(MAX_UNHEARD - 1):
        assert is_told(place, Place)
        out = bench.do(Lost(place.worker))
        if offer:
            assert out == [], "the fate of those before is not known"
            bench.now += NEWS_S
            for worker in list(bench.router.registry):
                out += bench.hear(load(), worker.name)
        (place,) = out
    assert is_told(place, Place)
    (end,) = bench.do(Lost(place.worker))
    assert isinstance(end, Fail) and end.fault.code == "UNAVAILABLE"


def offered(bench: Bench, *commands: Command) -> TellWorker:
    (place,) = commands
    assert is_told(place, Place)
    return place


NEWS = {
    "taken away": lambda bench, name: bench.do(Lost(name, for_good=True)),
    "replaced": lambda bench, name: bench.join(name, "decode", 2),
    "named anew": lambda bench, name: bench.do(WorkersNamed(("d0", "d1", "d2"), ((name, Incarnation(2)),))),
}


@pytest.mark.parametrize("how", NEWS)
def test_what_kills_before_it_is_accepted_is_poison_too(how: str) -> None:
    """Guards the pool against a request that no worker lives to accept: it went through all of them, and was none's."""
    bench = Bench(decodes=3)
    first = offered(bench, *bench.submit(A)).worker
    second = offered(bench, *bench.do(Lost(first))).worker
    assert bench.do(Lost(second)) == [], "it was sent on while nobody knew what had become of two workers"
    assert NEWS[how](bench, first) == [], "one dead worker, and one that may live, are no proof"
    bench.now = 0.5
    named, failed = NEWS[how](bench, second)
    told = f"{first} (its stream broke; after 0 tokens, not accepted, alone), 0.0 s later {second} (its stream broke"
    assert isinstance(named, Poisonous) and named.deaths.startswith(told)
    assert isinstance(failed, Fail) and failed.fault.message.startswith("refused as poisonous: 2 workers")
    assert told in failed.fault.message and bench.router.open == 0


def test_whoever_is_given_up_with_an_offer_is_dead() -> None:
    """Guards the pool against a request that hangs every engine that it is offered to."""
    bench = Bench(decodes=3, worker_hung_s=10.0)
    offer = offered(bench, *bench.submit(A))
    hung, out = [offer.worker], list[Command]()
    while bench.now < 60.0 and bench.router.open:
        bench.now += 0.5
        said = [bench.hear(load(), worker.name) for worker in bench.router.registry if worker.name not in hung]
        for command in [command for heard in (*said, bench.do(Tick())) for command in heard]:
            out.append(command)
            if is_told(command, Place):
                hung.append(command.worker)
    assert [command.verdict.name for command in out if isinstance(command, Condemn)] == hung and len(hung) == 2
    named, _ = (command for command in out if isinstance(command, Poisonous | Fail))
    assert isinstance(named, Poisonous) and all(f"{name} (given up: " in named.deaths for name in hung)


def test_a_router_that_was_frozen_accuses_nobody() -> None:
    """Guards the only request of a router that hears of all its broken streams at once: its workers dial again."""
    bench = Bench(decodes=3)
    first = offered(bench, *bench.submit(A)).worker
    second = offered(bench, *bench.do(Lost(first))).worker
    assert bench.do(Lost(second)) == []
    third = offered(bench, *bench.join(second, "decode", 1)).worker
    assert bench.do(Lost(third)) == []
    place = offered(bench, *bench.join(third, "decode", 1))
    bench.join(first, "decode", 1)
    assert bench.accept(A, place.record.placement, place.worker) == [Begin(A)]


def test_it_goes_on_without_news() -> None:
    """Guards a request whose workers are out of reach, and known to nobody: it waits for them so long, and others do
    not wait with it."""
    bench = Bench(decodes=3)
    first = offered(bench, *bench.submit(A)).worker
    second = offered(bench, *bench.do(Lost(first))).worker
    assert bench.do(Lost(second)) == []
    other = offered(bench, *bench.submit(B))
    assert other.record.record.request == B, "one that is held back holds up another"
    bench.accept(B, 1, other.worker)
    bench.now = NEWS_S - 0.1
    assert bench.hear(load(), other.worker) == []
    bench.now = NEWS_S
    assert offered(bench, *bench.hear(load(), other.worker)).record.record.request == A
    bench.accept(A, 3, other.worker)
    bench.hear(Tokens(A, 3, 0, [5]), other.worker)
    bench.do(Lost(first, for_good=True))
    assert bench.do(Lost(second, for_good=True)) == [], "it runs, and was not asked for"


def test_bystanders_of_two_kills_that_had_accepted_neither_go_on() -> None:
    """Guards those that were offered to two workers which something else took, one with the other."""
    bench = Bench(decodes=1)
    for name in (A, B, C):
        bench.submit(name)
    bench.do(Lost("d0", for_good=True))
    bench.now = 0.5
    assert len(bench.join("d1", "decode", 2)) == 3
    bench.do(Lost("d1", for_good=True))
    again = bench.join("d2", "decode", 3)
    assert [is_told(place, Place) for place in again] == [True] * 3
    failed = [type(command) for command in bench.do(Lost("d2", for_good=True))]
    assert failed == [Poisonous, Fail] * 3, "three are never chance"


def test_two_lost_workers_are_poison() -> None:
    """Guards against one request that takes the whole pool down, worker by worker."""
    bench = Bench(decodes=3)
    home = running(bench, 5)
    _, place = lose(bench, home)
    bench.accept(A, 2, place.worker)
    named, failed = bench.do(Lost(place.worker))
    assert isinstance(named, Poisonous) and named.deaths.index(home) < named.deaths.index(place.worker)
    assert isinstance(failed, Fail) and failed.fault.code == "UNAVAILABLE"
    assert "poisonous" in failed.fault.message and bench.router.open == 0


def dead(at_s: float, held: int, emitted: int) -> Death:
    return Death(at_s, "its stream broke", held, emitted)


def unheard(at_s: float, held: int) -> Death:
    return Death(at_s, "its stream broke", held, 0, was_accepted=False)


@pytest.mark.parametrize(
    ("deaths", "is_refused"),
    [
        ((), False),
        ((dead(0, 1, 0),), False),
        ((dead(0, 5, 3), dead(0.4, 4, 3)), False),
        ((dead(0.4, 4, 3), dead(0, 5, 3)), False),
        ((dead(0, 2, 3), dead(0.4, 2, 3)), False),
        ((dead(0, 5, 3), dead(1.9, 4, 3)), False),
        ((dead(0, 5, 3), dead(3, 4, 3)), False),
        ((dead(0, 5, 3), dead(3.1, 4, 3)), True),
        ((dead(0, 5, 3), dead(4, 4, 9)), False),
        ((dead(0, 5, 3), dead(4, 4, 4)), False),
        ((dead(0, 1, 3), dead(4, 1, 9)), False),
        ((dead(0, 5, 3), dead(4, 4, 3)), True),
        ((dead(0, 1, 0), dead(0.1, 1, 0)), True),
        ((dead(0, 5, 0), dead(0.1, 1, 0)), True),
        ((dead(0, 5, 3), dead(0.1, 5, 8), dead(9, 5, 30)), True),
        ((unheard(0, 1), unheard(0.1, 1)), True),
        ((unheard(0, 5), unheard(0.1, 5)), False),
        ((unheard(0, 5), unheard(4, 5)), True),
        ((dead(0, 1, 0), unheard(0.1, 1)), False),
        ((dead(0, 1, 0), unheard(3.1, 1)), True),
        ((unheard(0, 1), dead(0.1, 1, 0)), True),
    ],
    ids=[
        "none", "one", "together", "any order", "with one other", "one fell silent", "three seconds apart",
        "more than three seconds apart", "further", "one token further", "alone, further", "apart", "alone",
        "once alone", "three",
        "unheard, alone", "unheard, together", "unheard, apart", "offered behind", "long behind", "accepted behind",
    ],
)
def test_a_request_is_suspected_by_its_own_record(deaths: tuple[Death, ...], is_refused: bool) -> None:
    """Guards bystanders of two kills, and the pool against what kills: the two cases in which it is spared, and no
    other."""
    assert is_suspect(deaths) == is_refused


@pytest.mark.parametrize(("pause_s", "is_refused"), [(0.5, False), (2.0, False), (5.0, True)])
def test_bystanders_of_two_kills_at_once_go_on(pause_s: float, is_refused: bool) -> None:
    """Guards whoever has just been placed again, on a worker that is killed with the first. Long after the first, they
    were the reason as far as anybody can see."""
    bench = Bench()
    for name in (A, B, C):
        running(bench, 5, request=name)
    bench.do(Lost("d0"))
    for place in bench.join("d1", "decode", 2):
        assert is_told(place, Place)
        bench.accept(place.record.record.request, 2, "d1")
    bench.now = pause_s
    out = [type(command) for command in bench.do(Lost("d1"))]
    assert out == [Poisonous, Fail] * 3 if is_refused else [DecodeLost] * 3
    again = [c.record.record.request for c in bench.join("d2", "decode", 3) if is_told(c, Place)]
    assert again == ([] if is_refused else [A, B, C])


def test_what_kills_is_refused_and_takes_three_workers_at_most() -> None:
    """Guards the pool: a request that kills whatever takes it, amid others that go on wherever they are put."""
    bench = Bench(decodes=6)
    lost: list[str] = []
    places = {name: bench.submit(name)[0] for name in (A, B, C)}
    where = {name: place.worker for name, place in places.items() if is_told(place, Place)}
    placement = dict.fromkeys(where, 1)
    refused: list[RequestId] = []
    for name, worker in where.items():
        bench.accept(name, 1, worker)
    while A in where:
        bench.now += 0.05
        lost.append(where[A])
        gone = [name for name, worker in where.items() if worker == lost[-1]]
        out = bench.do(Lost(lost[-1]))
        for name in gone:
            del where[name]
        refused += [c.request for c in out if isinstance(c, Poisonous)]
        for command in out:
            if is_told(command, Place):
                record = command.record
                where[record.record.request] = command.worker
                placement[record.record.request] = record.placement
                bench.accept(record.record.request, record.placement, command.worker)
    assert A in refused and len(lost) <= POISON_VICTIMS


def test_a_cut_stream_kills_nobody() -> None:
    """Guards against blaming a request for workers that turn out to be alive, and against endless placements."""
    bench = Bench(max_placements=3)
    running(bench, 5)
    for placement in (2, 3):
        bench.do(Lost("d0"))
        (place,) = bench.join("d0", "decode", 1)
        assert is_told(place, Place) and place.record.placement == placement
        bench.accept(A, placement)
    (failed,) = bench.do(Lost("d0"))
    assert isinstance(failed, Fail) and failed.fault.code == "UNAVAILABLE"
    assert "poisonous" not in failed.fault.message and "3 placements" in failed.fault.message


@pytest.mark.parametrize("unseen", [True, False])
def test_a_worker_that_is_back_alive_is_no_victim(unseen: bool) -> None:
    """Guards against a request called poisonous for one dead worker and one cut stream."""
    bench = Bench(decodes=2)
    first = running(bench, 5)
    _, place = lose(bench, first)
    bench.accept(A, 2, place.worker)
    if unseen:  # the second is cut, and is back before anybody heard of it
        interrupted, place = bench.join(place.worker, "decode", 1)
        assert isinstance(interrupted, DecodeLost)
    else:  # the first was only cut
        bench.join(first, "decode", 1)
        _, place = lose(bench, place.worker)
    assert is_told(place, Place) and place.record.placement == 3
    assert bench.accept(A, 3, place.worker) == [Begin(A)]


def test_a_cut_that_is_only_seen_when_it_is_mended() -> None:
    """Guards against requests left on a stream that was replaced without a word."""
    bench = Bench()
    running(bench, 5)
    interrupted, place = bench.join("d0", "decode", 1)
    assert interrupted == DecodeLost(A, "d0", 1)
    assert is_told(place, Place) and place.record.record.tokens[-1] == 5


def test_the_budget_is_shared_and_grows_with_requests() -> None:
    """Guards against a failing cluster that drowns in its own retries."""
    bench = Bench(decodes=3, retry_reserve=2, retry_fraction=0.5)
    homes = {name: running(bench, 5, request=name) for name in (A, B, C)}
    out = [c for home in set(homes.values()) for c in bench.do(Lost(home))]
    (failed,) = [c for c in out if isinstance(c, Fail)]
    assert "retry budget" in failed.fault.message
    budget = RetryBudget(2, 0.5)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    budget.arrived()
    assert not budget.take(0.0)
    budget.arrived()
    assert budget.take(0.0) and not budget.take(29.0)
    assert budget.take(31.0)
    for _ in range(100):
        budget.arrived()
    assert [budget.take(31.0) for _ in range(3)] == [True, True, False]


# ---- lost prefill workers


def asked(bench: Bench, home: str, failed: str) -> list[Command]:
    return bench.hear(NeedPrefill(A, 1, failed), home)


def test_another_prefill_worker_is_named_and_then_none() -> None:
    """Guards against a decode worker sent back to the one it lost, or left without an answer."""
    bench = Bench(prefills=2)
    (place,) = bench.submit()
    assert is_told(place, Place)
    first = place.record.prefill.name
    bench.accept()
    (answer,) = asked(bench, "d0", first)
    assert is_told(answer, UsePrefill) and answer.record.prefill is not None
    second = answer.record.prefill.name
    assert {first, second} == {"p0", "p1"} and answer.record.placement == 1
    assert asked(bench, "d0", first) == [Ignored("stale", 0)], "asked twice, answered once"
    (answer,) = asked(bench, "d0", second)
    assert is_told(answer, UsePrefill) and answer.record.prefill is None
    assert bench.hear(Tokens(A, 1, 0, [5])) == [Deliver(A, [5])]


def test_the_other_prefill_worker_is_the_cheapest_one() -> None:
    """Guards against a choice blind to queues."""
    bench = Bench(prefills=3)
    (place,) = bench.submit()
    assert is_told(place, Place)
    first = place.record.prefill.name
    bench.accept()
    busy, idle = sorted({"p0", "p1", "p2"} - {first})
    bench.hear(load(waiting_tokens=5000), busy)
    (answer,) = asked(bench, "d0", first)
    assert is_told(answer, UsePrefill) and answer.record.prefill is not None
    assert answer.record.prefill.name == idle


def test_a_new_life_of_a_lost_prefill_worker_may_be_asked() -> None:
    """Guards against a restart that helps nobody, and against beliefs in the cache of a dead process."""
    bench = Bench()
    running(bench)
    assert bench.router.index.held_blocks("p0")
    bench.join("p0", "prefill", 2)
    (answer,) = asked(bench, "d0", "p0")
    assert is_told(answer, UsePrefill)
    assert answer.record.prefill == PeerAddress("p0", "p0:1")


def test_a_prompt_that_kills_prefill_workers_is_poison() -> None:
    """Guards the prefill pool against one prompt: lost before it is reported, or after."""
    bench = Bench(prefills=3)
    (place,) = bench.submit()
    assert is_told(place, Place)
    first = place.record.prefill.name
    bench.accept()
    bench.do(Lost(first))
    (answer,) = asked(bench, "d0", first)
    assert is_told(answer, UsePrefill) and answer.record.prefill is not None
    second = answer.record.prefill.name
    (answer,) = asked(bench, "d0", second)
    assert is_told(answer, UsePrefill) and answer.record.prefill is not None
    bench.do(Lost(second))
    named, failed, cancel = asked(bench, "d0", answer.record.prefill.name)
    assert isinstance(named, Poisonous) and named.deaths.index(first) < named.deaths.index(second)
    assert isinstance(failed, Fail) and failed.outcome is FinishReason.ERROR
    assert is_told(cancel, Cancel) and cancel.record.reason is FinishReason.CANCELLED
    assert isinstance(failed, Fail) and is_told(cancel, Cancel)
    bench.hear(ended(reason=FinishReason.CANCELLED))
    assert bench.router.open == 0


def test_without_prefill_workers_the_decode_worker_does_it_alone() -> None:
    """Guards against requests that wait, or fail, while a worker is there that could run them."""
    bench = Bench(prefills=0)
    (place,) = bench.submit()
    assert is_told(place, Place) and place.record.prefill == LOCAL == PeerAddress("", "")
    bench.accept()
    bench.hear(Tokens(A, 1, 0, [5]))
    (done,) = bench.hear(ended(output_tokens=1))
    assert isinstance(done, Complete)
    bench.join("p0", "prefill", 1)
    (place,) = bench.submit(B)
    assert is_told(place, Place) and place.record.prefill.name == "p0"


def test_a_silent_prefill_worker_is_passed_by() -> None:
    """Guards against a request sent to a prefill worker whose engine stands still, while another way is open."""
    bench = Bench()
    bench.now = 30.0
    bench.hear(load())
    (place,) = bench.submit()
    assert is_told(place, Place) and place.record.prefill == LOCAL


def test_history_that_no_prefill_pool_holds_is_prefilled_locally() -> None:
    """Guards against a request that outgrew every prefill worker and would wait for ever."""
    bench = Bench(prefills=0, decodes=2)
    bench.join("p0", "prefill", 1, 3)
    home = running(bench, *range(200, 209))  # 49 tokens: four blocks
    _, place = lose(bench, home)
    assert place.record.prefill == LOCAL and len(place.record.record.tokens) == 49


def test_a_local_prefill_cannot_crowd_out_the_line() -> None:
    """Guards the line's order with no prefill worker: refusals and reports work as ever."""
    bench = Bench(prefills=0)
    bench.submit()
    assert bench.hear(Refused(A, 1, 4)) == []
    (place,) = bench.hear(load())
    assert is_told(place, Place) and place.record.placement == 2
    assert bench.hear(Accepted(A, 2, 0)) == [Begin(A)]


def test_a_poisonous_request_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the operator's only trace of it, and the caller's text, which must not be in it."""
    bench = Bench(decodes=2)
    hub = Hub(bench.router, lambda: bench.now, NullObserver())
    sent: list[object] = []
    hub.connect(lambda worker, record: sent.append(record))
    home = running(bench, 5)
    hub.lost(home)
    assert len(sent) == 1, "it was not placed again"
    bench.accept(A, 2, {"d0": "d1", "d1": "d0"}[home])
    hub.lost({"d0": "d1", "d1": "d0"}[home])
    (line,) = [r for r in caplog.records if r.levelname == "ERROR"]
    other = {"d0": "d1", "d1": "d0"}[home]
    assert line.getMessage() == (
        "refused as poisonous: workers were lost while they held it: "
        f"{home} (its stream broke; after 1 tokens, alone), "
        f"0.0 s later {other} (its stream broke; after 1 tokens, alone)"
    )
    assert vars(line)["request"] == "a"
    assert not any("39" in r.getMessage() for r in caplog.records), "a prompt token was logged"


def test_the_obituary_tells_who_was_there() -> None:
    """Guards the operator, who must see whether a request was alone on the workers that it is refused for."""
    call = Call(request_record(), 1, None)
    for number, held in enumerate((1, 2, 3)):
        call.victims[f"d{number}", Incarnation(1)] = dead(float(number), held, 4)
    assert obituary(call) == (
        "d0 (its stream broke; after 4 tokens, alone), "
        "1.0 s later d1 (its stream broke; after 4 tokens, with 1 other), "
        "1.0 s later d2 (its stream broke; after 4 tokens, with 2 others)"
    )


@pytest.mark.parametrize("others", [0, 400])
def test_a_request_does_not_wait_behind_its_own_lost_attempt(others: int) -> None:
    """Guards chunks that a prefill worker has computed for a reader that died, and would compute no further: in the
    report that counts the rest, the request would find itself in its own way, and be computed anew elsewhere. Other
    requests there are in its way as ever."""
    bench = Bench(decodes=2, prefills=2)
    bench.hear(load(waiting_tokens=30), "p1")
    (place,) = bench.submit(A)
    assert is_told(place, Place) and place.record.prefill.name == "p0"
    bench.accept(A, worker=place.worker)
    bench.hear(load(), "p1")
    bench.hear(load(waiting_tokens=40 + others), "p0")
    _, again = lose(bench, place.worker)
    assert again.record.prefill.name == ("p1" if others else "p0")

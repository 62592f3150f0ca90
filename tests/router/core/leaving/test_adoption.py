"""Requests of a router that is gone, event by event: who goes on with them, and which report of two is believed. Over
real connections they are tried in tests/router/test_restart.py, with a router that is killed in
tests/chaos/test_chaos_router.py, what workers keep of them in tests/decode_worker/scheduler/leaving/test_orphans.py."""

import itertools
from collections.abc import Sequence

import msgspec
import pytest

from engine.messages import (
    Cancel,
    Finish,
    NeedPrefill,
    Orphan,
    OrphansTold,
    Place,
    Tokens,
    UsePrefill,
    Yield,
)
from engine.types import FinishReason, RequestId, RequestRecord, TokenLogprobs
from router.core.call_table import CallTable
from router.core.cluster_view import ClusterView
from router.core.events import (
    Adopt,
    ClientLeft,
    Complete,
    DecodeLost,
    Deliver,
    Fail,
    Ignored,
    Lost,
    Owned,
    StopFound,
    TellWorker,
    Tick,
    WorkersNamed,
)
from router.core.fair_share import OUTPUT_WEIGHT
from router.core.leaving.adoption import MAX_KNOWN, Adoptions
from router.core.placement import LOCAL
from router.front.samples import BeamSink
from router.hub import Hub
from router.status.observer import NullObserver
from tests.router.bench import A, B, Bench, ended, is_told
from tests.router.fake_cluster import load

PROMPT = list(range(40))


def orphan(*tokens: int, placement: int = 3, history: int = 0, **more: object) -> Orphan:
    """Make an orphan of request A with this output, of which the first `history` tokens are in the record."""
    record = RequestRecord(
        request=A,
        tokens=[*PROMPT, *tokens[:history]],
        prompt_tokens=len(PROMPT),
        max_tokens=24,
        seed=1,
        context=b"x",
    )
    values: dict[str, object] = {"prefill": "p0", "age_s": 1.0} | more
    return Orphan(record=record, placement=placement, tokens=list(tokens), **values)  # type: ignore[arg-type]


def cancel(worker: str, placement: int) -> TellWorker:
    return TellWorker(worker, Cancel(A, placement, FinishReason.CANCELLED))


def test_its_tenant_pays_here_for_what_it_writes_from_now_on() -> None:
    """Guards the shares of the line while a tenant's streams are resumed here: they were nobody's."""
    bench = Bench()
    bench.hear(orphan(5, 6))
    assert bench.do(Owned(A, "a", 2.0)) == [] == bench.do(Owned(B, "a", 2.0)), "and B is not known here"
    share = bench.router._table.share
    assert list(share._entries) == [A] and share._accounts["a"].spent == 0
    bench.hear(Tokens(A, 3, 2, [7, 8]))
    assert share._accounts["a"].spent == OUTPUT_WEIGHT * 2 / 2.0
    bench.hear(ended(placement=3, output_tokens=4))
    assert not share._entries and share._accounts["a"].spent == OUTPUT_WEIGHT * 2 / 2.0
    bench.router.check()


def test_it_goes_on_behind_what_it_has() -> None:
    """Guards against tokens lost or doubled between two routers, and against a count that fails a good answer."""
    bench = Bench()
    one = orphan(5, 6, 7)
    assert bench.hear(one) == [Adopt(one)]
    assert bench.hear(Tokens(A, 3, 2, [7, 8])) == [Ignored("duplicate", 1), Deliver(A, [8])]
    (done,) = bench.hear(ended(placement=3, output_tokens=4))
    assert isinstance(done, Complete) and done.reason is FinishReason.STOP
    assert bench.router.open == 0


def test_one_that_has_ended_completes_at_once() -> None:
    bench = Bench()
    bench.hear(orphan(5, 6))
    (done,) = bench.hear(ended(placement=3, reason=FinishReason.LENGTH, output_tokens=2))
    assert isinstance(done, Complete) and done.stats.output_tokens == 2 and bench.router.open == 0


def test_a_stop_string_that_the_dead_router_had_not_found() -> None:
    """Guards against output behind a stop string, and a contradiction in the count, after the worker had ended it."""
    bench = Bench()
    bench.hear(orphan(5, 6, 7, 8))
    (finish,) = bench.do(StopFound(A, 2))
    assert is_told(finish, Finish) and finish.record.tokens_kept == 2
    (done,) = bench.hear(ended(placement=3, reason=FinishReason.LENGTH, output_tokens=4))
    assert isinstance(done, Complete)
    assert (done.reason, done.stats.output_tokens) == (FinishReason.STOP, 2)


def test_its_worker_is_lost_and_it_goes_on_elsewhere() -> None:
    """Guards the record that is rebuilt from a report: history, losses, placement numbers and the deadline."""
    bench = Bench(decodes=2)
    bench.do(WorkersNamed(("d0", "d1")))
    bench.hear(orphan(5, 6, 7, history=1, losses=1, remaining_s=9.0), "d0")
    bench.hear(OrphansTold(), "d0")
    bench.hear(OrphansTold(), "d1")
    bench.now = 4.0
    bench.hear(load(), "p0")
    bench.hear(load(), "d1")
    interrupted, place = bench.do(Lost("d0"))
    assert interrupted == DecodeLost(A, "d0", 3)
    assert is_told(place, Place) and place.worker == "d1"
    assert (place.record.placement, place.record.losses) == (4, 2)
    assert place.record.record.tokens == [*PROMPT, 5, 6, 7] and place.record.record.remaining_s == 5.0
    bench.accept(A, 4, "d1")
    assert bench.hear(Tokens(A, 4, 3, [8]), "d1") == [Deliver(A, [8])]


def test_losses_before_the_restart_count() -> None:
    """Guards `max_placements` against a request that begins anew with each router."""
    bench = Bench(decodes=2)
    bench.hear(orphan(5, losses=2), "d0")
    (failed,) = bench.do(Lost("d0"))
    assert isinstance(failed, Fail) and "3 placements" in failed.fault.message


def test_its_deadline_goes_on() -> None:
    bench = Bench()
    bench.now = 1.0
    bench.hear(orphan(5, remaining_s=2.0))
    bench.now = 3.0
    failed, told = bench.do(Tick())
    assert isinstance(failed, Fail) and failed.outcome is FinishReason.DEADLINE
    assert is_told(told, Cancel)


def test_its_prefill_worker_may_be_replaced() -> None:
    """Guards against a request whose question nobody answers, since the router did not place it."""
    bench = Bench(prefills=2)
    bench.hear(orphan(prefill="p1"))
    (answer,) = bench.hear(NeedPrefill(A, 3, "p1"))
    assert is_told(answer, UsePrefill) and answer.record.prefill is not None
    assert answer.record.prefill.name == "p0" != LOCAL.name
    unknown = Bench()
    unknown.hear(orphan(prefill="p9"))
    (answer,) = unknown.hear(NeedPrefill(A, 3, "p9"))
    assert is_told(answer, UsePrefill)


@pytest.mark.parametrize("higher_first", [True, False])
def test_of_two_reports_the_higher_placement_goes_on(higher_first: bool) -> None:
    """Guards against a client that read the higher placement and is given the lower one's tokens from there on."""
    bench = Bench(decodes=2)
    low, high = orphan(5, 6, 7, placement=3), orphan(5, 9, placement=4)
    if higher_first:
        bench.hear(high, "d1")
        assert bench.hear(low, "d0") == [cancel("d0", 3)]
    else:
        bench.hear(low, "d0")
        assert bench.hear(high, "d1") == [cancel("d0", 3), Adopt(high)]
    assert bench.hear(Tokens(A, 3, 3, [8]), "d0") == [Ignored("stale", 1)]
    assert bench.hear(ended(placement=3, reason=FinishReason.CANCELLED), "d0") == [
        Ignored("stale", 0)
    ]
    assert bench.hear(Tokens(A, 4, 2, [10]), "d1") == [Deliver(A, [10])]


def test_a_placement_that_the_dead_router_made_and_nobody_told_of_is_not_taken_for_its_own() -> None:
    """Guards against a cancel of the dead router's placement that strikes the new router's, under the same name."""
    bench = Bench(decodes=2, life=1_000)
    bench.hear(orphan(5, 6, placement=3), "d0")
    assert not bench.router.is_settled(bench.now)
    bench.now = 10.0
    assert bench.router.is_settled(bench.now)  # though d1 has not told
    (place,) = [c for c in bench.do(Lost("d0")) if is_told(c, Place)]
    assert place.worker == "d1" and place.record.placement == 1_001
    bench.accept(placement=1_001, worker="d1")
    assert bench.hear(orphan(5, placement=4), "d1") == [cancel("d1", 4)]
    assert bench.hear(Tokens(A, 1_001, 2, [7]), "d1") == [Deliver(A, [7])]


def test_it_is_placed_again_only_when_no_higher_placement_can_be_told_of() -> None:
    """Guards against a placement of its own that a report displaces, or that ends what the report has handed over."""
    bench = Bench(decodes=2, life=1_000)
    bench.do(WorkersNamed(("d0", "d1")))
    bench.hear(orphan(5, 6, placement=3), "d0")
    bench.hear(OrphansTold(), "d0")
    assert not [c for c in bench.do(Lost("d0")) if is_told(c, Place)]
    assert [c for c in bench.submit(B) if is_told(c, Place)], "who comes after it waits for it"
    (place,) = [c for c in bench.hear(OrphansTold(), "d1") if is_told(c, Place)]
    assert place.worker == "d1" and place.record.placement == 1_001


def test_of_two_reports_the_lower_one_may_have_ended() -> None:
    bench = Bench(decodes=2)
    bench.hear(orphan(5, 6, placement=3), "d0")
    bench.hear(ended(placement=3, output_tokens=2), "d0")
    high = orphan(5, placement=4)
    assert bench.hear(high, "d1") == [Adopt(high)]


def test_once_settled_what_was_adopted_goes_on() -> None:
    """Guards a client that reads already against another placement's tokens."""
    bench = Bench(decodes=2)
    bench.do(WorkersNamed(("d0",)))
    bench.hear(orphan(5, 6, placement=3), "d0")
    bench.hear(OrphansTold(), "d0")
    assert bench.router.is_settled(bench.now)
    assert bench.hear(orphan(5, 9, placement=4), "d1") == [cancel("d1", 4)]
    assert bench.hear(Tokens(A, 3, 2, [7]), "d0") == [Deliver(A, [7])]
    bench.hear(load(), "d1")
    *_, place = bench.do(Lost("d0"))
    assert is_told(place, Place)
    assert place.record.placement == 5, "a number that another worker takes for its own"


def test_a_client_that_left_meanwhile() -> None:
    """Guards against a report that brings a cancelled request back to life."""
    bench = Bench(decodes=2)
    bench.hear(orphan(5), "d0")
    bench.do(ClientLeft(A))
    assert bench.hear(orphan(5, placement=4), "d1") == [cancel("d1", 4)]
    bench.hear(ended(placement=3, reason=FinishReason.CANCELLED), "d0")
    assert bench.router.open == 0


def test_a_request_of_ones_own_is_not_adopted() -> None:
    """Guards a running request against a worker that reports it as somebody else's."""
    bench = Bench(decodes=2)
    (place,) = bench.submit()
    assert is_told(place, Place)
    bench.accept(worker=place.worker)
    other = {"d0": "d1", "d1": "d0"}[place.worker]
    assert bench.hear(orphan(5, placement=7), other) == [cancel(other, 7)]
    assert bench.hear(Tokens(A, 1, 0, [5]), place.worker) == [Deliver(A, [5])]


def test_what_nobody_can_serve_is_cancelled() -> None:
    """Guards against a request that runs on for a context which this router cannot read."""
    bench = Bench()
    hub = Hub(bench.router, lambda: bench.now, NullObserver())
    sent: list[object] = []
    hub.connect(lambda worker, record: sent.append(record))
    hub.heard("d0", [orphan(5)])
    assert sent == [Cancel(A, 3, FinishReason.CANCELLED)]


class Kept(BeamSink):
    """The client's side of an adopted request. `given`: what it was given again, at once, and what followed."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__([])
        self.given: list[tuple[str, list[int], float]] = []
        self._stop_after = stop_after

    def replayed(self, ids: list[int], now: float, logprobs: Sequence[TokenLogprobs] = ()) -> int | None:
        self.given.append(("again", list(ids), now))
        return self._stop_after

    def tokens(self, ids: list[int], now: float, *logprobs: object) -> int | None:
        self.given.append(("new", ids, now))
        return self._stop_after


@pytest.mark.parametrize("stop_after", [None, 2])
def test_what_it_has_is_given_again_in_one_piece(stop_after: int | None) -> None:
    """Guards the loop of a router that takes over: each token of each request went the whole way of a new one. A stop
    string in it is told to the core once."""
    bench, sent = Bench(), list[object]()
    hub = Hub(bench.router, lambda: bench.now, NullObserver())
    hub.connect(lambda worker, record: sent.append(record))
    sink = Kept(stop_after)
    hub.adopt_with(lambda one, now: sink)
    hub.heard("d0", [orphan(5, 6, 7)])
    assert sink.given == [("again", [5, 6, 7], bench.now)]
    assert [type(record) for record in sent] == ([Finish] if stop_after else [])
    hub.heard("d0", [Tokens(A, 3, 3, [8])])
    assert [ids for how, ids, _ in sink.given if how == "new"] == ([] if stop_after else [[8]])
    assert list(hub.journal._begun) == [A]
    hub.leave(A)


def test_whose_it_is_is_told_to_the_core() -> None:
    """Guards the way on which an adopted request comes to its tenant's account: while its client's side is made."""
    bench = Bench()
    hub = Hub(bench.router, lambda: bench.now, NullObserver())
    hub.connect(lambda worker, record: None)
    sink = Kept()

    def revive(one: Orphan, now: float) -> Kept:
        hub.charge(one.record.request, "a", 1.0)
        return sink

    hub.adopt_with(revive)
    hub.heard("d0", [orphan(5), Tokens(A, 3, 1, [6])])
    assert bench.router._table.share._accounts["a"].spent == OUTPUT_WEIGHT
    hub.leave(A)


def test_what_stands_behind_another_record_came_later() -> None:
    """Guards a gap before a token that is less than nothing: one look at the clock is of what follows at once."""
    bench, ticks, made = Bench(), itertools.count(), list[float]()
    hub = Hub(bench.router, lambda: float(next(ticks)), NullObserver())
    hub.connect(lambda worker, record: None)
    sink = Kept()

    def revive(one: Orphan, now: float) -> Kept:
        made.append(now)
        return sink

    hub.adopt_with(revive)
    hub.heard("d0", [orphan(5), Tokens(A, 3, 1, [6])])
    (_, _, had_s), (_, _, new_s) = sink.given
    assert made == [had_s] and had_s < new_s, "made with what it had, and the token behind"
    hub.leave(A)


def adoptions() -> Adoptions:
    view = ClusterView(10.0)
    return Adoptions(5.0, CallTable(view), view, 0)


def test_when_a_router_has_settled() -> None:
    """Guards against a client refused while a worker has yet to report, and one that waits for a dead one for ever."""
    one = adoptions()
    assert not one.is_settled(100.0)
    one.told("d0")
    assert not one.is_settled(101.0), "nobody has named the workers"
    one.named(["d0", "d1"])
    assert not one.is_settled(104.9)
    one.told("d1")
    assert one.is_settled(104.9)
    one.named(["d0", "d1", "d2"])
    assert one.is_settled(104.9), "a worker that comes later unsettles it"
    late = adoptions()
    late.named(["d0"])
    assert not late.is_settled(0.0) and late.is_settled(5.0)


def test_what_is_known_of_adopted_requests_is_bounded() -> None:
    one = adoptions()
    first = orphan(5)
    assert one.takes(first, 0.0)
    for number in range(MAX_KNOWN):
        record = RequestRecord(
            request=RequestId(f"{number}"), tokens=[1], prompt_tokens=1, max_tokens=2, seed=1
        )
        one.takes(Orphan(record=record, placement=1, prefill="", tokens=[], age_s=0.0), 0.0)
    assert not one.knows(A) and one.knows(RequestId("0"))


def test_the_last_words_of_a_worker_that_was_given_up_are_dropped() -> None:
    """Guards the router against a report that comes between the verdict on a worker and the end of its stream."""
    bench = Bench(decodes=2)
    bench.do(Lost("d0"))
    assert bench.hear(orphan(5, 6), "d0") == [Ignored("stale", 2)]
    assert bench.router.open == 0


def test_its_next_placement_is_above_all_that_two_reports_and_this_router_know() -> None:
    """Guards two placements of one name: the lower report's, the higher one's, and those of routers before this one."""
    bench = Bench(decodes=3, life=1_000)
    bench.hear(orphan(5, placement=3), "d0")
    bench.hear(orphan(5, placement=4), "d1")
    bench.now = 5.0
    for name in ("d2", "p0"):
        bench.hear(load(), name)
    *_, place = bench.do(Lost("d1"))
    assert is_told(place, Place) and place.record.placement == 1_001


@pytest.mark.parametrize(("history", "cached_tokens"), [(0, 16), (1, 0)])
def test_the_prompt_of_one_that_had_lost_a_worker_was_never_cached(history: int, cached_tokens: int) -> None:
    """Guards bills: whoever computed its prompt before the restart, it was this request that paid for it."""
    bench = Bench()
    bench.hear(orphan(5, history=history))
    (done,) = bench.hear(ended(placement=3, output_tokens=1, prefill_cached_tokens=16))
    assert isinstance(done, Complete) and done.stats.prefill_cached_tokens == cached_tokens


def test_what_was_adopted_moves_when_no_higher_placement_can_be_told_of() -> None:
    """Guards against a move of a placement that another worker's report then displaces."""
    bench = Bench(decodes=2)
    bench.hear(orphan(5, 6), "d0")
    leaving = msgspec.structs.replace(load(), leaving=True)
    assert bench.hear(leaving, "d0") == []
    bench.now = 4.9
    assert bench.hear(leaving, "d0") == []
    bench.now = 5.0
    assert bench.hear(leaving, "d0") == [TellWorker("d0", Yield(A, 3))]


def test_the_same_placement_is_taken_once() -> None:
    """Guards a request that two workers would run: the first that reported it goes on."""
    bench = Bench(decodes=2)
    bench.hear(orphan(5), "d0")
    assert bench.hear(orphan(5), "d1") == [cancel("d1", 3)]
    assert bench.hear(Tokens(A, 3, 1, [6]), "d0") == [Deliver(A, [6])]


def test_a_request_of_ones_own_that_is_closed_was_not_adopted() -> None:
    """Guards memory, and the name: the router has placed it itself, and would take it for an earlier one's."""
    one = adoptions()
    one.close(A)
    assert not one.knows(A)


def test_a_report_that_comes_before_the_first_question_is_adopted() -> None:
    """Guards a router that hears of a request before anybody has asked it whether all have reported."""
    bench = Bench(life=1_000)
    adoptions = bench.router._adoptions
    adoptions._waits_since_s = None
    out: list[object] = []
    adoptions.adopt("d0", orphan(5, placement=3), 7.0, out)  # type: ignore[arg-type]
    assert any(isinstance(command, Adopt) for command in out)
    assert bench.router._calls[A].highest == 1_000


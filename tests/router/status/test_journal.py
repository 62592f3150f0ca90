"""The router's journal: the figures of the last minute, the flights, and the spans.

Tried elsewhere too: what is shown of it in tests/cluster/cli/test_top.py, spans over a whole cluster in
tests/telemetry/test_tracing.py and tests/integration/test_tracing.py, the recorder in tests/telemetry/test_flight.py.
"""

import logging
import tracemalloc

import pytest

from engine.messages import Cancel, Fault, Finish, PeerAddress, Place, RequestStats, UsePrefill, Yield
from engine.types import FinishReason, RequestId
from router.core import events
from router.status.journal import KEPT, RECENT_S, RouterJournal
from router.status.traffic import RequestSummary
from telemetry.flight import Flight
from telemetry.labels import STAGES
from telemetry.tracing import Span, unix_offset_s
from tests.router.core.parts import request_record

A = RequestId("a")


class Spans:
    """Takes the place of OpenTelemetry."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str, float]] = []
        self.closed: list[tuple[str, Span]] = []

    def open(self, request: str, name: str, traceparent: str, begin_s: float) -> str:
        self.opened.append((request, traceparent, begin_s))
        return "for the workers"

    def close(self, request: str, span: Span) -> None:
        self.closed.append((request, span))

    def add(self, traceparent: str, span: Span) -> None:
        raise AssertionError("the router has but one span")

    def shut(self) -> None: ...


def summary(at_s: float = 0.0, outcome: FinishReason = FinishReason.LENGTH, **more: object) -> RequestSummary:
    fields: dict[str, object] = {"e2e_s": 2.0, "ttft_s": None, "gaps_s": [], "stages": {}} | more
    return RequestSummary(request=A, outcome=outcome, at_s=at_s, **fields)  # type: ignore[arg-type]


def whats(journal: RouterJournal) -> list[str]:
    return [event.what for event in flight(journal).events]


def flight(journal: RouterJournal) -> Flight:
    (one,) = journal.recorder.find(A)
    return one


def test_quantiles_are_of_single_requests_and_only_of_the_last_minute() -> None:
    """Guards figures that an hour of quiet cannot change any more, and a p50 of 100 requests that is the 51st."""
    journal = RouterJournal()
    journal.ended(summary(at_s=0.0, ttft_s=99.0, outcome=FinishReason.ERROR))
    for n in range(1, 101):
        journal.ended(summary(at_s=1.0, ttft_s=float(n), gaps_s=[float(n), 3.0 * n]))
    journal.ended(summary(at_s=2.0, outcome=FinishReason.CANCELLED))
    recent = journal.recent(RECENT_S + 1.0)
    assert recent.outcomes == {"length": 100, "cancelled": 1}
    assert (recent.ttft_p50_s, recent.ttft_p99_s) == (50.0, 99.0)
    assert (recent.itl_p50_s, recent.itl_p99_s) == (100.0, 198.0)
    later = journal.recent(RECENT_S + 2.5)
    assert (later.outcomes, later.ttft_p50_s, later.itl_p99_s) == ({}, None, None)


def test_targets_are_met_request_by_request() -> None:
    """Guards a minute that looks good by its median, and requests that failed before their first token and count for
    nothing. One that was refused, or whose client left, has missed nothing."""
    journal = RouterJournal()
    for ttft_s in (0.1, 0.2, 0.5, 0.6):
        journal.ended(summary(ttft_s=ttft_s, gaps_s=[0.04, 0.08]))
    for outcome in (FinishReason.ERROR, FinishReason.DEADLINE, FinishReason.CANCELLED, FinishReason.REJECTED):
        journal.ended(summary(outcome=outcome))
    assert journal.recent(1.0).in_time == {}, "nobody has named targets"
    assert journal.recent(1.0, (0.5, 0.05)).in_time == {"ttft": (3, 6), "itl": (0, 4)}
    assert journal.recent(1.0, (0.5, 0.06)).in_time["itl"] == (4, 4)


def test_what_moved_and_where_the_time_went() -> None:
    """Guards means over requests that have no stages, and a stage that only some requests went through."""
    journal = RouterJournal()
    moved = RequestStats(output_tokens=3, migrated_blocks=2, migrated_bytes=10, migration_s=0.5)
    journal.ended(summary(stages={"admit": 1.0, "migrate": 4.0}, stats=moved))
    journal.ended(summary(stages={"admit": 3.0}, stats=RequestStats(output_tokens=4)))
    journal.ended(summary(outcome=FinishReason.ERROR))
    recent = journal.recent(1.0)
    assert recent.stages == dict.fromkeys(STAGES, 0.0) | {"admit": 2.0, "migrate": 2.0}
    assert (recent.output_tokens, recent.migrated_requests) == (7, 1)
    assert (recent.migrated_blocks, recent.migrated_bytes, recent.migration_s) == (2, 10, 0.5)


def test_memory_is_bounded() -> None:
    """A request whose beginning was forgotten begins once more in its flight: nothing else comes of it."""
    journal = RouterJournal()
    for n in range(KEPT + 10):
        journal.ended(summary(stats=RequestStats(output_tokens=1)))
        journal.command(events.Deliver(RequestId(f"r{n}"), [1]), 0.0)
    assert journal.recent(0.0).output_tokens == KEPT
    for n, is_forgotten in (9, True), (10 + 1, False):
        journal.command(events.Deliver(RequestId(f"r{n}"), [1]), 0.0)
        assert bool(journal.recorder.find(f"r{n}")) == is_forgotten


def test_an_ending_is_kept_as_a_few_numbers_and_for_a_minute() -> None:
    """Guards against a router that grew by some 2 KB with each of its first thousands of requests: every gap between
    two tokens was kept, and all that the worker had reported."""
    journal, tokens = RouterJournal(), 100

    def end(at_s: float) -> None:
        stages = {name: at_s + place for place, name in enumerate(STAGES)}
        stats = RequestStats(output_tokens=tokens, stages=dict(stages), prefill_worker="p0" * tokens)
        journal.ended(summary(at_s=at_s, gaps_s=[at_s + n for n in range(tokens)], stages=stages, stats=stats))

    for n in range(300):  # the recorder is full from here on
        end(float(n) / 1000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(1000):
            end(1.0 + n / 1000)
        grown_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert journal.recent(2.0).outcomes == {"length": 1300}
    assert grown_bytes / 1000 < 800, "per request"
    end(3.0 + RECENT_S)
    assert len(journal._endings) == 1, "the others tell of more than a minute ago"


def test_a_flight_tells_the_story_of_a_request() -> None:
    """Guards a timeline that keeps silent about a step, or grows with every token."""
    journal = RouterJournal()
    record, nobody = request_record(A), PeerAddress("", "")
    journal.submitted(record, 0.0)
    tell = events.TellWorker
    journal.command(tell("d0", Place(record=record, placement=1, prefill=PeerAddress("p0", "h:1")), "least cost"), 1.0)
    journal.command(events.Begin(A), 2.0)
    for _ in range(3):
        journal.command(events.Deliver(A, [1]), 3.0)
    journal.command(tell("d0", UsePrefill(A, 1, None)), 4.0)
    journal.command(tell("d0", Yield(A, 1)), 5.0)
    journal.command(events.Moved(A, "d0", {}), 6.0)
    journal.command(tell("d1", Place(record=record, placement=2, prefill=nobody)), 7.0)
    journal.command(events.DecodeLost(A, "d1", 3), 8.0)
    journal.command(tell("d0", Finish(A, 2, 3)), 9.0)
    journal.left(A, 10.0)
    journal.command(tell("d0", Cancel(A, 2, FinishReason.CANCELLED)), 11.0)
    journal.ended(summary(at_s=12.0, ttft_s=3.0))
    assert whats(journal) == [
        "submitted",
        "offered",
        "accepted",
        "first token",
        "another prefill worker",
        "asked to yield",
        "yielded",
        "offered",
        "decode worker lost",
        "stop string",
        "left by its client",
        "cancel",
        "ended",
    ]
    steps = flight(journal).events
    assert steps[1].facts == {"decode": "d0", "placement": 1, "prefill": "p0", "reason": "least cost"}
    assert steps[7].facts["prefill"] == "d1", "a worker that is named no other prefills by itself"
    assert steps[4].facts["prefill"] == "d0"
    assert (steps[-1].at_s, steps[-1].facts) == (12.0, {"outcome": "length", "e2e_s": 2.0, "ttft_s": 3.0})


@pytest.mark.parametrize(("outcome", "is_dumped"), [(FinishReason.ERROR, True), (FinishReason.REJECTED, False)])
def test_a_request_that_failed_tells_its_timeline_in_the_log(
    outcome: FinishReason, is_dumped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a failure whose story is lost, and a log that floods when callers are refused."""
    journal = RouterJournal()
    with caplog.at_level(logging.WARNING):
        journal.command(events.Fail(A, Fault("UNAVAILABLE", "all gone"), outcome), 0.0)
    assert whats(journal) == ["failed"]
    assert any("all gone; its timeline" in record.message for record in caplog.records) == is_dumped


def test_the_callers_trace_goes_on_at_the_workers() -> None:
    assert RouterJournal().received(A, "the caller's", 5.0) == "the caller's", "nobody traces here, but they may"
    spans = Spans()
    assert RouterJournal(spans).received(A, "the caller's", 5.0) == "for the workers"
    ((request, context, begin_s),) = spans.opened
    assert (request, context, begin_s) == (A, "the caller's", pytest.approx(5.0 + unix_offset_s(), abs=0.01))


@pytest.mark.parametrize(("outcome", "error"), [("length", ""), ("cancelled", ""), ("deadline", "deadline")])
def test_a_span_holds_the_routers_own_stages_and_no_others(outcome: str, error: str) -> None:
    """Guards a trace in which the workers' time shows twice, or a client that left counts as a failure."""
    spans = Spans()
    stages = {"admit": 1.0, "route": 2.0, "reserve": 0.5, "prefill_run": 4.0, "stream_out": 0.25}
    RouterJournal(spans).ended(summary(at_s=9.0, outcome=FinishReason(outcome), e2e_s=8.0, stages=stages))
    ((request, span),) = spans.closed
    assert (request, span.error) == (A, error)
    assert span.end_s - span.begin_s == pytest.approx(8.0, abs=1e-5)
    told = [(c.name, c.begin_s - span.begin_s, c.end_s - span.begin_s) for c in span.children]
    assert [name for name, _, _ in told] == ["admit", "route", "reserve", "stream_out"]
    assert [t for _, *t in told] == [
        pytest.approx(t, abs=1e-5) for t in ([0.0, 1.0], [1.0, 3.0], [3.0, 3.5], [7.75, 8.0])
    ]

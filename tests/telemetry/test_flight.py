"""The flight recorder: what it keeps, what it forgets, and what it writes down."""

import logging

import pytest

from telemetry.flight import LONGEST, FlightRecorder


def test_moments_count_from_the_first_event() -> None:
    recorder = FlightRecorder("decode-0", unix_clock=lambda: 1e9)
    recorder.note("a", "placed", 50.0, placement=1)
    recorder.note("a", "ended", 52.5)
    (flight,) = recorder.find("a")
    assert (flight.worker, flight.began_unix_s) == ("decode-0", 1e9)
    assert [(e.at_s, e.what, e.facts) for e in flight.events] == [
        (0.0, "placed", {"placement": 1}),
        (2.5, "ended", {}),
    ]


def test_the_oldest_is_forgotten_not_the_busiest() -> None:
    """Guards a long request that is pushed out by short ones while it still runs."""
    recorder = FlightRecorder("router", capacity=3)
    recorder.note("long", "submitted", 0.0)
    for number in range(10):
        recorder.note(f"short-{number}", "submitted", number)
        recorder.note("long", "token", number)
    assert len(recorder.latest(99)) == 3
    assert recorder.latest(1)[0].request == "long" and len(recorder.find("long")[0].events) == 11
    assert recorder.find("short-0") == []


def test_a_request_that_never_ends_keeps_its_beginning_and_its_end() -> None:
    """Guards memory against a request that is placed again and again."""
    recorder = FlightRecorder("router")
    for number in range(LONGEST * 3):
        recorder.note("a", f"event {number}", number)
    (flight,) = recorder.find("a")
    assert len(flight.events) == LONGEST and flight.left_out == LONGEST * 2
    assert flight.events[0].what == "event 0"
    assert flight.events[-1].what == f"event {LONGEST * 3 - 1}"


def test_samples_are_found_with_their_request() -> None:
    recorder = FlightRecorder("router")
    for request in ("ab", "ab.1", "ab.2", "abc"):
        recorder.note(request, "submitted", 0.0)
    assert [flight.request for flight in recorder.find("ab")] == ["ab", "ab.1", "ab.2"]


def test_a_failure_writes_the_timelines_of_what_was_under_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards an engine's death whose log does not say whom it took along."""
    recorder = FlightRecorder("decode-0")
    recorder.note("done", "placed", 0.0)
    recorder.note("done", "ended", 1.0)
    recorder.note("open", "placed", 1.0, placement=2)
    with caplog.at_level(logging.WARNING):
        recorder.dump_open(frozenset({"ended"}), "the engine has failed")
    (record,) = caplog.records
    assert vars(record)["request"] == "open"
    assert record.getMessage() == (
        "the engine has failed; its timeline: 0.0000 placed placement=2"
    )

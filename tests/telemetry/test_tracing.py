"""Spans as a collector receives them; and what tracing costs where it is off: not even an import."""

import subprocess
import sys
import time

import pytest

from telemetry import tracing
from telemetry.tracing import Span, TracingConfig, TracingError, consecutive, make_tracing, sound

CALLER = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def test_off_means_not_imported() -> None:
    """Guards a router's start, and its memory, against a library that nobody has asked for."""
    code = (
        "import sys; from telemetry import tracing; import router.server, decode_worker.journal\n"
        "tracing.configure(tracing.TracingConfig(), 'router')\n"
        "assert tracing.current() is None\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extra_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules, "opentelemetry"]:
        if name.split(".")[0] == "opentelemetry":
            monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(TracingError, match=r"pip install 'headrace\[otel\]'"):
        make_tracing(TracingConfig(endpoint="http://127.0.0.1:1"), "router")


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        CALLER + "\n",
        CALLER.upper(),
        CALLER.replace("a", "0"),
        CALLER.replace("b", "0"),
        "ff" + CALLER[2:],
        CALLER[:-1],
    ],
)
def test_a_malformed_context_is_none(bad: str) -> None:
    """Guards requests against their callers' tracing headers."""
    assert sound(bad) == "" and sound(CALLER) == CALLER


def test_a_request_is_one_tree_under_its_callers_span() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from tests.telemetry.collector import Collector

    collector = Collector()
    try:
        made = make_tracing(TracingConfig(endpoint=collector.endpoint), "router")
        assert made is not None
        now = time.time()
        context = made.open("r1", "headrace.request", CALLER, now)
        assert context[3:35] == "a" * 32 and context[36:52] != "b" * 16
        stages = consecutive(now, [("admit", 0.5), ("route", 0.0), ("reserve", 0.25)])
        made.add(context, Span("headrace.decode", now, now + 2, {"headrace.x": 1}, error="lost"))
        made.add("", Span("dropped", now, now))
        made.close("r1", Span("headrace.request", now, now + 3, {"headrace.outcome": "stop"}, stages))
        made.close("r1", Span("said twice", now, now))
        made.shut()
    finally:
        collector.close()
    spans = {one.name: one for one in collector.spans}
    assert spans.keys() == {"headrace.request", "headrace.decode", "admit", "route", "reserve"}
    root = spans["headrace.request"]
    assert {one.trace for one in spans.values()} == {"a" * 32} and root.parent == "b" * 16
    assert {one.parent for name, one in spans.items() if one is not root} == {root.span}
    assert root.facts == {"headrace.request": "r1", "headrace.outcome": "stop"}
    assert root.end_s - root.begin_s == pytest.approx(3, abs=1e-4)
    assert spans["reserve"].begin_s - spans["admit"].begin_s == pytest.approx(0.5, abs=1e-4)
    assert spans["headrace.decode"].is_error and not root.is_error
    assert {one.worker for one in spans.values()} == {"router"}


def test_a_share_of_requests_is_traced_and_a_caller_decides_for_itself() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from tests.telemetry.collector import Collector

    collector = Collector()
    try:
        made = make_tracing(TracingConfig(endpoint=collector.endpoint, sample=0.0), "router")
        assert made is not None
        not_sampled = made.open("a", "n", "", 1.0)
        assert not is_sampled(not_sampled) and is_sampled(made.open("b", "n", CALLER, 1.0))
        made.add(not_sampled, Span("no", 1.0, 2.0))
        made.close("a", Span("n", 1.0, 2.0))
        made.close("b", Span("n", 1.0, 2.0))
        made.shut()
    finally:
        collector.close()
    assert [one.trace for one in collector.spans] == ["a" * 32]


def is_sampled(traceparent: str) -> bool:
    return bool(int(traceparent[-2:], 16) & 1)


def test_a_collector_that_is_gone_costs_no_request(free_port: int) -> None:
    """Guards an answer that waits for its spans to be delivered."""
    pytest.importorskip("opentelemetry.sdk")
    made = make_tracing(TracingConfig(endpoint=f"http://127.0.0.1:{free_port}"), "router")
    assert made is not None
    began_s = time.monotonic()
    for number in range(100):
        made.open(f"{number}", "n", "", 1.0)
        made.close(f"{number}", Span("n", 1.0, 2.0))
    assert time.monotonic() - began_s < 1.0
    made.shut()


def test_configure_replaces_what_was_there() -> None:
    tracing.configure(TracingConfig(), "router")
    assert tracing.current() is None
    tracing.shut()

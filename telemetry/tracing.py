"""Tracing with OpenTelemetry, an extra: spans are made when a request, or a worker's part of it, has ended.

A request's context is one W3C `traceparent`, which travels in its record, so that router, prefill worker and decode
worker add to one trace. Spans carry the wall clock of the process that measured them: durations are exact, how spans
of two hosts lie beside each other is as good as those hosts' clocks. Without an endpoint nothing is imported, and a
caller's `traceparent` is passed on as it is.
"""

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from telemetry.build import VERSION
from telemetry.flight import Fact

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OpenSpan

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
HEADER = "traceparent"


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where spans go."""

    endpoint: str = ""
    """Base URL of an OTLP/HTTP collector, as http://127.0.0.1:4318; empty: no tracing."""
    sample: float = 1.0
    """Share of requests that are traced, unless their caller has decided it."""


class TracingError(Exception):
    """Tracing was asked for and cannot be had; the message says what to do."""


class Span(msgspec.Struct, frozen=True):
    """A piece of a request's life, in seconds since 1970, with the pieces inside it."""

    name: str
    begin_s: float
    end_s: float
    facts: dict[str, Fact] = {}
    children: Sequence["Span"] = ()
    error: str = ""


class Tracing(Protocol):
    """Takes spans. All calls of one instance come from one thread, except `shut`."""

    def open(self, request: str, name: str, traceparent: str, begin_s: float) -> str:
        """Begin the trace of a request, or go on with its caller's; returns the context for whoever works on it."""

    def close(self, request: str, span: Span) -> None:
        """End what `open` began with this span; the span of another request is dropped."""

    def add(self, traceparent: str, span: Span) -> None:
        """Add a part of a request, under the context that came with it; dropped without one."""

    def shut(self) -> None:
        """Send the spans that are still here."""


def sound(traceparent: str) -> str:
    """Return the context if it is one, otherwise none: a caller's malformed header never fails its request."""
    return traceparent if _TRACEPARENT.fullmatch(traceparent) else ""


def unix_offset_s() -> float:
    """Return what to add to this process's monotonic clock to get the wall clock's time."""
    return time.time() - time.monotonic()


def consecutive(begin_s: float, stages: Sequence[tuple[str, float]]) -> list[Span]:
    """Return the spans of stages that follow each other from `begin_s` on, by their durations."""
    spans = []
    for name, seconds in stages:
        spans.append(Span(name, begin_s, begin_s + seconds))
        begin_s += seconds
    return spans


def make_tracing(config: TracingConfig, worker: str) -> Tracing | None:
    """Return what a process gives its spans to; None without an endpoint. Raises TracingError without OpenTelemetry."""
    if not config.endpoint:
        return None
    try:
        return _Exporting(config, worker)
    except ImportError as error:
        raise TracingError(
            f"tracing.endpoint is set, and OpenTelemetry is not installed ({error.name}): "
            "pip install 'headrace[otel]'"
        ) from error


_process: list[Tracing] = []


def configure(config: TracingConfig, worker: str) -> None:
    """Choose where this process's spans go, once, before anything of it is made. Raises TracingError."""
    shut()
    made = make_tracing(config, worker)
    _process[:] = [made] if made is not None else []


def current() -> Tracing | None:
    """Return what `configure` has chosen."""
    return _process[0] if _process else None


def shut() -> None:
    """Send the spans that are still here, and forget what `configure` has chosen."""
    while _process:
        _process.pop().shut()


class _Exporting:
    """Sends spans to an OTLP collector, in batches, from a thread of the SDK. Mutable state: the open spans by request.
    """

    def __init__(self, config: TracingConfig, worker: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(config.sample),
            resource=Resource.create(
                {"service.name": "headrace", "service.instance.id": worker, "service.version": VERSION}
            ),
            shutdown_on_exit=False,
        )
        endpoint = config.endpoint.rstrip("/") + "/v1/traces"
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("headrace", VERSION)
        self._open: dict[str, OpenSpan] = {}

    def open(self, request: str, name: str, traceparent: str, begin_s: float) -> str:
        parent = self._propagator.extract({HEADER: traceparent})
        span = self._tracer.start_span(
            name,
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            attributes={"headrace.request": request},
            start_time=_ns(begin_s),
        )
        self._open[request] = span
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return carrier.get(HEADER, "")

    def close(self, request: str, span: Span) -> None:
        opened = self._open.pop(request, None)
        if opened is not None:
            self._fill(opened, span)

    def add(self, traceparent: str, span: Span) -> None:
        if traceparent:
            self._emit(span, self._propagator.extract({HEADER: traceparent}))

    def shut(self) -> None:
        self._provider.shutdown()

    def _emit(self, span: Span, context: Any) -> None:
        started = self._tracer.start_span(span.name, context=context, start_time=_ns(span.begin_s))
        self._fill(started, span)

    def _fill(self, opened: "OpenSpan", span: Span) -> None:
        opened.set_attributes(span.facts)
        if span.error:
            opened.set_status(self._trace.StatusCode.ERROR, span.error)
        inside = self._trace.set_span_in_context(opened)
        for child in span.children:
            self._emit(child, inside)
        opened.end(_ns(span.end_s))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)

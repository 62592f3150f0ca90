"""One request through real processes: one trace, told by router, prefill worker and decode worker together."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from engine.plan import STAGES
from engine.types import SamplingParams
from router.config import RouterConfig
from router.front.api import Finished, GenerateCall, Started
from router.grpc.client import Client
from telemetry.flight import Flight
from telemetry.tracing import TracingConfig
from tests.cluster.processes.test_launchers import eventually

pytest.importorskip("opentelemetry.sdk")

from tests.telemetry.collector import Collector, Seen

GREEDY = SamplingParams(temperature=0.0)
PARENT = "c" * 16
SPANS = {*STAGES, "headrace.request", "headrace.prefill", "headrace.decode", "headrace.wire"}


@pytest.fixture(scope="module")
def traced(demo_model: Path) -> Iterator[tuple[Cluster, Collector]]:
    collector = Collector()
    config = ClusterConfig(
        launcher="process",
        router=RouterConfig(grpc_port=0, http_port=0),
        tracing=TracingConfig(endpoint=collector.endpoint),
    )
    with Cluster(config, make_launcher("process"), model_dir=str(demo_model)) as cluster:
        cluster.start()
        yield cluster, collector
    collector.close()


def parent(digit: str) -> tuple[str, str]:
    return digit * 32, f"00-{digit * 32}-{PARENT}-01"


def spans_of(collector: Collector, trace: str) -> dict[str, Seen]:
    """Return a trace's spans once all have come: the workers' may be a second behind the answer."""

    def mine() -> list[Seen]:
        return [one for one in collector.spans if one.trace == trace]

    assert eventually(lambda: {one.name for one in mine()} >= SPANS, 10.0), mine()
    assert len(mine()) == len(SPANS), "a span was sent twice"
    return {one.name: one for one in mine()}


def test_one_trace_holds_the_nine_stages_and_the_wire(traced: tuple[Cluster, Collector]) -> None:
    """Guards a trace that ends at the router, spans that nobody's parent is, and stages that do not add up."""
    cluster, collector = traced
    trace, header = parent("a")
    call = GenerateCall(
        prompt=list(range(1000, 1300)), max_tokens=6, sampling=GREEDY, traceparent=header
    )
    with Client(cluster.router.address) as client:
        (finished,) = [e for e in client.generate(call) if isinstance(e, Finished)]
    spans = spans_of(collector, trace)
    workers = {name: one.worker for name, one in spans.items()}
    assert workers["headrace.request"] == workers["admit"] == workers["stream_out"] == "router"
    assert workers["headrace.prefill"] == workers["prefill_run"] == "prefill-0"
    assert workers["headrace.decode"] == workers["headrace.wire"] == workers["migrate"] == "decode-0"
    root = spans["headrace.request"]
    assert root.parent == PARENT
    parents = {name: spans_by_id(spans).get(one.parent, "") for name, one in spans.items()}
    assert parents["headrace.prefill"] == parents["headrace.decode"] == "headrace.request"
    for name in ("admit", "route", "reserve", "stream_out"):
        assert parents[name] == "headrace.request"
    for name in ("prefill_queue", "prefill_run"):
        assert parents[name] == "headrace.prefill"
    for name in ("migrate", "decode_queue", "decode_run", "headrace.wire"):
        assert parents[name] == "headrace.decode"
    stages = finished.stats.stages
    for name in ("decode_run", "migrate", "admit", "route"):
        seconds = spans[name].end_s - spans[name].begin_s
        assert seconds == pytest.approx(stages[name], abs=1e-4), name
    assert spans["headrace.wire"].facts["headrace.bytes"] == finished.stats.migrated_bytes
    # One host, one clock: the parts lie within the whole.
    for one in spans.values():
        assert root.begin_s - 0.05 <= one.begin_s <= one.end_s <= root.end_s + 0.05, one


def test_http_carries_the_context_too(traced: tuple[Cluster, Collector]) -> None:
    cluster, collector = traced
    trace, header = parent("b")
    body = {"prompt": "The mill stands at a bend of the river.", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://{cluster.router.http}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "traceparent": header},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.loads(response.read())
    root = spans_of(collector, trace)["headrace.request"]
    assert answer["id"] == f"cmpl-{root.facts['headrace.request']}"


def test_a_callers_nonsense_costs_it_nothing(traced: tuple[Cluster, Collector]) -> None:
    cluster, _ = traced
    call = GenerateCall(prompt="Hi", max_tokens=2, sampling=GREEDY, traceparent="nonsense")
    with Client(cluster.router.address) as client:
        assert any(isinstance(event, Finished) for event in client.generate(call))


def test_every_process_can_be_asked_for_its_part(traced: tuple[Cluster, Collector]) -> None:
    """Guards `headrace trace` against a process that remembers nothing."""
    cluster, _ = traced
    call = GenerateCall(prompt=list(range(2000, 2100)), max_tokens=3, sampling=GREEDY)
    with Client(cluster.router.address) as client:
        started, *_ = list(client.generate(call))
    assert isinstance(started, Started)

    def told(process: str) -> list[str]:
        answer = cluster.ask(process, "flights", started.request_id)
        flights = msgspec.json.decode(answer, type=list[Flight])
        return [event.what for flight in flights for event in flight.events]

    assert told("router") == ["submitted", "offered", "accepted", "first token", "ended"]
    decode = told("decode-0")
    assert decode[:3] == ["placed", "accepted", "prefill asked for"] and decode[-1] == "ended"
    assert {"offered", "copied", "first token"} <= set(decode)
    prefill = told("prefill-0")
    assert prefill[0] == "asked for" and {"offered", "first token", "landed"} <= set(prefill)
    latest = msgspec.json.decode(cluster.ask("router", "flights"), type=list[Flight])
    assert latest[0].request == started.request_id


def spans_by_id(spans: dict[str, Seen]) -> dict[str, str]:
    return {one.span: name for name, one in spans.items()}

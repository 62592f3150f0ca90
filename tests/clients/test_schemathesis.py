"""The HTTP front against its own description, by a program that knows nothing else: data that the description allows,
and data that it forbids. Nothing may be our fault, every answer must be as described, and what is forbidden refused."""

import asyncio
import copy
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from access.config import AccessConfig
from tests.clients.environments import ROOT, environment, run
from tests.router.fake_cluster import ByteText
from tests.router.test_credentials import Site

pytestmark = pytest.mark.clients
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
SECONDS, SEEDS, ENOUGH = 40, (7, 8, 9), 20
"""The time of a run, the most runs of a kind, and how often each route must have answered as is wanted of them."""
GENERATING = {
    "/v1/chat/completions": "ChatRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/messages": "MessagesRequest",
    "/v1/responses": "ResponsesRequest",
}


@contextmanager
def fronted() -> Iterator[str]:
    """The address of a real router, in a thread, whose workers answer at once whatever they are asked."""
    told: list[str] = []
    is_up = threading.Event()
    stops: list[Callable[[], object]] = []

    async def serve() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stopping.set))
        async with Site(AccessConfig()) as site:
            told.append(site.url(""))
            is_up.set()
            await stopping.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_up.wait(30), "the router did not start"
        yield told[0]
    finally:
        stops[0]()
        thread.join(30)


# What one field asks of another is beyond a schema: of these alone, most of what it allows is also taken.
KEPT = (
    *("prompt", "messages", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "stream", "ignore_eos", "return_token_ids", "priority"),
    *("stop", "user", "metadata", "service_tier", "store"),
    *("input", "instructions", "max_output_tokens", "system", "stop_sequences"),
)


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The description, of the model that is served here."""
    schemas = document["components"]["schemas"]
    for name in GENERATING.values():
        properties = schemas[name]["properties"]
        schemas[name]["properties"] = {one: properties[one] for one in KEPT if one in properties}
        schemas[name]["properties"]["model"] = {"enum": [ByteText.name, None]}
    prompt = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": _token(), "minItems": 1}]}
    schemas["CompletionRequest"]["properties"]["prompt"] = prompt
    schemas["ResponsesRequest"]["properties"]["input"] = {"type": "string", "minLength": 1}
    schemas["MessagesRequest"]["properties"]["system"] = {"type": "string"}
    schemas["AnthropicMessage"]["properties"]["content"] = {"type": "string"}
    said = schemas["Message"]["properties"]
    said["content"] = {"type": "string"}
    schemas["Message"].update(properties={one: said[one] for one in ("role", "content")}, required=["role", "content"])
    return document


def without_headers(document: dict[str, Any]) -> dict[str, Any]:
    """The description without the headers that a request may have. The program takes a header that it made up for
    forbidden data, where a server ignores what it does not know (RFC 9110, 5.1); bad values of ours have tests of
    their own (`tests/router/http/test_openai.py`, `test_fuzz.py`)."""
    document = copy.deepcopy(document)
    for operations in document["paths"].values():
        for operation in operations.values():
            if "parameters" in operation:
                operation["parameters"] = [one for one in operation["parameters"] if one["in"] != "header"]
    return document


def _token() -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": ByteText.vocab_size - 1}


def tried(address: str, document: Path, mode: str, folder: Path, wanted: int) -> Counter[tuple[str, str, int]]:
    """Method, route and status of everything that was asked, and how often; every answer passed the checks. A machine
    that is busy comes to little in a run, so it has three to come to `ENOUGH` of each route with the status `wanted`.
    """
    found: Counter[tuple[str, str, int]] = Counter()
    for seed in SEEDS:
        found += _run_of(address, document, mode, folder, seed)
        if all(found["POST", path, wanted] >= ENOUGH for path in GENERATING):
            break
    return found


def _run_of(address: str, document: Path, mode: str, folder: Path, seed: int) -> Counter[tuple[str, str, int]]:
    program = environment("schemathesis")
    report = folder / f"{mode}-{seed}"
    command = [
        *(str(program / "st"), "run", str(document), "--url", address),
        *("--checks", ",".join(CHECKS), "--mode", mode, "--phases", "coverage,fuzzing"),
        *("--max-time", str(SECONDS), "--seed", str(seed), "--no-color", "--max-examples", "60"),
        *("--report", "ndjson", "--report-dir", str(report)),
    ]
    run(command, folder, limit_s=SECONDS * 8)
    (events,) = report.glob("*.ndjson")
    return Counter(_tried(events.read_text()))


def test_the_front_is_as_it_says(tmp_path: Path) -> None:
    document = json.loads((ROOT / "docs/openapi.json").read_text())
    paths = set(document["paths"])
    described = tmp_path / "described.json"
    described.write_text(json.dumps(without_headers(document)))
    narrow = tmp_path / "openapi.json"
    narrow.write_text(json.dumps(narrowed(document)))
    with fronted() as address:
        anything = tried(address, described, "all", tmp_path, 400)
        valid = tried(address, narrow, "positive", tmp_path, 200)
    assert {path for _, path, _ in anything} == paths
    # An answer in any shape but that of its description fails a run.
    for path in GENERATING:
        assert anything["POST", path, 400] >= ENOUGH, "what is forbidden was not sent"
        assert valid["POST", path, 200] >= ENOUGH, "hardly anything that is allowed was answered"


def _tried(report: str) -> Iterator[tuple[str, str, int]]:
    """Method, route and status of everything that was asked."""
    for line in report.splitlines():
        for event, told in json.loads(line).items():
            if event != "ScenarioFinished":
                continue
            method, _, path = told["recorder"]["label"].partition(" ")
            for one in told["recorder"].get("interactions", {}).values():
                if one["response"] is not None:
                    yield method, path, one["response"]["status_code"]

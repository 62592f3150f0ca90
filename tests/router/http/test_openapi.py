"""docs/openapi.json is what the program writes, has every route, and says of values what the checks say. Whether the
front keeps to it is tried by tests/clients/test_schemathesis.py."""

import json
import sys
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from engine.types import FinishReason
from router.http import openapi
from router.http.adapters.described import MessageErrorReply, MessageReply, ResponseReply
from router.http.openai_reply import whole
from router.http.routes import build_app
from router.http.schemas import ErrorEnvelope
from tests.router.http import test_messages, test_responses
from tests.router.http.fakes import FakeFrontend, FakeState, ask, refusal
from tests.router.http.test_fuzz import CheckingFrontend

DOCUMENT = openapi.describe()
ROUTES = {"ChatRequest": "/v1/chat/completions", "CompletionRequest": "/v1/completions"}
LEAST: dict[str, dict[str, Any]] = {
    "ChatRequest": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "CompletionRequest": {"prompt": "hi", "max_tokens": 4},
}
FOR_ANOTHER = {"top_logprobs": {"logprobs": True}, "length_penalty": {"beam_width": 1}}
"""Fields that mean something only beside another."""
HELD_ELSEWHERE = {"max_tokens", "max_completion_tokens", "min_tokens", "truncate_prompt_tokens"}
"""Fields whose largest value is more than a small model's context holds."""


def test_the_file_is_what_would_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["openapi", "--check"])
    assert openapi.main() == 0, "python -m router.http.openapi"


def test_a_route_that_is_not_described_is_found() -> None:
    less = {"paths": {path: item for path, item in DOCUMENT["paths"].items() if path != "/v1/models"}}
    assert openapi.undescribed(less) == ["get /v1/models is not described"]
    more = {"paths": {**DOCUMENT["paths"], "/v1/more": {"get": {}}}}
    assert openapi.undescribed(more) == ["get /v1/more is described and not served"]
    assert build_app is not None and whole is not None


ERROR = FakeFrontend(refusal("UNAVAILABLE"))


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (MessageReply, lambda: ask(test_messages.script(), "POST", "/v1/messages", content=test_messages.body())),
        (MessageErrorReply, lambda: ask(ERROR, "POST", "/v1/messages", content=test_messages.body())),
        (ResponseReply, lambda: responded()),
        (ResponseReply, lambda: responded(tools=[test_responses.TOOL], max_output_tokens=5, tool_choice="required")),
        (ResponseReply, lambda: responded(reason=FinishReason.LENGTH)),
        (ErrorEnvelope, lambda: ask(ERROR, "POST", "/v1/responses", content=b'{"input": "x"}')),
    ],
)
def test_the_adapters_answer_what_they_are_described_to(kind: Any, answer: Callable[[], httpx.Response]) -> None:
    """Guards against fields that no description has, and those that are described and missing."""
    told = answer().json()
    assert msgspec.to_builtins(msgspec.convert(told, kind)) == told
    assert kind.__name__ in DOCUMENT["components"]["schemas"]


def responded(reason: FinishReason = FinishReason.STOP, **fields: object) -> httpx.Response:
    asked = test_responses.body(**fields)
    return ask(test_responses.script(asked, reason=reason), "POST", "/v1/responses", content=asked)


def numbers(name: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for field, schema in DOCUMENT["components"]["schemas"][name]["properties"].items():
        for one in schema.get("anyOf", [schema]):
            if one.get("type") in ("integer", "number") and field not in ("created",):
                found.append((field, one))
    return found


CASES = [(name, field, schema) for name in ROUTES for field, schema in numbers(name)]


@pytest.mark.parametrize(("name", "field", "schema"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_number_is_taken_up_to_its_limits_and_no_further(name: str, field: str, schema: dict[str, Any]) -> None:
    """Guards against a description that promises more, or less, than the checks allow."""
    if field == "logprobs" and name == "ChatRequest":
        return  # there it is true or false
    if field == "top_logprobs" and name == "CompletionRequest":
        return  # a chat's
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema["maximum"]
    step = 1 if schema["type"] == "integer" else 0.001
    is_open = "exclusiveMinimum" in schema
    refused = [least if is_open else least - step, most + step]
    taken = [least + step if is_open else least, *([] if field in HELD_ELSEWHERE else [most])]
    if field == "max_tokens":
        taken = []  # 0 is for completions that echo
    for value, is_taken in [*((one, False) for one in refused), *((one, True) for one in taken)]:
        body = LEAST[name] | FOR_ANOTHER.get(field, {}) | {field: value}
        if field == "max_completion_tokens":
            del body["max_tokens"]
        if field == "n":
            body |= {"n": value}
        reply = ask(CheckingFrontend(), "POST", ROUTES[name], state=FakeState(), content=json.dumps(body))
        param = reply.json().get("error", {}).get("param")
        assert (param != field) == is_taken, (field, value, reply.text)
        assert is_taken or reply.status_code == 400

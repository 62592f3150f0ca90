# ruff: noqa: E501 - cases stand in one line each
"""`/v1/messages`: Anthropic's shape in and out, and Anthropic's own client where it is installed."""

import json
from typing import Any

import httpx
import msgspec
import pytest
from starlette.testclient import TestClient

from engine.types import FinishReason
from router.app import RouterApp
from router.front.api import ApiError, ChatMessage, Delta, GenerateCall, HttpForm, Started, Tool, ToolCall, ToolChoice
from router.front.parsers.choose import Parsing
from router.http.adapters.messages_request import MessagesRequest, parse_count, parse_messages
from router.http.adapters.responses_request import ResponsesRequest, parse_response
from router.http.browsers import BrowserGuard
from router.http.gate import _authorization
from router.http.routes import build_app
from tests.router.fake_cluster import FakeWorkers
from tests.router.http.fakes import CHAT, FINISHED, HI, FakeFrontend, FakeState, ask, refusal, serving
from tests.router.http.test_resume import CALLING, with_server

PATH = "/v1/messages"
CHAT_BODY = json.dumps({"messages": HI}).encode()
HI = [{"role": "user", "content": "hi"}]
PARSING = Parsing(tools="hermes", reasoning="think")
FORM = HttpForm(chat=True, include_usage=True, return_token_ids=False, created=7, api="messages", parsing=PARSING)
STARTED = Started("r1", "tiny", 5, form=FORM)
ANSWER = '<think>hm</think>I look.<tool_call>{"name": "rain", "arguments": {"city": "Köln"}}</tool_call>'
END = msgspec.structs.replace(FINISHED, reason=FinishReason.STOP)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def script(answer: str = ANSWER, size: int = 5, **end: Any) -> FakeFrontend:
    deltas = [Delta(answer[at : at + size], (at,)) for at in range(0, len(answer), size)]
    return FakeFrontend(STARTED, *deltas, msgspec.structs.replace(END, **end))


def body(**fields: object) -> bytes:
    return json.dumps({"messages": HI, "max_tokens": 9, **fields}).encode()


def call_of(**fields: object) -> GenerateCall:
    return parse_messages(body(**fields)).call


def test_a_request_becomes_the_call_that_every_front_makes() -> None:
    """Guards an agent's whole history: system, calls, results and what was thought."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "rain", "input": {"city": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Well?"},
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "no"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "lost", "is_error": True},
            ],
        },
    ]
    tool = {"name": "rain", "description": "of a city", "input_schema": SCHEMA}
    call = call_of(
        messages=messages,
        system=[{"type": "text", "text": "Be brief."}],
        tools=[tool],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        stop_sequences=["x"],
        temperature=0.5,
        top_k=3,
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "u"},
    )
    assert call.prompt == [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Rain?"),
        ChatMessage(
            "assistant", "I look.", tool_calls=(ToolCall("rain", '{"city": "K\\u00f6ln"}', "c1"),), reasoning="hm"
        ),
        ChatMessage("tool", "no", tool_call_id="c1"),
        ChatMessage("tool", "Error: lost", tool_call_id="c2"),
        ChatMessage("user", "Well?"),
    ]
    assert call.tools == (Tool("rain", "of a city", json.dumps(SCHEMA)),)
    assert (call.tool_choice, call.parallel_tool_calls) == (ToolChoice(), False)
    assert (call.max_tokens, call.stop, call.sampling.temperature, call.sampling.top_k) == (9, ("x",), 0.5, 3)
    assert call.chat_template_kwargs == '{"enable_thinking":true}'
    assert call_of(tool_choice={"type": "any"}).tool_choice == ToolChoice("required")
    assert call_of(tool_choice={"type": "tool", "name": "f"}).tool_choice == ToolChoice("required", "f")
    assert call_of(tool_choice={"type": "none"}).tool_choice == ToolChoice("none")
    begun = call_of(messages=[*HI, {"role": "assistant", "content": "It"}])
    assert begun.continue_final_message
    assert parse_count(json.dumps({"messages": HI, "system": "S"}).encode()).prompt == [
        ChatMessage("system", "S"), ChatMessage("user", "hi"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
        ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, "messages[1].content"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"name": "f", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"max_token": 5}, "max_token"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_fields_are_named_in_anthropics_envelope(fields: dict[str, object], field: str) -> None:
    response = ask(FakeFrontend(), "POST", PATH, content=body(**fields), headers={"x-request-id": "mine"})
    told = response.json()
    assert (response.status_code, told["type"], told["request_id"]) == (400, "error", "mine")
    assert told["error"]["type"] == "invalid_request_error"
    assert told["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [("RESOURCE_EXHAUSTED", 429, "rate_limit_error"), ("NOT_FOUND", 404, "not_found_error"), ("UNAVAILABLE", 503, "overloaded_error")],
)
def test_errors_have_anthropics_types(code: str, status: int, kind: str) -> None:
    response = ask(FakeFrontend(refusal(code)), "POST", PATH, content=body())
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


def test_a_whole_message() -> None:
    told = ask(script(), "POST", PATH, content=body()).json()
    call = told["content"][2]
    assert told["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": call["id"], "name": "rain", "input": {"city": "Köln"}},
    ]
    assert (told["id"], told["role"], told["stop_reason"]) == ("msg_r1", "assistant", "tool_use")
    usage = {"input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 3}
    assert told["usage"] == usage
    cut = ask(script("so", reason=FinishReason.LENGTH), "POST", PATH, content=body()).json()
    assert (cut["stop_reason"], cut["content"]) == ("max_tokens", [{"type": "text", "text": "so"}])
    stopped = ask(script("so", stop_matched="x"), "POST", PATH, content=body()).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "x")
    broken = script('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>')
    told = ask(broken, "POST", PATH, content=body()).json()["content"]
    assert told[0]["input"] == {"_unparsed": '{"a": 1'}


def streamed(frontend: FakeFrontend) -> list[dict[str, Any]]:
    text = ask(frontend, "POST", PATH, content=body(stream=True)).text
    events = []
    for part in text.strip("\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("size", [1, 4, 500])
def test_a_streamed_message_is_the_whole_one(size: int) -> None:
    """Guards clients that put blocks together: each begins, grows and ends before the next."""
    events = streamed(script(size=size))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    open_at, blocks = None, []
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_at is None and event["index"] == len(blocks)
                open_at = event["index"]
                blocks.append(event["content_block"] | {"grown": ""})
            case "content_block_delta":
                assert event["index"] == open_at
                blocks[-1]["grown"] += list(event["delta"].values())[1]
            case "content_block_stop":
                assert event["index"] == open_at
                open_at = None
    assert open_at is None
    grown = [("thinking", "hm"), ("text", "I look."), ("tool_use", '{"city": "Köln"}')]
    assert [(block["type"], block["grown"]) for block in blocks] == grown
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["usage"]["output_tokens"] == 3


def test_an_error_in_a_stream_is_its_last_event() -> None:
    events = streamed(FakeFrontend(STARTED, Delta("Hello, ", (1,)), refusal("UNAVAILABLE")))
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "overloaded_error"
    assert events[0]["type"] == "message_start"


def test_streams_of_this_shape_do_not_resume() -> None:
    headers = {"x-headrace-resumable": "1"}
    response = ask(FakeFrontend(), "POST", PATH, content=body(stream=True), headers=headers)
    assert response.status_code == 400 and response.json()["type"] == "error"


def test_anthropics_own_client() -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    with serving(script()) as port:
        client = anthropic.Anthropic(api_key="k", base_url=f"http://127.0.0.1:{port}", max_retries=0)
        tools = [{"name": "rain", "input_schema": SCHEMA}]
        told = client.messages.create(model="tiny", max_tokens=9, messages=HI, tools=tools)
        assert [block.type for block in told.content] == ["thinking", "text", "tool_use"]
        assert told.content[2].input == {"city": "Köln"} and told.usage.cache_read_input_tokens == 4
        with client.messages.stream(model="tiny", max_tokens=9, messages=HI, tools=tools) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "I look." and final.content[2].input == {"city": "Köln"}
        assert final.stop_reason == "tool_use" and final.usage.output_tokens == 3
        client.close()
    with serving(FakeFrontend(refusal("INVALID_ARGUMENT", field="max_tokens"))) as port:
        client = anthropic.Anthropic(api_key="k", base_url=f"http://127.0.0.1:{port}", max_retries=0)
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(model="tiny", max_tokens=9, messages=HI)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        client.close()


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize(
    ("method", "content", "headers", "status", "kind"),
    [
        ("POST", b" " * (4 * 1024 * 1024 + 1), {}, 413, "request_too_large"),
        ("POST", b" " * (65 * 1024), {}, 503, "overloaded_error"),
        ("GET", b"", {}, 405, "invalid_request_error"),
        ("POST", b"{}", {"origin": "https://a.example", "content-type": "text/plain"}, 415, "invalid_request_error"),
    ],
)
def test_early_errors_have_the_shape_of_the_route(
    path: str, method: str, content: bytes, headers: dict[str, str], status: int, kind: str
) -> None:
    """Guards Anthropic's clients, which look for the type of an error in this shape alone, also where no call was
    made."""
    app = BrowserGuard(build_app(FakeFrontend(), FakeState(), 64), "127.0.0.1")  # type: ignore[arg-type]
    reply = TestClient(app, raise_server_exceptions=False).request(method, path, content=content, headers=headers)
    assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (status, "error", kind)
    lost = TestClient(app).request("POST", "/v1/responses", content=b" " * (4 * 1024 * 1024 + 1)).json()
    assert lost["error"]["code"] == "request_too_large" and "type" not in lost


def test_a_fault_of_ours_is_told_in_the_shape_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.routes.parse_messages", lambda *a, **k: 1 / 0)
    app = build_app(FakeFrontend(), FakeState())  # type: ignore[arg-type]
    client = TestClient(app, raise_server_exceptions=False)
    reply = client.post(PATH, content=body())
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "api_error")


@pytest.mark.parametrize(
    ("path", "sent", "field", "told"),
    [
        (PATH, body(), "reasoning_budget", "thinking.budget_tokens"),
        (PATH, body(), "chat_template_kwargs.enable_thinking", "thinking.type"),
        (PATH, body(), "messages[3].content", "messages"),
        (PATH, body(), "continue_final_message", "messages"),
        (PATH, body(), "stop[1]", "stop_sequences[1]"),
        (PATH, body(), "tools[1].function.parameters", "tools[1].input_schema"),
        (PATH, body(), "tools[0].function.name", "tools[0].name"),
        (CHAT, CHAT_BODY, "tools[0].function.name", "tools[0].function.name"),
        ("/v1/responses", b'{"input": "x"}', "tools[0].function.parameters", "tools[0].parameters"),
        ("/v1/responses", b'{"input": "x"}', "messages[3].content", "input"),
        ("/v1/responses", b'{"input": "x"}', "max_tokens", "max_output_tokens"),
        ("/v1/responses", b'{"input": "x"}', "chat_template_kwargs.reasoning_effort", "reasoning.effort"),
        (CHAT, CHAT_BODY, "reasoning_budget", "thinking_token_budget"),
        (CHAT, CHAT_BODY, "chat_template_kwargs.reasoning_effort", "reasoning_effort"),
        (CHAT, CHAT_BODY, "messages[3].content", "messages[3].content"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_field_that_was_sent(path: str, sent: bytes, field: str, told: str, stream: bool) -> None:
    asked = json.dumps(json.loads(sent) | {"stream": stream})
    reply = ask(FakeFrontend(refusal("INVALID_ARGUMENT", field=field)), "POST", path, content=asked)
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(f"{told}: ")


def test_a_budget_of_thinking_is_the_calls() -> None:
    assert call_of(thinking={"type": "enabled", "budget_tokens": 2000}).reasoning_budget == 2000
    assert call_of(thinking={"type": "adaptive"}).reasoning_budget is None


class Counting(FakeFrontend):
    async def tokenize(self, call: GenerateCall, **options: object) -> Any:
        if call.model == "other":
            raise ApiError("NOT_FOUND", "model: is not served", "model")
        if call.continue_final_message:
            raise refusal("INVALID_ARGUMENT", field="continue_final_message")
        return type("Tokens", (), {"ids": [1, 2, 3]})


def test_tokens_of_a_prompt_are_counted() -> None:
    answer = ask(Counting(), "POST", f"{PATH}/count_tokens", content=json.dumps({"messages": HI}))
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": 3})
    lost = ask(Counting(), "POST", f"{PATH}/count_tokens", content=json.dumps({"messages": HI, "model": "other"}))
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
    assert ask(Counting(), "POST", f"{PATH}/count_tokens", content="{}").json()["type"] == "error"
    begun = json.dumps({"messages": [*HI, {"role": "assistant", "content": "It"}]})
    refused = ask(Counting(), "POST", f"{PATH}/count_tokens", content=begun).json()
    assert refused["error"]["message"] == "messages: because", "not a field that this route does not have"





def test_a_key_may_come_in_anthropics_header_on_its_own_routes_alone() -> None:
    """Guards the gate: two credentials are none, and other routes know one header."""
    key, bearer = (b"x-api-key", b"k"), (b"authorization", b"Bearer k")
    assert _authorization([key], PATH) == "Bearer k" == _authorization([bearer], PATH)
    assert _authorization([key, bearer], PATH) == "ambiguous"
    assert _authorization([key], "/v1/chat/completions") == ""


VALUES: list[object] = [None, 0, -1, 2.5, True, "", "x", [], [{}], {}, {"type": "text"}, [{"type": "text"}], "\ud800"]


@pytest.mark.parametrize("parse", [parse_messages, parse_response])
def test_whatever_a_field_holds_ends_as_a_call_or_as_the_callers_fault(parse: Any) -> None:
    bodies = {parse_messages: {"messages": HI, "max_tokens": 9}, parse_response: {"input": "hi"}}
    names = {parse_messages: MessagesRequest.__struct_fields__, parse_response: ResponsesRequest.__struct_fields__}
    refused = 0
    for name in names[parse]:
        for value in VALUES:
            try:
                parse(json.dumps(bodies[parse] | {name: value}).encode())
            except ApiError as error:
                assert error.code == "INVALID_ARGUMENT"
                refused += 1
    assert refused > 50


@pytest.mark.parametrize("path", [PATH, "/v1/responses"])
def test_from_a_worker_to_the_client(path: str) -> None:
    """Guards the way of the answer's form: the intake adds the parsers to it, and the routes write by it."""
    tool = {"name": "rain", "input_schema": {}} if path == PATH else {"type": "function", "name": "rain"}
    asked = {"messages": HI, "max_tokens": 200} if path == PATH else {"input": "hi", "max_output_tokens": 200}

    async def ask_it(app: RouterApp, client: httpx.AsyncClient, workers: FakeWorkers) -> None:
        told = (await client.post(path, json=asked | {"tools": [tool]})).json()
        items = told["content"] if path == PATH else told["output"]
        kinds = [item["type"] for item in items]
        names = {"message": "text", "reasoning": "thinking", "function_call": "tool_use"}
        assert [names.get(kind, kind) for kind in kinds] == ["thinking", "text", "tool_use", "text"]
        streamed = await client.post(path, json=asked | {"tools": [tool], "stream": True})
        assert streamed.text.count("event: ") > 8
        if path == PATH:
            counted = (await client.post(f"{PATH}/count_tokens", json={"messages": HI})).json()
            assert counted["input_tokens"] == told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"]

    with_server(ask_it, CALLING)

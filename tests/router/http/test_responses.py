# ruff: noqa: E501 - cases stand in one line each
"""`/v1/responses`, without state: items in and out, events by their numbers, and OpenAI's own client where it is
installed."""

import json
from typing import Any

import msgspec
import pytest

from engine.types import FinishReason
from router.front.api import ChatMessage, Delta, GenerateCall, HttpForm, Started, Tool, ToolCall, ToolChoice
from router.front.parsers.choose import Parsing
from router.http.adapters.responses_request import parse_response
from tests.router.http.fakes import FINISHED, FakeFrontend, ask, refusal, serving

PATH = "/v1/responses"
PARSING = Parsing(tools="hermes", reasoning="think")
FORM = HttpForm(chat=True, include_usage=True, return_token_ids=False, created=7, api="responses", parsing=PARSING)
ANSWER = '<think>hm</think>I look.<tool_call>{"name": "rain", "arguments": {"city": "Köln"}}</tool_call>'
END = msgspec.structs.replace(FINISHED, reason=FinishReason.STOP, reasoning_tokens=2)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "rain", "description": "of a city", "parameters": SCHEMA, "strict": True}


def script(body: bytes, answer: str = ANSWER, size: int = 5, **end: Any) -> FakeFrontend:
    form = msgspec.structs.replace(FORM, repeated=parse_response(body).form.repeated)
    deltas = [Delta(answer[at : at + size], (at,)) for at in range(0, len(answer), size)]
    return FakeFrontend(Started("r1", "tiny", 5, form=form), *deltas, msgspec.structs.replace(END, **end))


def body(**fields: object) -> bytes:
    return json.dumps({"input": "hi", **fields}).encode()


def call_of(**fields: object) -> GenerateCall:
    return parse_response(body(**fields)).call


def test_a_request_becomes_the_call_that_every_front_makes() -> None:
    """Guards an agent's whole history, which its client sends each time: nothing is kept here."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "rain", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "no"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": "No."},
        {"role": "developer", "content": "Be brief."},
    ]  # fmt: skip
    call = call_of(
        input=items, instructions="Be kind.", tools=[TOOL], tool_choice={"type": "function", "name": "rain"},
        parallel_tool_calls=False, max_output_tokens=9, temperature=0.5, reasoning={"effort": "low"}, store=False,
        text={"format": {"type": "text"}}, metadata={"a": "b"}, truncation="disabled", model="tiny",
    )  # fmt: skip
    assert call.prompt == [
        ChatMessage("system", "Be kind."),
        ChatMessage("user", "Rain?"),
        ChatMessage("assistant", "I look.", tool_calls=(ToolCall("rain", "{}", "c1"),), reasoning="hm"),
        ChatMessage("tool", "no", tool_call_id="c1"),
        ChatMessage("assistant", "No.", reasoning="so"),
        ChatMessage("system", "Be brief."),
    ]
    assert call.tools == (Tool("rain", "of a city", json.dumps(SCHEMA)),)
    assert (call.tool_choice, call.parallel_tool_calls, call.max_tokens) == (ToolChoice("required", "rain"), False, 9)
    assert (call.sampling.temperature, call.chat_template_kwargs) == (0.5, '{"reasoning_effort":"low"}')
    assert call_of().prompt == [ChatMessage("user", "hi")]
    assert call_of(tool_choice="required").tool_choice == ToolChoice("required")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "pope", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "function_call", "name": "a"}] * 8193}, "input"),  # joined, they would take half a minute
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, object], field: str) -> None:
    response = ask(FakeFrontend(), "POST", PATH, content=body(**fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_a_whole_response() -> None:
    asked = body(tools=[TOOL], instructions="Be kind.")
    told = ask(script(asked), "POST", PATH, content=asked).json()
    reasoning, message, call = told["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "I look."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "rain", '{"city": "Köln"}')
    assert (told["status"], told["tools"], told["instructions"]) == ("completed", [TOOL], "Be kind.")
    assert told["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 8,
    }
    cut = ask(script(asked, "so", reason=FinishReason.LENGTH), "POST", PATH, content=asked).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_repeated_as_it_came(stream: bool) -> None:
    """Guards numbers that no double holds: the answer was written, and then lost to a status 500."""
    schema = '{"type":"number","maximum":1e400,"minimum":-123456789012345678901234567890,"default":1.10}'
    asked = body(tools=[TOOL | {"parameters": "@"}], stream=stream).replace(b'"@"', schema.encode())
    reply = ask(script(asked), "POST", PATH, content=asked)
    assert reply.status_code == 200 and schema in reply.text


def streamed(frontend: FakeFrontend, asked: bytes) -> list[dict[str, Any]]:
    events = []
    for part in ask(frontend, "POST", PATH, content=asked).text.strip("\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("size", [1, 4, 500])
def test_a_streamed_response_is_the_whole_one(size: int) -> None:
    """Guards clients that put items together: every event has its number, and every item and part begins and ends."""
    asked = body(tools=[TOOL], stream=True)
    events = streamed(script(asked, size=size), asked)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    folded = [kind for at, kind in enumerate(kinds) if not (kind.endswith("delta") and kinds[at - 1] == kind)]
    part = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    assert folded == [
        "created", "in_progress",
        *part, "reasoning_text.delta", "reasoning_text.done", *done,
        *part, "output_text.delta", "output_text.done", *done,
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    whole = ask(script(asked, size=size), "POST", PATH, content=body(tools=[TOOL])).json()
    assert events[-1]["response"] == whole
    done_items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done_items == whole["output"]
    for at, item in enumerate(whole["output"]):
        text = item.get("arguments") or item["content"][0]["text"]
        grown = [event["delta"] for event in events if event["type"].endswith("delta") and event["output_index"] == at]
        assert "".join(grown) == text
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"


def test_an_item_that_is_cut_is_never_called_complete() -> None:
    """Guards clients that act on an item as soon as it is done: a call's arguments ended in the middle."""
    asked = body(tools=[TOOL], stream=True)
    events = streamed(script(asked, size=4, reason=FinishReason.LENGTH), asked)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["completed", "completed", "incomplete"]
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["output"] == done


def test_an_error_in_a_stream_is_its_last_event() -> None:
    started = Started("r1", "tiny", 5, form=FORM)
    events = streamed(FakeFrontend(started, Delta("Hello, ", (1,)), refusal("UNAVAILABLE")), body(stream=True))
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "unavailable")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_openais_own_client() -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    asked = body(tools=[TOOL])
    with serving(script(asked)) as port:
        client = openai.OpenAI(api_key="k", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0)
        told = client.responses.create(model="tiny", input="hi", tools=[TOOL])
        assert told.output_text == "I look." and told.usage.output_tokens_details.reasoning_tokens == 2
        assert told.output[2].type == "function_call" and json.loads(told.output[2].arguments) == {"city": "Köln"}
        with client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert "response.output_text.delta" in kinds and "response.completed" in kinds
        assert final.output_text == "I look." and final.output[2].name == "rain"
        client.close()

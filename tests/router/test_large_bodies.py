"""Bodies that ask for too much, of both fronts, are refused before anything is made of each thing they hold."""

import json
import time
from collections.abc import Callable

import pytest

from protos import headrace_pb2 as pb
from router.front.api import MAX_PARTS, ApiError, ChatMessage
from router.front.validate import (
    MAX_ALLOWED_IDS,
    MAX_BIASES,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOOLS,
)
from router.grpc.convert import MAX_POSITIONS, call_from_proto, positions_from_proto, tokenize_call
from router.http.adapters.messages_request import parse_count, parse_messages
from router.http.adapters.responses_request import MAX_ITEMS, parse_response
from router.http.openai import MAX_CHOICES, parse_chat, parse_completion

TURN = {"role": "user", "content": "a"}
BIASES = {str(token): 1.0 for token in range(MAX_BIASES + 1)}
PARTS = [{"type": "text", "text": ""}] * (MAX_PARTS // 2 + 1)
"""So many parts in each of two messages are too many."""
RESULT = {"type": "tool_result", "content": PARTS}
CALL = {"function": {"name": "f"}}


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": [TURN], "max_tokens": 1} | fields).encode()


def completion(prompt: object) -> bytes:
    return json.dumps({"prompt": prompt}).encode()


def response(given: object, **fields: object) -> bytes:
    return json.dumps({"input": given} | fields).encode()


@pytest.mark.parametrize(
    ("parse", "body", "field"),
    [
        (parse_chat, chat(messages=[TURN] * (MAX_MESSAGES + 1)), "messages"),
        (parse_chat, chat(messages=[TURN | {"content": PARTS}] * 2), "messages"),
        (parse_chat, chat(messages=[TURN | {"role": "assistant", "tool_calls": [CALL] * len(PARTS)}] * 2), "messages"),
        (parse_chat, chat(tools=[CALL] * (MAX_TOOLS + 1)), "tools"),
        (parse_chat, chat(stop=["a"] * (MAX_STOP_STRINGS + 1)), "stop"),
        (parse_chat, chat(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1)), "stop_token_ids"),
        (parse_chat, chat(logit_bias=BIASES), "logit_bias"),
        (parse_chat, chat(allowed_token_ids=[1] * (MAX_ALLOWED_IDS + 1)), "allowed_token_ids"),
        (parse_completion, completion([[]] * MAX_CHOICES + [1]), "prompt"),
        (parse_completion, completion(["a"] * MAX_CHOICES + [1]), "prompt"),
        (parse_messages, chat(messages=[TURN] * (MAX_MESSAGES + 1)), "messages"),
        (parse_messages, chat(messages=[TURN | {"content": PARTS}] * 2), "messages"),
        (parse_messages, chat(messages=[TURN | {"content": [RESULT] * 2}]), "messages"),
        (parse_messages, chat(system=PARTS * 2), "messages"),
        (parse_messages, chat(tools=[{"name": "f"}] * (MAX_TOOLS + 1)), "tools"),
        (parse_messages, chat(stop_sequences=["a"] * (MAX_STOP_STRINGS + 1)), "stop_sequences"),
        (parse_count, json.dumps({"messages": [TURN] * (MAX_MESSAGES + 1)}).encode(), "messages"),
        (parse_response, response([TURN] * (MAX_ITEMS + 1)), "input"),
        (parse_response, response([TURN | {"content": PARTS}] * 2), "input"),
        (parse_response, response("a", tools=[{"name": "f"}] * (MAX_TOOLS + 1)), "tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_what_is_too_much_over_http_is_counted_first(
    parse: Callable[[bytes], object], body: bytes, field: str
) -> None:
    """Guards the event loop from bodies of 4 MiB with a hundred thousand of something, each of which was read."""
    with pytest.raises(ApiError, match="at most") as refused:
        parse(body)
    assert (refused.value.code, refused.value.field) == ("INVALID_ARGUMENT", field)


def grpc(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"prompt": "a", **fields})  # type: ignore[arg-type]


CALLS = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()] * len(PARTS))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage()] * (MAX_MESSAGES + 1))), "messages"),
        (pb.GenerateRequest(chat=pb.ChatMessages(messages=[CALLS] * 2)), "messages"),
        (grpc(tools=[pb.Tool()] * (MAX_TOOLS + 1)), "tools"),
        (grpc(stop=["a"] * (MAX_STOP_STRINGS + 1)), "stop"),
        (grpc(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1)), "stop_token_ids"),
        (grpc(logit_bias={int(token): 1.0 for token in BIASES}), "logit_bias"),
        (grpc(allowed_token_ids=[1] * (MAX_ALLOWED_IDS + 1)), "allowed_token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_too_much_over_grpc_is_counted_first(request_: pb.GenerateRequest, field: str) -> None:
    """Guards the event loop from a message of 4 MiB with two million empty turns: making them took it five seconds."""
    with pytest.raises(ApiError, match="at most") as refused:
        call_from_proto(request_)
    assert (refused.value.code, refused.value.field) == ("INVALID_ARGUMENT", field)


def test_a_count_of_tokens_and_a_resumption_are_counted_too() -> None:
    many = pb.ChatMessages(messages=[pb.ChatMessage()] * (MAX_MESSAGES + 1))
    with pytest.raises(ApiError, match="at most"):
        tokenize_call(pb.TokenizeRequest(chat=many))
    with pytest.raises(ApiError, match="at most"):
        positions_from_proto(pb.ResumeRequest(others=[pb.Position()] * (MAX_POSITIONS + 1)))


def test_items_of_one_turn_are_joined_once() -> None:
    """Guards the event loop from a long text behind which come thousands of short ones of the same turn: what was there
    was copied with each, which took two seconds."""
    items: list[dict[str, object]] = [{"role": "assistant", "content": "a" * 3_800_000}]
    items += [{"role": "assistant", "content": "b"}] * (MAX_ITEMS - 4)
    items += [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}]
    items += [{"type": "reasoning", "content": "c"}, {"type": "reasoning", "content": "d"}]
    body = response(items)
    began_s = time.process_time()
    parsed = parse_response(body)
    assert time.process_time() - began_s < 0.5
    first, second = (turn for turn in parsed.call.prompt if isinstance(turn, ChatMessage))
    assert first.content == "a" * 3_800_000 + "\nb" * (MAX_ITEMS - 4)
    assert [call.name for call in first.tool_calls] == ["f"]
    assert (second.content, second.reasoning) == ("", "cd")

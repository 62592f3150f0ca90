"""Large bodies of both fronts: what asks for too much is refused before anything is made of it, and the rest is read
without holding up the event loop."""

import asyncio
import gc
import json
import time
import traceback
from collections.abc import Callable

import grpc
import httpx
import pytest

from protos import headrace_pb2 as pb
from router.app import RouterApp
from router.config import RouterConfig
from router.front.api import MAX_PARTS, ApiError, ChatMessage
from router.front.large_bodies import LARGE_BYTES, LargeBodies
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
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteText
from tests.secrets_of_tests import SECRETS

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


def message(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"prompt": "a", **fields})  # type: ignore[arg-type]


CALLS = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()] * len(PARTS))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage()] * (MAX_MESSAGES + 1))), "messages"),
        (pb.GenerateRequest(chat=pb.ChatMessages(messages=[CALLS] * 2)), "messages"),
        (message(tools=[pb.Tool()] * (MAX_TOOLS + 1)), "tools"),
        (message(stop=["a"] * (MAX_STOP_STRINGS + 1)), "stop"),
        (message(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1)), "stop_token_ids"),
        (message(logit_bias={int(token): 1.0 for token in BIASES}), "logit_bias"),
        (message(allowed_token_ids=[1] * (MAX_ALLOWED_IDS + 1)), "allowed_token_ids"),
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


def test_large_bodies_are_read_one_at_a_time_with_pauses() -> None:
    """Guards probes from a flood of bodies that take long to read: the loop went from each to the next."""
    spans: list[tuple[int, float, float]] = []

    def parse(body: bytes) -> int:
        began_s = time.monotonic()
        time.sleep(0.05)
        spans.append((len(body) // LARGE_BYTES, began_s, time.monotonic()))
        return len(body)

    async def run() -> None:
        large = LargeBodies(10 * LARGE_BYTES)
        sizes = [4 * LARGE_BYTES, 3 * LARGE_BYTES, 2 * LARGE_BYTES, LARGE_BYTES]
        tasks = [asyncio.create_task(large.parse(parse, bytes(size))) for size in sizes]
        assert await asyncio.gather(*tasks) == sizes

    asyncio.run(run())
    assert [size for size, _, _ in spans] == [4, 1, 2, 3], "a small one waits for nobody"
    first, _, second, third = spans
    for (_, began_s, ended_s), (_, next_s, _) in ((first, second), (second, third)):
        assert next_s - ended_s > 0.9 * (ended_s - began_s)


def test_what_is_refused_is_let_go_at_once() -> None:
    """Guards the event loop and memory from a million lists, that the collector walked while they were made, and that
    an error kept until it was told."""

    def refuse(body: bytes) -> None:
        assert not gc.isenabled()
        raise ApiError("INVALID_ARGUMENT", "too much")

    with pytest.raises(ApiError) as refused:
        asyncio.run(LargeBodies(0).parse(refuse, bytes(LARGE_BYTES + 1)))
    assert gc.isenabled()
    assert "refuse" not in [frame.name for frame in traceback.extract_tb(refused.value.__traceback__)]


def test_the_largest_of_too_many_that_wait_is_refused() -> None:
    """Guards memory, and who sends less than those that fill it."""

    async def run() -> list[object]:
        large = LargeBodies(6 * LARGE_BYTES)
        sizes = [2, 3, 4, 2]  # the first is read at once
        tasks = [asyncio.create_task(large.parse(len, bytes(size * LARGE_BYTES))) for size in sizes]
        return [type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)]

    assert asyncio.run(run()) == [int, int, ApiError, int]


def test_who_leaves_holds_up_nobody() -> None:
    async def run() -> None:
        large = LargeBodies(9 * LARGE_BYTES)

        def slow(body: bytes) -> int:
            time.sleep(0.02)
            return len(body)

        waits = [asyncio.create_task(large.parse(slow, bytes(2 * LARGE_BYTES))) for _ in range(4)]
        await asyncio.sleep(0)
        waits[2].cancel()  # in the line
        await waits[0]
        while "2 waiting" in repr(large):
            await asyncio.sleep(0)
        waits[1].cancel()  # its turn has come, and it has not begun
        assert await asyncio.wait_for(waits[3], 5) == 2 * LARGE_BYTES
        assert await asyncio.wait_for(large.parse(len, bytes(2 * LARGE_BYTES)), 5) == 2 * LARGE_BYTES
        assert [task.cancelled() for task in waits] == [False, True, True, False]

    asyncio.run(run())


def test_every_route_and_method_reads_them_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one that reads its body by itself."""
    read: list[int] = []
    whole = LargeBodies.parse

    async def parse(self: LargeBodies, parse: Callable[[bytes], object], body: bytes) -> object:
        read.append(len(body))
        return await whole(self, parse, body)

    monkeypatch.setattr(LargeBodies, "parse", parse)
    paths = ("chat/completions", "completions", "messages", "messages/count_tokens", "responses")
    body = b"\xff" * (LARGE_BYTES + 1)

    async def run() -> None:
        app = RouterApp(RouterConfig(grpc_port=0, http_port=0), ByteText(), NullObserver(), SECRETS)
        addresses = await app.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://{addresses.http}") as client:
                for path in (*(f"/v1/{name}" for name in paths), "/tokenize", "/detokenize"):
                    assert (await client.post(path, content=body)).status_code == 400, path
            async with grpc.aio.insecure_channel(addresses.grpc) as channel:
                for name in ("Cancel", "GetModel", "Tokenize", "Detokenize"):
                    with pytest.raises(grpc.aio.AioRpcError, match="not a valid"):
                        await channel.unary_unary(f"/headrace.v1.Headrace/{name}")(body)
                for name in ("Generate", "Resume"):
                    with pytest.raises(grpc.aio.AioRpcError, match="not a valid"):
                        await channel.unary_stream(f"/headrace.v1.Headrace/{name}")(body).read()
        finally:
            await app.stop(0.0)

    asyncio.run(run())
    assert read == [len(body)] * 13


def test_a_refused_call_leaves_nothing_behind() -> None:
    """Guards memory from refused messages: gRPC kept the exception that it ends a call with, and by its frames the
    message, until the collector came by."""

    async def run() -> None:
        app = RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS)
        address = (await app.start()).grpc
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                for make, name in ((channel.unary_stream, "Generate"), (channel.unary_unary, "Tokenize")):
                    with pytest.raises(grpc.aio.AioRpcError, match="not a valid"):
                        call = make(f"/headrace.v1.Headrace/{name}")(b"\xff")
                        await (call if name == "Tokenize" else call.read())
            # By their types alone: some libraries' objects warn when they are asked for their class.
            left = [one for one in gc.get_objects() if issubclass(type(one), ApiError | grpc.aio.AbortError)]
            assert [one for one in left if "not a valid" in str(one) or "abort" in str(one)] == []
        finally:
            await app.stop(0.0)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()

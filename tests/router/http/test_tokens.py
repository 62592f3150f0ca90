"""`/tokenize` and `/detokenize` in vLLM's shapes, over a real intake."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router.app import RouterApp
from router.config import RouterConfig
from router.http.routes import build_app
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteText
from tests.router.http.fakes import HI, FakeFrontend, FakeState, ask
from tests.secrets_of_tests import SECRETS


@asynccontextmanager
async def front() -> AsyncIterator[httpx.AsyncClient]:
    app = RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS)
    transport = httpx.ASGITransport(build_app(app._frontend, app))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
    finally:
        app._frontend.close()


def post(path: str, body: object) -> httpx.Response:
    async def go() -> httpx.Response:
        async with front() as client:
            return await client.post(path, json=body)

    return asyncio.run(go())


def test_text_and_chats_are_counted() -> None:
    whole = post("/tokenize", {"prompt": "hi<end>", "return_token_strs": True, "model": "bytes"}).json()
    ids = [104, 105, 256]
    assert whole == {"count": 3, "max_model_len": 512, "tokens": ids, "token_strs": ["h", "i", "<end>"]}
    chat = post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["tokens"] == ByteText().encode_chat_text("[user]hi<end>[assistant]")
    closed = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    assert post("/tokenize", closed).json()["tokens"] == ByteText().encode_chat_text("[user]hi<end>")
    assert (chat["count"], chat["token_strs"]) == (len(chat["tokens"]), None)


def test_ids_become_text_again() -> None:
    assert post("/detokenize", {"tokens": [104, 105, 256]}).json() == {"prompt": "hi<end>"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, 400, "prompt"),
        ("/tokenize", {"prompt": ["x", "y"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "x" * 5000}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "return_token_str": True}, 400, "return_token_str"),
        ("/tokenize", {"prompt": None, "messages": None}, 400, "prompt"),
        ("/tokenize", {"model": "bytes"}, 400, "prompt"),
        ("/tokenize", {"messages": HI, "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ("/tokenize", {"prompt": "x", "tools": []}, 400, "tools"),
        ("/tokenize", [1], 400, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 300]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: object, status: int, param: str | None) -> None:
    reply = post(path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text


@pytest.mark.parametrize(
    ("length", "more", "count"),
    [
        (8, {"truncate_prompt_tokens": 3}, 3),
        (600, {"truncate_prompt_tokens": 3, "add_special_tokens": False}, 3),
        (600, {"truncate_prompt_tokens": -1}, 256),
        (600, {"truncate_prompt_tokens": -1, "max_tokens": 12}, 500),
        (8, {"truncate_prompt_tokens": 9}, 8),
        (8, {}, 8),
    ],
)
def test_a_prompt_is_cut_as_the_generating_routes_cut_it(length: int, more: dict[str, object], count: int) -> None:
    """Guards a client that counts what it is about to send, and is told of tokens that nobody would read."""
    counted = post("/tokenize", {"prompt": "x" * (length - 1) + "y", **more})
    assert counted.status_code == 200, counted.text
    assert (counted.json()["count"], counted.json()["tokens"][-1]) == (count, ord("y"))


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "f"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"cache_control": {"type": "ephemeral"}, "speed": "fast", "user_profile_id": "u"},
    ],
)
def test_a_message_is_counted_with_whatever_it_may_be_sent_with(more: dict[str, object]) -> None:
    """Guards a client that counts what it is about to send: it was told that its choice of a tool is not for chats."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"name": "f", "input_schema": {}}]}
    plain, counted = (post("/v1/messages/count_tokens", asked | fields) for fields in ({}, more))
    assert counted.status_code == 200 and counted.json() == plain.json(), counted.text


def test_bodies_have_the_limit_of_all() -> None:
    reply = post("/tokenize", {"prompt": "x" * (4 << 20)})
    assert reply.status_code == 413


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b'{"prompt": "x"', "the body is not valid JSON"),
        (b'{"prompt": "x",}', "the body is not valid JSON"),
        (b"[1]", "the body must be a JSON object"),
        (b'{"prompt": "\xff"}', "the body is not valid"),
        (b'{"promt": "x"}', "promt: is not a field here; is prompt meant?"),
        (b'{"mesages": []}', "mesages: is not a field here; is messages meant?"),
        (b'{"prompt": "x", "return_token_str": true}', "return_token_str: is not a field here; is return_token_strs"),
        (b'{"messages": [], "x": 1}', "x: is not supported"),
        (b"{}", "prompt: is required, or messages"),
    ],
)
def test_what_is_wrong_with_a_body_is_told(sent: bytes, says: str) -> None:
    """Guards a caller with a comma too many, who was told that there is no field `prompt`."""
    reply = ask(FakeFrontend(), "POST", "/tokenize", content=sent)
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(says)


def test_null_is_absent() -> None:
    """Guards clients that send all fields, as typed ones do."""
    plain, said = ({"prompt": "hi"}, {"messages": HI})
    assert post("/tokenize", {"messages": None, "tools": None} | plain).json() == post("/tokenize", plain).json()
    assert post("/tokenize", {"prompt": None} | said).json() == post("/tokenize", said).json()


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
def test_nobody_tokenizes_for_a_client_that_has_left(path: str) -> None:
    """Guards the threads that tokenize: who disconnects gives his turn away."""

    class Waiting(FakeFrontend):
        is_cancelled = False

        async def tokenize(self, *_: object, **more: object) -> Any:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.is_cancelled = True
                raise

        detokenize = tokenize

    frontend = Waiting()
    body = b'{"prompt": "x"}' if path == "/tokenize" else b'{"tokens": [1]}'
    body = b'{"messages": [{"role": "user", "content": "x"}]}' if "count" in path else body
    come = iter([{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(0)
        return next(come)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": [], "query_string": b"",
    }  # fmt: skip
    app = build_app(frontend, FakeState())  # type: ignore[arg-type]
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 5))
    assert frontend.is_cancelled

"""`/tokenize` and `/detokenize` in vLLM's shapes, over a real intake."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from router.app import RouterApp
from router.config import RouterConfig
from router.http.routes import build_app
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteText
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
        ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "x" * 5000}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "return_token_str": True}, 400, "return_token_str"),
        ("/tokenize", [1], 400, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 300]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: object, status: int, param: str | None) -> None:
    reply = post(path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text


def test_bodies_have_the_limit_of_all() -> None:
    reply = post("/tokenize", {"prompt": "x" * (4 << 20)})
    assert reply.status_code == 413

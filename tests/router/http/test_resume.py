"""Resumed HTTP streams: wherever the connection breaks, the client's bytes are those of the uninterrupted stream.

Ids, and the writer alone, are tried in test_openai_stream.py.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx
import pytest

from engine.messages import Cancel, Place
from router.app import RouterApp
from router.config import RouterConfig
from router.front.api import GenerateCall, Started
from router.front.outlet import Outlet
from router.http.answers import RESUME_TOKEN_HEADER, _EventStream
from router.http.openai_stream import EventPosition, event_id, positions
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteText, FakeWorkers, until
from tests.secrets_of_tests import SECRETS

ANSWER = "wörld 🙂 ok, thé énd"
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"prompt": "hi"})
USAGE = {"stream_options": {"include_usage": True}}
FORMS = {
    "chat": (*CHAT, USAGE),
    "chat without usage": (*CHAT, {}),
    "text with ids": (*TEXT, {"return_token_ids": True} | USAGE),
    "stop string": (*TEXT, {"stop": ["thé é"]}),
    "stop string and ids": (*CHAT, {"stop": ["🙂 o"], "return_token_ids": True}),
    "chat with log probabilities": (*CHAT, {"logprobs": True, "top_logprobs": 2} | USAGE),
    "text with log probabilities": (*TEXT, {"logprobs": 2}),
    "stop string and log probabilities": (*TEXT, {"stop": ["thé é"], "logprobs": 0}),
    "cut by length": (*TEXT, {"max_tokens": 8} | USAGE),
}

CALLING = "reasoning and calls"
FORMS[CALLING] = (*CHAT, {"tools": [{"type": "function", "function": {"name": "rain"}}]} | USAGE)
CALLED = '<think>\nhm, é\n</think>\n\nSo <tool_call>{"name": "rain", "arguments": {"a": "ö"}}</tool_call> <b'

Body = Callable[[RouterApp, httpx.AsyncClient, FakeWorkers], Awaitable[None]]


def with_server(body: Body, form: str = "", **config: object) -> None:
    parsers = {"tool_parser": "hermes", "reasoning_parser": "think"} if form == CALLING else {}

    async def run() -> None:
        settings = RouterConfig(grpc_port=0, http_port=0, **parsers, **config)  # type: ignore[arg-type]
        app = RouterApp(settings, ByteText(), NullObserver(), SECRETS)
        workers = FakeWorkers()
        workers.answer = list((CALLED if form == CALLING else ANSWER).encode())
        workers.slow_s = 0.01
        workers.blocks = 4096
        addresses = await app.start()
        try:
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(app.hub.ready)
            limits = httpx.Limits(max_connections=None)
            base = f"http://{addresses.http}"
            async with httpx.AsyncClient(base_url=base, limits=limits, timeout=20) as client:
                await body(app, client, workers)
            await until(lambda: not app.hub.core.open)
            app.hub.core.check()
        finally:
            await app.stop(0.0)
            await workers.stop()

    asyncio.run(run())


async def read(reply: httpx.Response, stop_at: int | None = None) -> bytes:
    """What came, up to `stop_at` bytes."""
    got = b""
    async for chunk in reply.aiter_raw():
        got += chunk
        if stop_at is not None and len(got) >= stop_at:
            return got[:stop_at]
    return got


async def post(
    client: httpx.AsyncClient, form: str, stop_at: int | None = None
) -> tuple[str, bytes]:
    """A resumable stream read up to `stop_at` bytes, then left: its token, and what came."""
    path, prompt, options = FORMS[form]
    body = {**prompt, **options, "stream": True, "resumable": True}
    async with client.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        return reply.headers[RESUME_TOKEN_HEADER], await read(reply, stop_at)


@pytest.fixture(autouse=True)
def answers_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine ten seconds may pass between two events: a comment that comes then is part of no answer."""
    monkeypatch.setattr("router.http.answers.KEEP_ALIVE_S", 600.0)


def complete(data: bytes) -> bytes:
    """The whole events of what came, as a client's parser keeps them."""
    return data[: data.rfind(b"\n\n") + 2] if b"\n\n" in data else b""


def last_id(data: bytes) -> str:
    ids = [line[4:] for line in data.decode().split("\n") if line.startswith("id: ")]
    return ids[-1] if ids else ""


async def go_on(client: httpx.AsyncClient, token: str, last: str) -> bytes:
    headers = {"Last-Event-ID": last} if last else {}
    async with client.stream("GET", f"/v1/streams/{token}", headers=headers) as reply:
        got = await read(reply)
        assert reply.status_code == (200 if got else 204)
        return got


def parts(data: bytes) -> list[bytes]:
    return [part + b"\n\n" for part in data.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("form", list(FORMS))
def test_every_event_is_one_to_go_on_from(form: str) -> None:
    """Guards what a resumed stream consists of: the very bytes that the first one had behind that event, the role, the
    usage chunk and the end mark included, in the format of the route that began it."""

    async def body(app: RouterApp, client: httpx.AsyncClient, workers: FakeWorkers) -> None:
        token, whole = await post(client, form)
        events = parts(whole)
        assert events[-1].endswith(b"data: [DONE]\n\n") and len(events) >= 6
        assert len({last_id(event) for event in events}) == len(events), "ids are not distinct"
        assert await go_on(client, token, "") == whole
        for at, event in enumerate(events, 1):
            assert await go_on(client, token, last_id(event)) == b"".join(events[at:])
        assert len([r for r in workers.got if isinstance(r, Place)]) == 1, "it was run twice"

    with_server(body, form)


@pytest.mark.parametrize("form", list(FORMS))
def test_a_cut_anywhere_loses_and_repeats_nothing(form: str) -> None:
    """Guards exactness while the answer is being written: connections are cut at event borders and inside events, and
    cut a second time after they came back."""

    async def body(app: RouterApp, client: httpx.AsyncClient, workers: FakeWorkers) -> None:
        _, sample = await post(client, form)
        borders = [len(b"".join(parts(sample)[:n])) for n in range(len(parts(sample)))]
        cuts = sorted({at + inside for at in borders for inside in (0, 7, 60)} - {0})

        async def one(cut: int) -> bool:
            token, got = await post(client, form, cut)
            got = complete(got)
            async with client.stream(
                "GET", f"/v1/streams/{token}", headers={"Last-Event-ID": last_id(got)}
            ) as reply:
                if reply.status_code == 200:
                    got += complete(await read(reply, 150))
            was_running = bool(app._frontend._resumables.find(token).streams[0].end is None)  # type: ignore[union-attr]
            if not got.endswith(b"[DONE]\n\n"):
                got += await go_on(client, token, last_id(got))
            assert got == await go_on(client, token, ""), f"cut at {cut}"
            return was_running

        running = await asyncio.gather(*(one(cut) for cut in cuts))
        assert any(running), "every cut came after the end"
        assert not [r for r in workers.got if isinstance(r, Cancel)]

    with_server(body, form)


def test_the_token_is_known_before_there_is_output() -> None:
    """Guards prompts that take long to read: who is cut off meanwhile must be able to come back."""

    async def body(app: RouterApp, client: httpx.AsyncClient, workers: FakeWorkers) -> None:
        workers.slow_s = 0.4
        headers = {"x-headrace-resumable": "1", "x-request-id": "mine"}
        json_body = {"prompt": "x", "stream": True, "max_tokens": 2}
        async with client.stream("POST", TEXT[0], json=json_body, headers=headers) as reply:
            token = reply.headers[RESUME_TOKEN_HEADER]
            assert app.hub.core.open == 1 and not app._frontend._resumables.find(token).streams[0].ids  # type: ignore[union-attr]
        async with client.stream("GET", f"/v1/streams/{token}") as reply:
            assert reply.headers["x-request-id"] == "mine"
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert (await read(reply)).endswith(b"[DONE]\n\n")

    with_server(body)


@pytest.mark.parametrize("n", [1, 2])
def test_who_waits_long_for_a_worker_can_come_back_too(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the head that leaves before any worker has the request: there is no other place for the token. From then
    on a broken connection gives up no place in the line; DELETE does, and so does whoever cannot come back."""
    monkeypatch.setattr("router.http.answers.KEEP_ALIVE_S", 0.05)

    async def body(app: RouterApp, client: httpx.AsyncClient, workers: FakeWorkers) -> None:
        workers.refusals, workers.mute_s = 10**6, 0.01
        wanted = {"prompt": "x", "stream": True, "max_tokens": 2, "n": n}

        async def cut_while_waiting(**more: object) -> httpx.Headers:
            async with client.stream("POST", TEXT[0], json=wanted | more) as reply:
                assert (await read(reply, 12)).startswith(b": keep-alive")
                assert app.hub.core.open == n and not workers._running
                return reply.headers

        assert RESUME_TOKEN_HEADER not in await cut_while_waiting()
        await until(lambda: not app.hub.core.open, 1.0)
        gone = await cut_while_waiting(resumable=True)
        assert (await client.delete(f"/v1/streams/{gone[RESUME_TOKEN_HEADER]}")).status_code == 204
        await until(lambda: not app.hub.core.open, 1.0)

        headers = await cut_while_waiting(resumable=True)
        token = headers[RESUME_TOKEN_HEADER]
        await asyncio.sleep(0.2)
        assert app.hub.core.open == n
        async with client.stream("GET", f"/v1/streams/{token}") as reply:
            assert (await read(reply, 12)).startswith(b": keep-alive")
            assert reply.headers[RESUME_TOKEN_HEADER] == token
            assert reply.headers["x-request-id"] == headers["x-request-id"]
        workers.refusals = 0
        async with client.stream("GET", f"/v1/streams/{token}") as reply:
            assert (await read(reply)).endswith(b"[DONE]\n\n")

    with_server(body, retry_after_s=0.05)


def test_who_has_left_before_its_first_comment_does_not_know_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a place in line that would be kept, and a worker's step, for a client that was never told how to come
    back."""
    monkeypatch.setattr("router.http.answers.KEEP_ALIVE_S", 0.001)

    class Gone:
        looks = 0

        def is_gone(self) -> bool:
            self.looks += 1
            return True

    def begin() -> Started:
        raise AssertionError("it is kept for nobody")

    async def send(message: object) -> None:
        raise AssertionError("it is written to nobody")

    async def run() -> None:
        outlet, connection = Outlet(), Gone()
        outlet.begin = begin
        pulse = asyncio.ensure_future(_EventStream(send, "", connection).keep_alive(outlet))  # type: ignore[arg-type]
        await until(lambda: connection.looks > 1 or pulse.done())
        assert pulse.cancel()

    asyncio.run(run())


def test_only_resumable_streams_run_on_and_only_for_the_window() -> None:
    """Guards both sides of the choice: nobody else's request runs on, and nobody's for ever."""

    async def body(app: RouterApp, client: httpx.AsyncClient, workers: FakeWorkers) -> None:
        workers.slow_s, workers.mute_s = 0.1, 0.05
        plain = {"prompt": "x", "stream": True}
        async with client.stream("POST", TEXT[0], json=plain) as reply:
            await read(reply, 10)
            assert RESUME_TOKEN_HEADER not in reply.headers
        await until(lambda: len(_cancels(workers)) == 1, 1.0)
        token, _ = await post(client, "chat", 10)
        await asyncio.sleep(0.3)
        assert len(_cancels(workers)) == 1 and app.hub.core.open == 1
        await until(lambda: len(_cancels(workers)) == 2, 2.0)
        late = await client.get(f"/v1/streams/{token}")
        assert late.status_code == 404
        assert late.json()["error"]["code"] == "stream_not_found"

    with_server(body, resume_window_s=0.8)


def test_delete_ends_it_and_a_new_reader_takes_over() -> None:
    """Guards half-dead connections, which a new reader must win against, and requests that nobody wants any more."""

    async def body(app: RouterApp, client: httpx.AsyncClient, workers: FakeWorkers) -> None:
        workers.slow_s, workers.mute_s = 0.1, 0.05
        prompt = {"prompt": "x", "stream": True, "resumable": True}
        async with client.stream("POST", TEXT[0], json=prompt) as old:
            token = old.headers[RESUME_TOKEN_HEADER]
            assert (await client.head(f"/v1/streams/{token}")).status_code == 405
            async with client.stream("GET", f"/v1/streams/{token}") as new:
                left = parts(await read(old))
                assert json.loads(left[-1].removeprefix(b"data: "))["error"]["code"] == "cancelled"
                assert (await client.delete(f"/v1/streams/{token}")).status_code == 204
                assert b"cancelled" in await read(new)
        await until(lambda: len(_cancels(workers)) == 1, 1.0)
        assert (await client.delete(f"/v1/streams/{token}")).status_code == 404
        assert (await client.get(f"/v1/streams/{token}")).status_code == 404

    with_server(body)


def test_what_cannot_be_resumed_here() -> None:
    """Guards statuses: a client must learn whether to come back, come back elsewhere, or mend its request."""

    async def body(app: RouterApp, client: httpx.AsyncClient, workers: FakeWorkers) -> None:
        whole = {"prompt": "x", "resumable": True}
        refused = await client.post(TEXT[0], json=whole)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "resumable")
        events = app._frontend.generate(GenerateCall(prompt="x", resumable=True))
        token = (await anext(events)).resume_token  # type: ignore[union-attr]
        assert (await client.get(f"/v1/streams/{token}")).status_code == 404, "gRPC's, in no format"
        assert await app._frontend.cancel(token)
        await events.aclose()
        token, data = await post(client, "chat")
        (at,) = positions(last_id(data), token)
        bad = {
            "nonsense": "Last-Event-ID",
            event_id("another", [EventPosition()]): "Last-Event-ID",
            event_id(token, [EventPosition(10**6, 0, 0)]): "Last-Event-ID",
            event_id(token, [EventPosition(0, 2, 0)]): "Last-Event-ID",
            event_id(token, [EventPosition(1, 1, 1)]): "Last-Event-ID",
            event_id(token, [EventPosition(at.next_index, at.text_bytes, at.closing + 1)]): "Last-Event-ID",
        }
        for value, param in bad.items():
            reply = await client.get(f"/v1/streams/{token}", headers={"Last-Event-ID": value})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), value
        query = await client.get(f"/v1/streams/{token}", params={"last_event_id": last_id(data)})
        assert query.status_code == 204 and not query.content

    with_server(body)


def test_silence_between_ids_is_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards OpenAI's Python client, which makes an event without data of an empty line that follows an id and a
    comment, and fails on it."""
    monkeypatch.setattr("router.http.answers.KEEP_ALIVE_S", 0.02)

    async def body(app: RouterApp, client: httpx.AsyncClient, workers: FakeWorkers) -> None:
        workers.slow_s, workers.mute_s = 0.1, 0.05
        _, data = await post(client, "cut by length")
        assert b": keep-alive\n" in data
        for part in parts(data):
            assert b"data: " in part, part

    with_server(body)


def _cancels(workers: FakeWorkers) -> list[Cancel]:
    return [r for r in workers.got if isinstance(r, Cancel)]

"""Several samples of one answer (`n`) from the caller to the workers' records and back, over gRPC and HTTP."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import httpx
import pytest

from engine.messages import Cancel, Place
from router.app import RouterApp
from router.config import RouterConfig
from router.front.api import ApiError, Delta, Finished, GenerateCall, GenerateEvent, Started
from router.grpc.client import Client
from router.status.observer import NullObserver
from tests.router.cut_proxy import CutProxy
from tests.router.fake_cluster import END, ByteText, FakeWorkers, until
from tests.router.http.test_resume import FORMS, complete, go_on, last_id, parts, post
from tests.router.test_restart import ANSWER as TEXT
from tests.router.test_restart import IDS, site
from tests.secrets_of_tests import SECRETS

ANSWER = "wörld 🙂 ok"
Body = Callable[[RouterApp, str, CutProxy, FakeWorkers], Awaitable[None]]


def with_router(body: Body, blocks: int = 4096, **config: object) -> None:
    async def run() -> None:
        settings = RouterConfig(grpc_port=0, http_port=0, **config)  # type: ignore[arg-type]
        app = RouterApp(settings, ByteText(), NullObserver(), SECRETS)
        workers = FakeWorkers()
        workers.answer = list(ANSWER.encode())
        workers.slow_s = 0.01
        workers.blocks = blocks
        addresses = await app.start()
        proxy = CutProxy(addresses.grpc)
        try:
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(app.hub.ready)
            async with asyncio.timeout(30):
                await body(app, addresses.http, proxy, workers)
            await until(lambda: not app.hub.core.open)
            app.hub.core.check()
        finally:
            await proxy.stop()
            await app.stop(0.0)
            await workers.stop()

    asyncio.run(run())


def places(workers: FakeWorkers) -> list[Place]:
    return [record for record in workers.got if isinstance(record, Place)]


def by_sample(events: list[GenerateEvent]) -> dict[int, tuple[str, list[int], Finished]]:
    """Text, ids and account of each sample; nothing of a sample comes behind its end."""
    found: dict[int, tuple[str, list[int], Finished]] = {}
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    for event in events[1:]:
        assert not isinstance(event, Started) and event.sample not in found
        if isinstance(event, Delta):
            texts[event.sample] = texts.get(event.sample, "") + event.text
            ids.setdefault(event.sample, []).extend(event.token_ids)
        else:
            found[event.sample] = (texts[event.sample], ids[event.sample], event)
    return found


def test_samples_are_requests_of_one_group_that_fork_the_first() -> None:
    """Guards what workers are told: one seed, an index each, names of their own, and whose blocks they share."""

    async def body(app: RouterApp, http: str, proxy: CutProxy, workers: FakeWorkers) -> None:
        async with Client(await proxy.start()) as client:
            call = GenerateCall(prompt="x", n=3, seed=9, stop=("ok",))
            events = [event async for event in client.agenerate(call)]
        started = events[0]
        assert isinstance(started, Started) and started.samples == 3
        name = started.request_id
        got = places(workers)
        assert [p.record.request for p in got] == [name, f"{name}.1", f"{name}.2"]
        assert [p.fork_of for p in got] == [None, name, name]
        assert [(p.record.seed, p.record.sample_index) for p in got] == [(9, 0), (9, 1), (9, 2)]
        found = by_sample(events)
        assert sorted(found) == [0, 1, 2] and isinstance(events[-1], Finished)
        for text, _, end in found.values():
            assert (text, end.reason.value, end.stop_matched) == ("wörld 🙂 ", "stop", "ok")

    with_router(body)


def test_a_single_sample_is_no_group() -> None:
    async def body(app: RouterApp, http: str, proxy: CutProxy, workers: FakeWorkers) -> None:
        events = [e async for e in app._frontend.generate(GenerateCall(prompt="x", n=1))]
        assert isinstance(events[0], Started) and events[0].samples == 1
        (place,) = places(workers)
        assert (place.record.group, place.fork_of) == ("", None)

    with_router(body)


@pytest.mark.parametrize("n", [0, 17, -1])
def test_the_number_of_samples_has_its_bounds(n: int) -> None:
    async def body(app: RouterApp, http: str, proxy: CutProxy, workers: FakeWorkers) -> None:
        with pytest.raises(ApiError) as raised:
            await anext(app._frontend.generate(GenerateCall(prompt="x", n=n)))
        assert (raised.value.code, raised.value.field) == ("INVALID_ARGUMENT", "n")
        assert "1 to 16" in raised.value.message
        async with httpx.AsyncClient(base_url=f"http://{http}") as client:
            reply = await client.post("/v1/completions", json={"prompt": "x", "n": n})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
        assert not workers.got

    with_router(body)


def test_a_client_that_leaves_ends_every_sample_and_the_last_first() -> None:
    """Guards leaks, and work for nothing: a sample whose parent ends first would begin on its own."""

    async def body(app: RouterApp, http: str, proxy: CutProxy, workers: FakeWorkers) -> None:
        workers.slow_s = 0.1
        async with aclosing(app._frontend.generate(GenerateCall(prompt="x", n=3))) as events:
            started = await anext(events)
            await anext(events)
        assert isinstance(started, Started)
        await until(lambda: not app.hub.core.open)
        gone = [record.request for record in workers.got if isinstance(record, Cancel)]
        assert gone == [f"{started.request_id}.2", f"{started.request_id}.1", started.request_id]

    with_router(body)


def test_one_sample_that_fails_ends_them_all() -> None:
    """Guards the line's bound: a group that does not fit into it as a whole is refused as a whole."""

    async def body(app: RouterApp, http: str, proxy: CutProxy, workers: FakeWorkers) -> None:
        workers.hold = True  # two samples have all of its blocks
        with pytest.raises(ApiError) as raised:
            async with aclosing(app._frontend.generate(GenerateCall(prompt="x", n=4))) as events:
                await anext(events)
        assert raised.value.code == "RESOURCE_EXHAUSTED"
        await until(lambda: not app.hub.core.open)
        assert len(places(workers)) == 2, "the line was never full"

    with_router(body, blocks=64, max_waiting=1)


@pytest.mark.parametrize("cuts", [(1,), (2, 9, 20), (30,), (3, 7, 11, 15, 19, 23, 27, 31)])
def test_cut_connections_lose_and_repeat_nothing_of_any_sample(cuts: tuple[int, ...]) -> None:
    """Guards positions by sample: connections are cut after the given numbers of tokens of all samples together."""

    async def body(app: RouterApp, http: str, proxy: CutProxy, workers: FakeWorkers) -> None:
        async with Client(await proxy.start()) as client:
            events: list[GenerateEvent] = []
            tokens, left, effective = 0, list(cuts), 0
            async for event in client.agenerate(GenerateCall(prompt="x", n=3), resume=True):
                events.append(event)
                tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                if left and tokens >= left[0]:
                    del left[0]
                    before = proxy.cut_connections
                    proxy.cut()
                    # What had been received before a cut may reach the next one before the client is back.
                    effective += proxy.cut_connections > before
        found = by_sample(events)
        assert sorted(found) == [0, 1, 2]
        assert effective and proxy.accepted > 1, "the cuts did not take effect"
        for text, ids, _ in found.values():
            assert (text, ids) == (ANSWER, [*ANSWER.encode(), END])
        assert len(places(workers)) == 3, "a sample was run twice"

    with_router(body)


def choices(data: bytes) -> dict[int, str]:
    texts: dict[int, str] = {}
    for part in parts(data):
        line = part.split(b"data: ")[1].strip()
        for choice in [] if line == b"[DONE]" else json.loads(line)["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_whole_answers_over_http(path: str) -> None:
    """Guards OpenAI's form: a choice per sample in order, one finish reason each, the prompt counted once."""

    async def body(app: RouterApp, http: str, proxy: CutProxy, workers: FakeWorkers) -> None:
        chat = path.endswith("chat/completions")
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
        async with httpx.AsyncClient(base_url=f"http://{http}") as client:
            one = (await client.post(path, json=prompt)).json()
            reply = (await client.post(path, json={**prompt, "n": 3})).json()
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        for choice in reply["choices"]:
            assert {**choice, "index": 0} == one["choices"][0]
        used, single = reply["usage"], one["usage"]
        assert used["prompt_tokens"] == single["prompt_tokens"]
        assert used["completion_tokens"] == 3 * single["completion_tokens"]
        assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]

    with_router(body)


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}])
def test_streamed_answers_over_http_and_every_event_is_one_to_go_on_from(
    usage: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards ids that carry the positions of all samples: whatever was seen, the rest of each comes, once."""
    options = {"n": 3, "max_tokens": 9} | usage
    monkeypatch.setitem(
        FORMS,
        "samples",
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, options),
    )

    async def body(app: RouterApp, http: str, proxy: CutProxy, workers: FakeWorkers) -> None:
        async with httpx.AsyncClient(base_url=f"http://{http}", timeout=20) as client:
            token, whole = await post(client, "samples")
            events = parts(whole)
            assert events[-1].endswith(b"data: [DONE]\n\n")
            assert choices(whole) == dict.fromkeys(range(3), "wörld \ufffd")
            reasons = [c for e in events[:-1] for c in _data(e)["choices"] if c["finish_reason"]]
            assert sorted((c["index"], c["finish_reason"]) for c in reasons) == [
                (at, "length") for at in range(3)
            ]
            if usage:
                assert _data(events[-2])["usage"]["completion_tokens"] == 27
            for at, event in enumerate(events, 1):
                rest = await go_on(client, token, last_id(event))
                assert sorted(_bare(rest)) == sorted(_bare(b"".join(events[at:])))
            token, some = await post(client, "samples", len(whole) // 2)
            some = complete(some)
            rest = await go_on(client, token, last_id(some))
            assert choices(some + rest) == choices(whole)
            assert rest.endswith(b"data: [DONE]\n\n")
            wrong = await client.get(
                f"/v1/streams/{token}", headers={"Last-Event-ID": f"{token}.0.0.0"}
            )
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "Last-Event-ID")

    with_router(body)


def _data(event: bytes) -> dict:  # type: ignore[type-arg]
    return json.loads(event.split(b"data: ")[1])  # type: ignore[no-any-return]


def _bare(data: bytes) -> list[bytes]:
    """Events without their ids: samples may come in another order."""
    return [part.split(b"data: ")[1] for part in parts(data)]


@pytest.mark.parametrize("at", [1, 20, 60])
def test_every_sample_survives_its_router(at: int) -> None:
    """Guards adoption of a group: the next router finds all of its samples, and the client goes on in each of them."""

    async def run() -> None:
        async with site() as one, Client(one.address) as client:
            one.workers.blocks = 4096
            await one.restart()
            call = GenerateCall(prompt="x", n=3, max_tokens=40)
            events: list[GenerateEvent] = []
            tokens, restarted = 0, False
            async for event in client.agenerate(call, resume=True):
                events.append(event)
                tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                if tokens >= at and not restarted:
                    restarted = True
                    await one.restart()
            assert restarted
            found = by_sample(events)
            assert sorted(found) == [0, 1, 2]
            assert all((text, ids) == (TEXT, IDS) for text, ids, _ in found.values())
            assert len(places(one.workers)) == 3, "a sample was run twice"

    asyncio.run(run())


def test_a_sample_that_was_lost_with_its_router_is_not_passed_over() -> None:
    """Guards against an answer of two samples where three were asked."""

    async def run() -> None:
        async with site() as one:
            one.workers.blocks = 4096
            app = await one.restart()
            call = GenerateCall(prompt="x", n=3, max_tokens=40, resumable=True)
            async with aclosing(app._frontend.generate(call)) as events:
                started = await anext(events)
            assert isinstance(started, Started)
            await until(lambda: len(one.workers.orphans) == 3)
            del one.workers.orphans[f"{started.request_id}.1"]
            app = await one.restart()
            with pytest.raises(ApiError) as raised:
                await anext(app._frontend.resume(started.resume_token))
            assert raised.value.code == "UNAVAILABLE"

    asyncio.run(run())

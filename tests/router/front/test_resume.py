"""Resumable streams: whatever breaks between client and router, the client has every token and character once.

When a client comes back, and when it does not, is tried alone in tests/router/grpc/test_progress.py.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing

import pytest

from engine.messages import Cancel, Place, RequestStats
from engine.types import FinishReason, RequestId, TokenLogprobs
from router.app import RouterApp
from router.config import RouterConfig
from router.core.events import Complete
from router.front import resume
from router.front.api import (
    ApiError,
    Delta,
    Finished,
    GenerateCall,
    GenerateEvent,
    Position,
    Started,
)
from router.front.outlet import WakeQueue
from router.front.output import Output, OutputHistory
from router.front.resume import Resumables
from router.front.samples import Samples
from router.front.stream import SampleStream
from router.front.timing import Timeline
from router.grpc.client import Client
from router.status.journal import RouterJournal
from router.status.observer import NullObserver
from tests.router.cut_proxy import CutProxy
from tests.router.fake_cluster import END, ByteDetokenizer, ByteText, FakeWorkers, logprobs_of, until
from tests.secrets_of_tests import SECRETS

ANSWER = "wörld 🙂 ok, thé énd"

Body = Callable[[RouterApp, Client, CutProxy, FakeWorkers], Awaitable[None]]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


@pytest.fixture
def cluster(runner: asyncio.Runner) -> Callable[..., None]:
    def with_cluster(body: Body, **config: object) -> None:
        runner.run(_with_cluster(body, **config))

    return with_cluster


async def _with_cluster(body: Body, **config: object) -> None:
    settings = RouterConfig(grpc_port=0, http_port=-1, **config)  # type: ignore[arg-type]
    app = RouterApp(settings, ByteText(), NullObserver(), SECRETS)
    workers = FakeWorkers()
    workers.answer = list(ANSWER.encode())
    workers.slow_s = 0.03
    addresses = await app.start()
    proxy = CutProxy(addresses.grpc)
    try:
        await workers.start()
        await app.set_workers(*workers.peers)
        await until(app.hub.ready)
        async with Client(await proxy.start()) as client, asyncio.timeout(20):
            await body(app, client, proxy, workers)
        await until(lambda: not app.hub.core.open)
        app.hub.core.check()
    finally:
        await proxy.stop()
        await app.stop(0.0)
        await workers.stop()


def test_a_flood_of_streams_gives_up_the_floods_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a stream whose window has not passed, and that another tenant's short ones, left at once, drove out."""
    monkeypatch.setattr(resume, "MAX_UNREAD", 8)
    kept, turns = Resumables(30.0), WakeQueue(1000.0)

    def left(token: str, tenant: str, now: float) -> list[str]:
        if kept.find(token) is None:
            kept.keep(token, Samples(Started("r", "m", 1, token), turns, None, tenant))
        return [one.started.resume_token for one in kept.detached(token, now)]

    for number in range(3):
        assert left(f"b{number}", "b", 0.0) == []
    told = [left(f"a{number}", "a", 1.0) for number in range(20)]
    assert told == [[]] * 5 + [[f"a{number}"] for number in range(15)]
    assert left("b0", "b", 2.0) == [], "it is there already, and waits anew"
    kept.attached("b1")
    assert left("b3", "b", 2.0) == [] and left("b4", "b", 2.0) == ["a15"]
    assert [one.started.resume_token for one in kept.expired(30.0)] == ["b2"]
    assert [one.started.resume_token for one in kept.expired(31.5)] == ["a16", "a17", "a18", "a19"]
    assert [one.started.resume_token for one in kept.expired(99.0)] == ["b0", "b3", "b4"]
    assert len(kept) == 1 and kept.find("b1") is not None and not kept._unread_of


def cancels(workers: FakeWorkers) -> list[Cancel]:
    return [r for r in workers.got if isinstance(r, Cancel)]


@pytest.mark.parametrize("cuts", [(1,), (2, 9, 10), (25,), (3, 7, 11, 15, 19, 23)])
def test_cut_connections_lose_and_repeat_nothing(
    cluster: Callable[..., None], cuts: tuple[int, ...]
) -> None:
    """Guards exactness: connections are cut after the given tokens, inside characters and right before the end."""

    async def body(app: RouterApp, client: Client, proxy: CutProxy, workers: FakeWorkers) -> None:
        text, ids, kinds = "", [], []
        left = list(cuts)
        async for event in client.agenerate(GenerateCall(prompt="x"), resume=True):
            kinds.append(type(event))
            if isinstance(event, Delta):
                text += event.text
                ids += event.token_ids
                if left and len(ids) >= left[0]:
                    del left[0]
                    proxy.cut()
        assert (text, ids) == (ANSWER, [*ANSWER.encode(), END])
        assert kinds.count(Started) == 1 and kinds[-1] is Finished
        assert not left and proxy.accepted > len(cuts), "the cuts did not take effect"
        assert len([r for r in workers.got if isinstance(r, Place)]) == 1, "it was run twice"
        assert not cancels(workers)

    cluster(body)


@pytest.mark.parametrize("cuts", [(1,), (2, 9, 10), (3, 7, 11, 15, 19, 23)])
def test_log_probabilities_come_once_whatever_is_cut(cluster: Callable[..., None], cuts: tuple[int, ...]) -> None:
    """Guards what was packed while nobody read: the values are those that were, to the last bit, each with its token;
    and a new connection from the start gives all of them again."""

    async def body(app: RouterApp, client: Client, proxy: CutProxy, workers: FakeWorkers) -> None:
        want = [logprobs_of(index, token, 3) for index, token in enumerate([*ANSWER.encode(), END])]
        got: list[TokenLogprobs] = []
        left, token = list(cuts), ""
        async for event in client.agenerate(GenerateCall(prompt="x", logprobs=3), resume=True):
            token = event.resume_token if isinstance(event, Started) else token
            if isinstance(event, Delta):
                assert [one.token for one in event.logprobs] == list(event.token_ids)
                got += event.logprobs
                if left and len(got) >= left[0]:
                    del left[0]
                    proxy.cut()
        assert got == want and not left
        async with aclosing(app._frontend.resume(token)) as events:
            again = [event async for event in events if isinstance(event, Delta)]
        assert [one for delta in again for one in delta.logprobs] == want

    cluster(body)


def test_the_synchronous_client_comes_back_too(cluster: Callable[..., None]) -> None:
    """Guards the client of command-line tools; and an outage that lasts for several attempts."""

    async def body(app: RouterApp, client: Client, proxy: CutProxy, workers: FakeWorkers) -> None:
        loop = asyncio.get_running_loop()

        def talk() -> str:
            text = ""
            with Client(client._address) as plain:
                for event in plain.generate(GenerateCall(prompt="x"), resume=True):
                    if isinstance(event, Delta):
                        text += event.text
                        if len(text) == 4:
                            loop.call_soon_threadsafe(proxy.cut, True)
                            loop.call_soon_threadsafe(loop.call_later, 0.4, proxy.heal)
            return text

        assert await asyncio.to_thread(talk) == ANSWER
        assert proxy.cut_connections and proxy.accepted >= 2

    cluster(body)


def test_closing_the_iterator_still_cancels_at_once(cluster: Callable[..., None]) -> None:
    """Guards against resumable requests that nobody wants any more and that run on for the whole window."""

    async def body(app: RouterApp, client: Client, proxy: CutProxy, workers: FakeWorkers) -> None:
        async with aclosing(client.agenerate(GenerateCall(prompt="x"), resume=True)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Delta):
                    break
        await until(lambda: len(cancels(workers)) == 1, 1.0)

    cluster(body)


def test_a_client_that_does_not_come_back_is_given_up(cluster: Callable[..., None]) -> None:
    """Guards the window: until it has passed the request runs, afterwards it is cancelled and its token worthless."""

    async def body(app: RouterApp, client: Client, proxy: CutProxy, workers: FakeWorkers) -> None:
        workers.slow_s = 0.1
        front = app._frontend
        events = front.generate(GenerateCall(prompt="x", resumable=True))
        started = await anext(events)
        assert isinstance(started, Started) and len(started.resume_token) >= 20
        await events.aclose()
        await asyncio.sleep(0.3)
        assert not cancels(workers) and app.hub.core.open == 1
        await until(lambda: len(cancels(workers)) == 1, 1.5)
        with pytest.raises(ApiError) as raised:
            await anext(front.resume(started.resume_token, [Position(0, 0)]))
        assert (raised.value.code, raised.value.field) == ("NOT_FOUND", "resume_token")
        assert len(front._resumables) == 0

    cluster(body, resume_window_s=0.8)


def test_before_a_worker_took_it_a_lost_connection_cancels(cluster: Callable[..., None]) -> None:
    """Guards against requests of clients that never learned their token."""

    async def body(app: RouterApp, client: Client, proxy: CutProxy, workers: FakeWorkers) -> None:
        workers.hold = True
        events = client.agenerate(GenerateCall(prompt="x"), resume=True)
        reading = asyncio.create_task(anext(events))
        await until(lambda: bool(workers.got))
        proxy.cut()
        with pytest.raises(ApiError) as raised:
            await reading
        assert raised.value.code == "UNAVAILABLE"
        await until(lambda: len(cancels(workers)) == 1, 1.0)

    cluster(body)


def test_a_second_reader_takes_over_and_the_end_can_be_read_again(
    cluster: Callable[..., None],
) -> None:
    """Guards half-dead connections: the newest reader has the stream, and a lost last event is sent again."""

    async def body(app: RouterApp, client: Client, proxy: CutProxy, workers: FakeWorkers) -> None:
        front = app._frontend
        first = front.generate(GenerateCall(prompt="x", resumable=True))
        started = await anext(first)
        assert isinstance(started, Started)
        waiting = asyncio.ensure_future(_rest(first))
        await asyncio.sleep(0.05)
        rest = await _rest(front.resume(started.resume_token, [Position(0, 0)]))
        with pytest.raises(ApiError) as raised:
            await waiting
        assert raised.value.code == "CANCELLED"
        assert rest[0] == started
        ids = [token for event in rest if isinstance(event, Delta) for token in event.token_ids]
        assert ids == [*ANSWER.encode(), END]
        again = await _rest(
            front.resume(started.resume_token, [Position(len(ids), len(ANSWER.encode()))])
        )
        assert again == [started, rest[-1]]
        assert await front.cancel(started.resume_token) and not await front.cancel(started.resume_token)

    cluster(body)


async def _rest(events: object) -> list[GenerateEvent]:
    return [event async for event in events]  # type: ignore[attr-defined]


@pytest.mark.parametrize("stop", [(), ("é é",), ("STOP",)])
def test_every_position_is_one_to_go_on_from(stop: tuple[str, ...]) -> None:
    """Guards the arithmetic of text that lags behind tokens, at every point of an answer with an unfinished end."""

    async def body() -> None:
        data = [*ANSWER.encode(), 0xC3]
        stream = SampleStream(
            Started("r", "m", 1, "t"),
            Output(ByteDetokenizer(), stop),
            Timeline(0.0),
            NullObserver(),
            asyncio.Event(),
            RouterJournal(),
            history=OutputHistory(events=True),
        )
        stream.accepted(0.0)
        had: list[tuple[int, int]] = [(0, 0)]
        for token in data:
            stream.tokens([token], 1.0)
            had.append((len(stream.ids), len(stream.text.encode())))
        stream.completed(Complete(RequestId("r"), FinishReason.LENGTH, RequestStats(), 0), 2.0)
        had.append((len(stream.ids), len(stream.text.encode())))
        ids, text = stream.ids, stream.text
        for next_index, text_bytes in had:
            reader = stream.read(Position(next_index, text_bytes))
            got_ids, got_text = ids[:next_index], text.encode()[:text_bytes].decode()
            while not isinstance(event := reader.poll(), Complete):
                if event is not None:
                    got_ids = [*got_ids, *event.token_ids]
                    got_text += event.text
            assert (got_ids, got_text) == (ids, text)
        for next_index, text_bytes, field in (
            (-1, 0, "next_index"),
            (len(ids) + 1, 0, "next_index"),
            (0, -1, "text_bytes"),
            (0, len(text.encode()) + 1, "text_bytes"),
            (0, 2, "text_bytes"),
        ):
            with pytest.raises(ApiError) as raised:
                stream.read(Position(next_index, text_bytes))
            assert (raised.value.code, raised.value.field) == ("INVALID_ARGUMENT", field)

    asyncio.run(body())

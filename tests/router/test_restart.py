"""One router after another over the same workers: what a client that comes back is given."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from engine.messages import Cancel, Orphan, Place, RequestStats
from engine.types import FinishReason, RequestId, RequestRecord, TokenLogprobs
from router.app import RouterApp
from router.config import RouterConfig
from router.core.endings import DEADLINE
from router.core.events import Complete
from router.front.api import (
    ApiError,
    ChatMessage,
    Delta,
    Finished,
    GenerateCall,
    GenerateEvent,
    HttpForm,
    Position,
    Started,
)
from router.front.resume import Context, pack, unpack
from router.front.timing import WORKER_STAGES
from router.grpc.client import Client
from router.status.observer import NullObserver
from tests.engine.text.chats import chat
from tests.router.fake_cluster import END, ByteText, FakeWorkers, logprobs_of, until
from tests.secrets_of_tests import SECRETS

ANSWER = "wörld 🙂 ok, thé énd"
IDS = [*ANSWER.encode(), END]
CANCELLED = [FinishReason.CANCELLED]
CALL = GenerateCall(prompt="x")


class Counting(NullObserver):
    """Keeps the outcomes that were counted."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[str, float | None]] = []

    def request(self, outcome: str, ttft_s: float | None, *rest: object) -> None:
        self.outcomes.append((outcome, ttft_s))


class Site:
    """Workers that outlive their routers, and the router of the time, always on the same port."""

    def __init__(self, **config: object) -> None:
        self.workers = FakeWorkers()
        self.workers.answer = list(ANSWER.encode())
        self.workers.slow_s = 0.02
        self.observer = Counting()
        self.app: RouterApp | None = None
        self._config = RouterConfig(grpc_port=0, http_port=-1, **config)  # type: ignore[arg-type]
        self.address = ""

    async def start_router(self, named: bool = True) -> RouterApp:
        self.observer = Counting()
        self.app = RouterApp(self._config, ByteText(), self.observer, SECRETS)
        self.address = (await self.app.start()).grpc
        port = int(self.address.rpartition(":")[2])
        self._config = msgspec.structs.replace(self._config, grpc_port=port)
        if named:
            await self.app.set_workers(*self.workers.peers)
            await until(self.app.hub.ready)
        return self.app

    async def kill_router(self) -> None:
        """Kill the router as its death looks from outside: every stream ends, and nobody is told why."""
        assert self.app is not None
        await self.app.stop(0.0)
        self.app = None

    async def restart(self) -> RouterApp:
        await self.kill_router()
        return await self.start_router()


@asynccontextmanager
async def site(**config: object) -> AsyncIterator[Site]:
    one = Site(**config)
    await one.workers.start()
    try:
        await one.start_router()
        async with asyncio.timeout(20):
            yield one
    finally:
        if one.app is not None:
            await one.kill_router()
        await one.workers.stop()


def places(one: Site) -> int:
    return sum(isinstance(record, Place) for record in one.workers.got)


async def read(
    client: Client, call: GenerateCall, at: int, act: Callable[[], Awaitable[object]]
) -> tuple[str, list[int], Finished]:
    """The whole answer; `act` happens when `at` tokens have come."""
    text, ids, end, acted = "", [], None, False
    async for event in client.agenerate(call, resume=True):
        if isinstance(event, Delta):
            text += event.text
            ids += event.token_ids
            if len(ids) >= at and not acted:
                acted = True
                await act()
        elif isinstance(event, Finished):
            end = event
    assert acted and end is not None
    return text, ids, end


@pytest.mark.parametrize("at", [1, 9, 25])
def test_log_probabilities_survive_a_router(at: int) -> None:
    """Guards values that the router alone knew: the next one has them from the decode worker, each with its token."""

    async def body() -> None:
        async with site() as one, Client(one.address) as client:
            got: list[TokenLogprobs] = []
            acted = False
            async for event in client.agenerate(msgspec.structs.replace(CALL, logprobs=2), resume=True):
                if isinstance(event, Delta):
                    got += event.logprobs
                    if len(got) >= at and not acted:
                        acted = True
                        await one.restart()
            assert acted and got == [logprobs_of(index, token, 2) for index, token in enumerate(IDS)]

    asyncio.run(body())


@pytest.mark.parametrize("at", [1, 2, 9, 25])
def test_a_client_comes_back_to_the_next_router(at: int) -> None:
    """Guards exactness over a restart at a token, inside a character and right before the end; and the account."""

    async def body() -> None:
        async with site() as one, Client(one.address) as client:
            text, ids, end = await read(client, CALL, at, one.restart)
            assert (text, ids, end.reason) == (ANSWER, IDS, FinishReason.STOP)
            assert places(one) == 1, "it was run twice"
            stages = end.stats.stages
            assert abs(sum(stages.values()) - end.e2e_s) < 1e-6 and end.e2e_s > 0.5
            assert end.ttft_s == 0.0 and stages["reserve"] == 0.0
            assert set(stages) >= {*WORKER_STAGES, "unattributed"} and stages["unattributed"] > 0
            assert one.app is not None
            await until(lambda: one.observer.outcomes == [("stop", None)])
            assert one.app.hub.core.open == 0

    asyncio.run(body())


def test_a_restart_that_takes_a_while() -> None:
    """Guards a client that finds nobody at the address for several attempts, and one restart after another."""

    async def body() -> None:
        async with site() as one, Client(one.address) as client:

            async def outage() -> None:
                await one.kill_router()
                await asyncio.sleep(1.5)
                await one.start_router()
                await asyncio.sleep(0.1)
                await one.restart()

            text, ids, _ = await read(client, CALL, 3, outage)
            assert (text, ids) == (ANSWER, IDS) and places(one) == 1

    asyncio.run(body())


def test_a_stop_string_over_the_restart() -> None:
    """Guards a stop string that begins before the restart and ends behind it, found or not found before."""

    async def body() -> None:
        async with site() as one, Client(one.address) as client:
            call = msgspec.structs.replace(CALL, stop=("ok, t",))
            text, ids, end = await read(client, call, len("wörld 🙂 ok".encode()), one.restart)
            assert text == "wörld 🙂 " and end.stop_matched == "ok, t"
            assert ids == IDS[: len("wörld 🙂 ok, t".encode())] and end.output_tokens == len(ids)

    asyncio.run(body())


def test_a_client_waits_until_the_workers_have_reported() -> None:
    """Guards against NOT_FOUND from a router that does not know its workers yet, which ends a request that lives."""

    async def body() -> None:
        async with site() as one, Client(one.address) as client:

            async def slowly() -> None:
                await one.kill_router()
                app = await one.start_router(named=False)
                loop = asyncio.get_running_loop()
                later = app.set_workers(*one.workers.peers)
                loop.call_later(1.0, asyncio.ensure_future, later)

            text, ids, _ = await read(client, CALL, 3, slowly)
            assert (text, ids) == (ANSWER, IDS)

    asyncio.run(body())


def test_a_request_that_nobody_kept_is_lost_in_a_clear_word() -> None:
    """Guards against a client that waits for ever where the decode worker died with the router."""

    async def body() -> None:
        async with site(settle_s=0.5) as one, Client(one.address) as client:
            one.workers.deaf = True
            with pytest.raises(ApiError) as raised:
                await read(client, CALL, 3, one.restart)
            assert raised.value.code in ("UNAVAILABLE", "CANCELLED") and raised.value.field == ""
            assert one.app is not None
            with pytest.raises(ApiError) as raised:
                await anext(one.app._frontend.resume("who?", [Position(0, 0)]))
            assert raised.value.code == "NOT_FOUND"

    asyncio.run(body())


def test_a_chats_next_turn_after_a_restart() -> None:
    """Guards the memory of conversations, which is rebuilt from the context for answers that end at the new router."""

    async def body() -> None:
        async with site() as one, Client(one.address) as client:
            chat = [ChatMessage("user", "hi")]
            await read(client, GenerateCall(prompt=chat), 3, one.restart)
            assert one.app is not None
            memory = one.app._frontend._intake.conversations
            assert len(memory._known) == 1
            (prompt,) = memory._known.values()
            text = f"[user]hi<end>[assistant]{ANSWER}<end>"
            assert prompt.begins(text) and prompt.characters == len(text)

    asyncio.run(body())


def test_a_stream_is_given_again_as_it_was() -> None:
    """Guards streams over HTTP, whose events carry ids: the next router makes the same events, in the same form."""

    async def body() -> None:
        async with site() as one:
            assert one.app is not None
            form = HttpForm(chat=True, include_usage=True, return_token_ids=False, created=7)
            call = msgspec.structs.replace(CALL, resumable=True, form=form, stop=("én",))
            first = await _all(one.app._frontend.generate(call))
            assert isinstance(first[0], Started) and first[0].form == form
            app = await one.restart()
            again = await _all(app._frontend.resume(first[0].resume_token, [Position(0, 0)]))
            assert again[:-1] == first[:-1] and len(again) > len(ANSWER)

    asyncio.run(body())


def test_a_cancel_that_comes_before_the_report() -> None:
    """Guards against a request that its client has ended, adopted a moment later to run for nobody."""

    async def body() -> None:
        async with site() as one:
            assert one.app is not None
            one.workers.slow_s = 0.3
            events = one.app._frontend.generate(msgspec.structs.replace(CALL, resumable=True))
            started = await anext(events)
            assert isinstance(started, Started)
            await events.aclose()
            await one.kill_router()
            app = await one.start_router(named=False)
            assert await app._frontend.cancel(started.resume_token)
            await app.set_workers(*one.workers.peers)
            await until(lambda: any(isinstance(r, Cancel) for r in one.workers.got))
            with pytest.raises(ApiError) as raised:
                await anext(app._frontend.resume(started.resume_token, [Position(0, 0)]))
            assert raised.value.code == "NOT_FOUND"
            assert not await app._frontend.cancel(started.resume_token)

    asyncio.run(body())


def test_a_client_that_does_not_come_back_is_given_up() -> None:
    """Guards the window of adopted requests; and one that had ended, and was read, is not counted twice."""

    async def body() -> None:
        async with site(resume_window_s=0.4) as one:
            assert one.app is not None
            async with aclosing(
                one.app._frontend.generate(msgspec.structs.replace(CALL, resumable=True))
            ) as events:
                read_whole = [event async for event in events]
            assert isinstance(read_whole[-1], Finished)
            one.workers.slow_s = 0.2
            events = one.app._frontend.generate(msgspec.structs.replace(CALL, resumable=True))
            await anext(events)
            await events.aclose()
            app = await one.restart()
            await until(lambda: app.hub.is_settled() and len(app._frontend._resumables) == 2)
            await until(lambda: len(app._frontend._resumables) == 0, 2.0)
            await until(
                lambda: [r.reason for r in one.workers.got if isinstance(r, Cancel)] == CANCELLED
            )
            await until(lambda: app.hub.core.open == 0)
            assert [outcome for outcome, _ in one.observer.outcomes] == ["cancelled"]

    asyncio.run(body())


def _orphan(context: Context, tokens: list[int]) -> Orphan:
    record = RequestRecord(
        request=RequestId("r"),
        tokens=[1],
        prompt_tokens=1,
        max_tokens=99,
        seed=1,
        context=pack(context),
    )
    return Orphan(record=record, placement=1, prefill="", tokens=tokens, age_s=1.0)


def test_a_client_may_have_more_than_the_adopted_request() -> None:
    """Guards a client that read a placement which died with its router: it waits, and is not refused; unless the
    answer ends before, or has failed."""

    async def body() -> None:
        async with site() as one:
            assert one.app is not None
            front, hub = one.app._frontend, one.app.hub
            for ending in ("goes on", "ends", "fails"):
                stream = front.revive(
                    _orphan(Context(token="t", model="bytes"), [97]), hub._clock()
                )
                assert stream is not None
                stream.tokens([97], 0.0)
                got = asyncio.ensure_future(_all(front.resume("t", [Position(3, 3)])))
                await asyncio.sleep(0.1)
                assert not got.done(), "refused, or given what it has"
                stream.tokens([98], 0.1)
                if ending == "goes on":
                    stream.tokens([99, 100, 101], 0.2)
                if ending == "fails":
                    stream.failed(DEADLINE, FinishReason.DEADLINE, None, 0.3)
                else:
                    end = Complete(RequestId("r"), FinishReason.LENGTH, RequestStats(), 0)
                    stream.completed(end, 0.3)
                if ending == "goes on":
                    started, delta, finished = await got
                    assert isinstance(started, Started) and delta == Delta("de", (100, 101))
                    assert isinstance(finished, Finished)
                    continue
                with pytest.raises(ApiError) as raised:
                    await got
                expected = "INVALID_ARGUMENT" if ending == "ends" else "DEADLINE_EXCEEDED"
                assert raised.value.code == expected
                await front.cancel("t")

    asyncio.run(body())


async def _all(events: AsyncIterator[GenerateEvent]) -> list[GenerateEvent]:
    return [event async for event in events]


def test_what_another_router_wrote_and_this_one_cannot_read() -> None:
    """Guards against a crash on bytes of another version, and an answer in another model's words."""

    async def body() -> None:
        async with site() as one:
            assert one.app is not None
            front = one.app._frontend
            other = _orphan(Context(token="t", model="another"), [])
            assert front.revive(other, 0.0) is None
            record = msgspec.structs.replace(other.record, context=b"\xc1nonsense")
            assert front.revive(msgspec.structs.replace(other, record=record), 0.0) is None

    asyncio.run(body())


def test_the_context_is_small_and_secret() -> None:
    """Guards the round trip, the requests that carry none, and the token, which must not be printed."""
    context = Context(token="secret", model="m", stop=("a",), chat=chat([("user", "text")]))
    assert unpack(pack(context)) == context and unpack(b"") is None
    assert repr(context) == "Context(m: 1 stop strings, 1 messages)"
    assert len(pack(Context(token="t" * 22, model="m"))) < 64

"""The router over real gRPC: a client on one side, scripted workers on the other."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine.messages import Cancel, Finish, Place
from engine.types import FinishReason, SamplingParams
from protos import headrace_pb2 as pb
from router.app import RouterApp
from router.config import FrontLimits, RouterConfig
from router.descriptors import PENDING_CALLS, grpc_options
from router.front.api import ApiError, ChatMessage, Delta, Finished, GenerateCall, Started
from router.grpc.client import Client
from router.grpc.service import Service
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteText, FakeWorkers, until
from tests.secrets_of_tests import SECRETS

Body = Callable[[Client, FakeWorkers], Awaitable[None]]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all: gRPC's asyncio side does not get along with several in one process."""
    with asyncio.Runner() as one:
        yield one


@pytest.fixture
def cluster(runner: asyncio.Runner) -> Callable[..., None]:
    def run(body: Body, **config: object) -> None:
        runner.run(with_cluster(body, **config))

    return run


async def with_cluster(body: Body, **config: object) -> None:
    settings = RouterConfig(grpc_port=0, http_port=-1, **config)  # type: ignore[arg-type]
    app = RouterApp(settings, ByteText(), NullObserver(), SECRETS)
    workers = FakeWorkers()
    try:
        addresses = await app.start()
        await workers.start()
        await app.set_workers(*workers.peers)
        await until(app.hub.ready)
        async with Client(addresses.grpc) as client, asyncio.timeout(20):
            await body(client, workers)
        await until(lambda: not app.hub.core.open)
        app.hub.core.check()
    finally:
        await app.stop(0.0)
        await workers.stop()


async def ask(client: Client, call: GenerateCall) -> tuple[str, list[int], Finished]:
    text, ids = "", []
    async for event in client.agenerate(call):
        if isinstance(event, Delta):
            text += event.text
            ids += event.token_ids
        elif isinstance(event, Finished):
            return text, ids, event
    raise AssertionError("the stream ended without Finished")


def test_text_in_text_and_tokens_out(cluster: Callable[..., None]) -> None:
    """Guards the whole path: text, a chat and token ids give the worker's tokens and an account."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        prompts: list[str | list[ChatMessage] | list[int]] = [
            "hi",
            [ChatMessage("user", "hi")],
            [104, 105],
        ]
        for prompt in prompts:
            text, ids, end = await ask(client, GenerateCall(prompt=prompt))
            assert (text, ids) == ("hello world", [*b"hello world", 256])
            assert end.reason is FinishReason.STOP
            assert end.stats.decode_worker == "d0" and end.stats.migrated_blocks == 2
            assert math.isclose(sum(end.stats.stages.values()), end.e2e_s, abs_tol=1e-9)
            assert 0 < end.ttft_s <= end.e2e_s
        places = [r for r in workers.got if isinstance(r, Place)]
        assert places[0].record.tokens == [104, 105] == places[2].record.tokens
        assert places[0].prefill.name == "p0"
        assert places[0].record.seed != places[2].record.seed

    cluster(body)


def test_follow_up_turn_begins_with_the_turn_before(cluster: Callable[..., None]) -> None:
    """Guards against a chat whose next prompt loses the ids the model wrote (here: odd bytes)."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        chat = [ChatMessage("user", "one")]
        workers.answer = [0xF0, 0x9F, *b" broken"]
        text, ids, _ = await ask(client, GenerateCall(prompt=chat))
        chat += [ChatMessage("assistant", text), ChatMessage("user", "two")]
        await ask(client, GenerateCall(prompt=chat))
        first, second = [r.record for r in workers.got if isinstance(r, Place)]
        assert second.tokens[: len(first.tokens) + len(ids)] == first.tokens + ids

    cluster(body)


def test_stop_string_finishes_on_the_worker(cluster: Callable[..., None]) -> None:
    """Guards against text behind a stop string, and against a worker that goes on after it."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        workers.slow_s = 0.02
        text, ids, end = await ask(client, GenerateCall(prompt="x", stop=("wor", "zzz")))
        assert text == "hello "
        assert bytes(ids) == b"hello wor"
        assert (end.reason, end.stop_matched, end.output_tokens) == ("stop", "wor", 9)
        (finish,) = [r for r in workers.got if isinstance(r, Finish)]
        assert finish.tokens_kept == 9

    cluster(body)


def test_eight_at_once_are_queued_when_refused(cluster: Callable[..., None]) -> None:
    """Guards against refusals that fail a request, or lose its turn for ever."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        workers.refusals = 5
        answers = await asyncio.gather(
            *(ask(client, GenerateCall(prompt=f"q{i}")) for i in range(8))
        )
        assert [text for text, _, _ in answers] == ["hello world"] * 8

    cluster(body)


@pytest.mark.parametrize("hold", [True, False])
def test_cancel_and_deadline_reach_the_worker(cluster: Callable[..., None], hold: bool) -> None:
    """Guards against work that goes on for a client who left: before acceptance and after."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        workers.hold, workers.slow_s = hold, 10.0

        def places() -> list[Place]:
            return [r for r in workers.got if isinstance(r, Place)]

        def cancels() -> list[Cancel]:
            return [r for r in workers.got if isinstance(r, Cancel)]

        async with aclosing(client.agenerate(GenerateCall(prompt="x"))) as events:  # type: ignore[type-var]
            reading = asyncio.create_task(anext(events))
            await until(lambda: len(places()) == 1)
            if not hold:
                assert isinstance(await reading, Started)
            reading.cancel()
            await asyncio.wait({reading})
        await until(lambda: len(cancels()) == 1, 1.0)
        with pytest.raises(ApiError) as raised:
            await ask(client, GenerateCall(prompt="x", timeout_s=0.2))
        assert raised.value.code == "DEADLINE_EXCEEDED"
        await until(lambda: len(cancels()) == 2, 1.0)
        remaining_s = places()[1].record.remaining_s
        assert remaining_s is not None and 0 < remaining_s <= 0.2
        await client.aclose()
        disconnected = Client(client._address)
        reading = asyncio.create_task(anext(disconnected.agenerate(GenerateCall(prompt="x"))))
        await until(lambda: len(places()) == 3)
        await disconnected.aclose()
        await until(lambda: len(cancels()) == 3, 1.0)
        reading.cancel()
        await asyncio.wait({reading})

    cluster(body)


def test_a_stream_goes_on_when_its_worker_comes_back(cluster: Callable[..., None]) -> None:
    """Guards against streams that hang or fail when a worker dies, and links that never dial again."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        workers.slow_s = 0.1
        asking = asyncio.create_task(ask(client, GenerateCall(prompt="x", stop=("rld",))))
        await until(lambda: bool(workers.got))
        await asyncio.sleep(0.35)
        await workers.stop()
        workers.slow_s, workers.incarnation = 0.0, 2
        await workers.start()
        text, ids, end = await asking
        assert (text, bytes(ids), end.stop_matched) == ("hello wo", b"hello world", "rld")
        first, second = [r for r in workers.got if isinstance(r, Place)]
        history = second.record.tokens[1:]
        assert second.placement == 2 and 1 < len(history) < 11
        assert bytes(history) == b"hello world"[: len(history)]
        assert second.record.seed == first.record.seed
        assert end.output_tokens == 11
        assert math.isclose(sum(end.stats.stages.values()), end.e2e_s, abs_tol=1e-9)

    cluster(body)


def test_a_stream_whose_worker_never_comes_back_is_unavailable(
    cluster: Callable[..., None],
) -> None:
    """Guards against silence when nobody is left to go on."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        workers.slow_s = 0.1
        asking = asyncio.create_task(ask(client, GenerateCall(prompt="x")))
        await until(lambda: bool(workers.got))
        await workers.stop()
        with pytest.raises(ApiError) as raised:
            await asking
        assert raised.value.code == "UNAVAILABLE"

    cluster(body, unplaceable_s=0.3)


def test_a_full_line_is_refused_with_a_delay(cluster: Callable[..., None]) -> None:
    """Guards against an unbounded line, and against overload without a hint when to return."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        workers.hold = True
        waiting = [
            asyncio.create_task(ask(client, GenerateCall(prompt="x", max_tokens=500)))
            for _ in range(4)
        ]
        done, waiting_still = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (failed,) = done
        error = failed.exception()
        assert isinstance(error, ApiError)
        assert (error.code, error.retry_after_s) == ("RESOURCE_EXHAUSTED", 1.5)
        for task in waiting_still:
            task.cancel()
        await asyncio.wait(waiting_still)

    cluster(body, max_waiting=1, retry_after_s=1.5)


NAN = float("nan")
BAD_CALLS = [
    (GenerateCall(prompt=""), "INVALID_ARGUMENT", "prompt"),
    (GenerateCall(prompt=[]), "INVALID_ARGUMENT", "prompt"),
    (GenerateCall(prompt="x" * 600), "OUT_OF_RANGE", "prompt"),
    (GenerateCall(prompt="x" * 20_000), "OUT_OF_RANGE", "prompt"),
    (GenerateCall(prompt=[1] * 600), "OUT_OF_RANGE", "token_ids"),
    (GenerateCall(prompt=[1, 300]), "INVALID_ARGUMENT", "token_ids[1]"),
    (GenerateCall(prompt=[ChatMessage("user", "x" * 600)]), "OUT_OF_RANGE", "messages"),
    (GenerateCall(prompt=[ChatMessage("pope", "x")]), "INVALID_ARGUMENT", "messages[0].role"),
    (GenerateCall(prompt="x", model="other"), "NOT_FOUND", "model"),
    (GenerateCall(prompt="x", max_tokens=0), "INVALID_ARGUMENT", "max_tokens"),
    (GenerateCall(prompt="x", max_tokens=-1), "INVALID_ARGUMENT", "max_tokens"),
    (GenerateCall(prompt="x", max_tokens=512), "OUT_OF_RANGE", "max_tokens"),
    (GenerateCall(prompt="x", max_tokens=2**62), "INVALID_ARGUMENT", "max_tokens"),
    (GenerateCall(prompt="x", max_tokens=2, min_tokens=3), "INVALID_ARGUMENT", "min_tokens"),
    (GenerateCall(prompt="x", stop=("s",) * 10_000), "INVALID_ARGUMENT", "stop"),
    (GenerateCall(prompt="x", stop=("s" * 257,)), "INVALID_ARGUMENT", "stop[0]"),
    (GenerateCall(prompt="x", stop=("",)), "INVALID_ARGUMENT", "stop[0]"),
    (GenerateCall(prompt="x", stop_token_ids=(300,)), "INVALID_ARGUMENT", "stop_token_ids[0]"),
    *(
        (GenerateCall(prompt="x", sampling=SamplingParams(**{name: value})), code, name)
        for code in ("INVALID_ARGUMENT",)
        for name, values in {
            "temperature": (NAN, -0.1, 2.1, math.inf),
            "top_p": (NAN, 0.0, 1.1, -1.0),
            "top_k": (-1,),
            "min_p": (NAN, -0.1, 1.1),
            "repetition_penalty": (NAN, 0.0, 2.1),
            "presence_penalty": (NAN, 2.1, -2.1),
            "frequency_penalty": (NAN, 2.1, -2.1),
        }.items()
        for value in values
    ),
]


def test_bad_calls_name_their_field_and_disturb_nobody(cluster: Callable[..., None]) -> None:
    """Guards against bad input that is answered with UNKNOWN, without a name, or not at all."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        workers.slow_s = 0.02
        bystander = asyncio.create_task(ask(client, GenerateCall(prompt="bystander")))
        for call, code, field in BAD_CALLS:
            with pytest.raises(ApiError) as raised:
                await ask(client, call)
            error = raised.value
            assert (error.code, error.field) == (code, field), call
            assert error.message.startswith(field + ":")
        assert (await bystander)[0] == "hello world"
        assert sum(isinstance(r, Place) for r in workers.got) == 1

    cluster(body)


def test_bytes_that_are_no_request(cluster: Callable[..., None]) -> None:
    """Guards against gRPC's own UNKNOWN for malformed bytes, and against oversized messages."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        good = pb.GenerateRequest(prompt="abc").SerializeToString()
        for data, code, field in (
            (good.replace(b"abc", b"a\xffc"), "INVALID_ARGUMENT", "request"),
            (b"\x0a\xff\xff", "INVALID_ARGUMENT", "request"),
            (b"", "INVALID_ARGUMENT", "prompt"),
            (
                pb.GenerateRequest(prompt="x" * (4 << 20)).SerializeToString(),
                "RESOURCE_EXHAUSTED",
                None,
            ),
            (
                pb.GenerateRequest(prompt="x", timeout_s=NAN).SerializeToString(),
                "INVALID_ARGUMENT",
                "timeout_s",
            ),
        ):
            async with grpc.aio.insecure_channel(client._address) as channel:
                call = channel.unary_stream("/headrace.v1.Headrace/Generate")(data)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call.read()
                assert raised.value.code().name == code
                named = dict(raised.value.trailing_metadata()).get("headrace-field")
                assert named == field
        assert (await ask(client, GenerateCall(prompt="x")))[0] == "hello world"

    cluster(body)


def test_health_reflection_and_models(cluster: Callable[..., None]) -> None:
    """Guards against a router that calls itself healthy without workers."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        assert await asyncio.to_thread(client.models) == {"bytes": 512}
        async with grpc.aio.insecure_channel(client._address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            serving = health_pb2.HealthCheckResponse.SERVING
            async with asyncio.timeout(2):
                while (await health.Check(request)).status != serving:
                    await asyncio.sleep(0.02)
            await workers.stop()
            async with asyncio.timeout(2):
                while (await health.Check(request)).status == serving:
                    await asyncio.sleep(0.02)
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
            listing = reflection_pb2.ServerReflectionRequest(list_services="")
            async for reply in reflect.ServerReflectionInfo(iter([listing])):
                names = {service.name for service in reply.list_services_response.service}
                assert "headrace.v1.Headrace" in names
                break
        with pytest.raises(ApiError) as raised:
            await ask(client, GenerateCall(prompt="x"))
        assert raised.value.code == "UNAVAILABLE"

    cluster(body, unplaceable_s=0.3)


def test_synchronous_client(cluster: Callable[..., None]) -> None:
    """Guards the client that command-line tools use."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        def talk() -> str:
            with Client(client._address) as plain:
                events = list(plain.generate(GenerateCall(prompt="x")))
                assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
                return "".join(e.text for e in events if isinstance(e, Delta))

        assert await asyncio.to_thread(talk) == "hello world"

    cluster(body)


def test_calls_that_come_while_the_loop_is_busy_are_answered(runner: asyncio.Runner) -> None:
    """Guards thousands of streams that are opened at once: gRPC's library cancels calls, one here and one there, once a
    thousand wait to be taken in. A connection for each has room for that many."""
    calls = 2 * PENDING_CALLS

    def ask_all(port: int) -> list[grpc.StatusCode]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            asked = [check.future(health_pb2.HealthCheckRequest(), timeout=60.0) for _ in range(calls)]
            return [one.code() for one in asked]

    async def body() -> None:
        service = Service(cast(Any, None), lambda: True)
        port = await service.start("127.0.0.1", 0, 1 << 20, grpc_options(FrontLimits(), calls))
        await service.update_health()
        try:
            asking = asyncio.create_task(asyncio.to_thread(ask_all, port))
            await asyncio.sleep(0.05)
            time.sleep(1.5)  # the loop hears nobody meanwhile
            assert await asking == [grpc.StatusCode.OK] * calls
        finally:
            await service.stop(0.0)

    runner.run(body())

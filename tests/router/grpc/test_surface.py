"""What a public gRPC server is expected to do beside generating: tokens, models, rich errors, labels, keepalive."""

import asyncio
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from engine.messages import Cancel, Place
from protos import headrace_pb2 as pb
from protos.headrace_pb2_grpc import HeadraceStub
from router.config import FrontLimits
from router.front.api import ApiError
from router.grpc.client import Client
from router.grpc.statuses import DETAILS_CHARS, details, trailing_metadata
from tests.router.cut_proxy import CutProxy
from tests.router.fake_cluster import FakeWorkers, until
from tests.router.grpc.test_service import Body, with_cluster


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


@pytest.fixture
def cluster(runner: asyncio.Runner) -> Callable[..., None]:
    def run(body: Body, **config: object) -> None:
        runner.run(with_cluster(body, **config))

    return run


async def refused(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (call.read() if hasattr(call, "read") else call)
    return raised.value


def told(error: grpc.aio.AioRpcError) -> Status:
    return Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])


def test_tokens_and_models(cluster: Callable[..., None]) -> None:
    """Guards the calls beside Generate: what Tokenize counts is what a worker gets, and Detokenize undoes it."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        async with grpc.aio.insecure_channel(client._address) as channel:
            stub = HeadraceStub(channel)
            for asked in (
                {"prompt": "héllo"},
                {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])},
            ):
                found = await stub.Tokenize(pb.TokenizeRequest(return_token_strs=True, **asked))  # type: ignore[arg-type]
                async for _ in stub.Generate(pb.GenerateRequest(max_tokens=1, **asked)):  # type: ignore[arg-type]
                    pass
                place = [r for r in workers.got if isinstance(r, Place)][-1]
                assert list(found.token_ids) == place.record.tokens
                assert found.context_tokens == 512 and len(found.token_strs) == len(found.token_ids)
                back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=found.token_ids))
                assert back.text == "".join(found.token_strs)
            listed = (await stub.ListModels(pb.ListModelsRequest())).models
            one = (await stub.GetModel(pb.GetModelRequest(name="bytes"))).model
            assert [one] == list(listed)
            assert (one.context_tokens, one.vocabulary_tokens, list(one.stop_token_ids)) == (512, 300, [256])
            for call, code, field in (
                (stub.GetModel(pb.GetModelRequest(name="other")), "NOT_FOUND", "name"),
                (stub.Tokenize(pb.TokenizeRequest()), "INVALID_ARGUMENT", "prompt"),
                (stub.Tokenize(pb.TokenizeRequest(prompt="x" * 5000)), "OUT_OF_RANGE", "prompt"),
                (stub.Detokenize(pb.DetokenizeRequest(token_ids=[3, 300])), "INVALID_ARGUMENT", "token_ids[1]"),
            ):
                error = await refused(call)
                assert (error.code().name, dict(error.trailing_metadata())["headrace-field"]) == (code, field)

    cluster(body)


def test_errors_are_rich(cluster: Callable[..., None]) -> None:
    """Guards clients of richer libraries: the field at fault, when to come back, and the caller's own label."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        async with grpc.aio.insecure_channel(client._address) as channel:
            stub = HeadraceStub(channel)
            bad = stub.Generate(pb.GenerateRequest(prompt="x", max_tokens=0), metadata=(("x-request-id", "job 7"),))
            status = told(await refused(bad))
            assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            violation, info = BadRequest(), RequestInfo()
            assert status.details[0].Unpack(violation) and status.details[1].Unpack(info)
            (one,) = violation.field_violations
            assert one.field == "max_tokens" and not one.description.startswith("max_tokens")
            assert info.request_id == "job 7"
            workers.hold = True
            calls = [stub.Generate(pb.GenerateRequest(prompt="x", max_tokens=500)) for _ in range(4)]
            reading = {asyncio.create_task(call.read()): call for call in calls}
            (late,), _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            failed, delay = late.exception(), RetryInfo()
            assert isinstance(failed, grpc.aio.AioRpcError)
            status = told(failed)
            assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert status.details[0].Unpack(delay) and delay.retry_delay.ToMilliseconds() == 1500
            for call in calls:
                call.cancel()
            await asyncio.wait(reading)

    cluster(body, max_waiting=1, retry_after_s=1.5)


def test_details_stay_small() -> None:
    """Guards the status itself: a client drops an answer whose headers are over 8 KiB, and reads no code at all."""
    error = ApiError("INVALID_ARGUMENT", "stop: " + "é" * 10_000, "stop", 2.0)
    assert len(details(error).message) == DETAILS_CHARS
    sizes = [len(key) + len(value) for key, value in trailing_metadata(error, "x" * 128)]
    assert sum(sizes) < 6 * 1024


def test_messages_have_a_largest_size(cluster: Callable[..., None]) -> None:
    """Guards a router's memory against one message: it is refused by its length, unread, and the connection goes on."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        async with grpc.aio.insecure_channel(client._address) as channel:
            stub = HeadraceStub(channel)
            for size, code in ((8_192, grpc.StatusCode.RESOURCE_EXHAUSTED), (10, None)):
                call = stub.Tokenize(pb.TokenizeRequest(prompt="x" * size))
                if code is None:
                    assert len((await call).token_ids) == size
                else:
                    assert (await refused(call)).code() is code
        assert not workers.got

    cluster(body, max_message_bytes=4_096)


@pytest.mark.parametrize("label", ["", "job 7"])
def test_requests_have_a_name(cluster: Callable[..., None], label: str) -> None:
    """Guards whoever looks for a request in two logs: its label comes back, or else the name that the server gave."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        async with grpc.aio.insecure_channel(client._address) as channel:
            stub = HeadraceStub(channel)
            call = stub.Generate(pb.GenerateRequest(prompt="x"), metadata=(("x-request-id", label),) if label else ())
            started = (await call.read()).started
            assert dict(await call.initial_metadata())["x-request-id"] == (label or started.request_id)
            call.cancel()

    cluster(body)


def test_a_deadline_is_the_servers_too(cluster: Callable[..., None]) -> None:
    """Guards against work behind a deadline that only the client watches."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        workers.slow_s = 5.0
        async with grpc.aio.insecure_channel(client._address) as channel:
            call = HeadraceStub(channel).Generate(pb.GenerateRequest(prompt="x", timeout_s=30.0), timeout=0.5)
            await until(lambda: any(isinstance(r, Place) for r in workers.got))
            (place,) = [r for r in workers.got if isinstance(r, Place)]
            assert place.record.remaining_s is not None and place.record.remaining_s <= 0.5
            await until(lambda: any(isinstance(r, Cancel) for r in workers.got))
            call.cancel()

    cluster(body)


def test_a_trace_goes_on(cluster: Callable[..., None]) -> None:
    """Guards the W3C context: workers write their part under the caller's trace, and nonsense begins none."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def body(client: Client, workers: FakeWorkers) -> None:
        async with grpc.aio.insecure_channel(client._address) as channel:
            for sent in (trace, "no trace"):
                async for _ in HeadraceStub(channel).Generate(
                    pb.GenerateRequest(prompt="x", max_tokens=1), metadata=(("traceparent", sent),)
                ):
                    pass
        places = [r for r in workers.got if isinstance(r, Place)]
        assert [place.record.traceparent.split("-")[1:2] for place in places] == [[trace.split("-")[1]], []]

    cluster(body)


def test_a_client_that_vanished_is_noticed(cluster: Callable[..., None]) -> None:
    """Guards a worker's memory against clients behind a cable that was pulled: nothing tells of them but silence."""

    async def body(client: Client, workers: FakeWorkers) -> None:
        workers.slow_s = 30.0
        proxy = CutProxy(client._address)
        channel = grpc.aio.insecure_channel(await proxy.start())
        try:
            call = HeadraceStub(channel).Generate(pb.GenerateRequest(prompt="x"))
            assert (await call.read()).WhichOneof("event") == "started"
            proxy.swallow()
            await asyncio.sleep(0.05)
            assert not any(isinstance(r, Cancel) for r in workers.got)
            await until(lambda: any(isinstance(r, Cancel) for r in workers.got), 5.0)
            call.cancel()
        finally:
            await channel.close()
            await proxy.stop()

    cluster(body, limits=FrontLimits(keepalive_s=0.3))

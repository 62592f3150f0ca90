"""The calls that one address may have open on the gRPC port, over real connections."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine.messages import Place
from router.app import RouterApp
from router.config import FrontLimits, RouterConfig
from router.front.api import ApiError, GenerateCall
from router.grpc.calls import address_of
from router.grpc.client import Client
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteText, FakeWorkers, until
from tests.secrets_of_tests import SECRETS


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:4711", "ipv4:10.0.0.1"),
        ("ipv6:[::1]:4711", "ipv6:[::1]"),
        ("ipv6:%5B::1%5D:4711", "ipv6:%5B::1%5D"),
        ("unix:", "unix:"),
    ],
)
def test_an_address_is_a_peer_without_its_port(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_one_address_has_so_many_calls_open() -> None:
    """Guards the port against an address that opens calls without end, on as many connections as it likes: watches of
    health were free, and each kept its connection for ever."""

    async def run() -> None:
        limits = FrontLimits(calls_per_address=3)
        config = RouterConfig(grpc_port=0, http_port=-1, limits=limits)
        app, workers = RouterApp(config, ByteText(), NullObserver(), SECRETS), FakeWorkers()
        workers.answer = [*b"a" * 5000]
        try:
            address = (await app.start()).grpc
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(app.hub.ready)
            async with Client(address) as client, asyncio.timeout(30):
                await check(address, client, workers)
        finally:
            await app.stop(0.0)
            await workers.stop()

    async def check(address: str, client: Client, workers: FakeWorkers) -> None:
        channels = [grpc.aio.insecure_channel(address) for _ in range(4)]
        watches = []
        for channel in channels[:3]:
            watches.append(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
            assert (await watches[-1].read()).status == health_pb2.HealthCheckResponse.SERVING
        # Of any kind, on any connection.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(channels[3]).Check(health_pb2.HealthCheckRequest())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        asked = reflection_pb2_grpc.ServerReflectionStub(channels[3]).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        with pytest.raises(grpc.aio.AioRpcError, match="3 calls of your address"):
            await asked.read()
        with pytest.raises(ApiError) as full:
            async for _ in client.agenerate(GenerateCall(prompt="x", max_tokens=4)):
                pass
        assert (full.value.code, full.value.retry_after_s) == ("RESOURCE_EXHAUSTED", 1.0)
        assert not [one for one in workers.got if isinstance(one, Place)]
        watches[0].cancel()

        async def answered() -> bool:
            try:
                await health_pb2_grpc.HealthStub(channels[3]).Check(health_pb2.HealthCheckRequest())
            except grpc.aio.AioRpcError:
                return False
            return True

        while not await answered():
            await asyncio.sleep(0.01)
        # One that its client has left counts no more, nor does one that has ended.
        for _ in range(5):
            events = client.agenerate(GenerateCall(prompt="x", max_tokens=4))
            while True:
                try:
                    await anext(events)
                    break
                except ApiError:  # the call before it ends at the server a moment after its client has left
                    events = client.agenerate(GenerateCall(prompt="x", max_tokens=4))
                    await asyncio.sleep(0.01)
            await events.aclose()
        for channel in channels:
            await channel.close()

    asyncio.run(run())

"""Workers that stop without dying, over real gRPC: noticed by their silence, refused when they come back."""

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from engine.messages import Place
from router.app import RouterApp
from router.config import RouterConfig
from router.front.api import Delta, Finished, GenerateCall
from router.grpc.client import Client
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteText, FakeWorkers, until
from tests.router.worker_process import WorkerProcess
from tests.secrets_of_tests import SECRETS

SLOW_S = 0.4
NOTICED_S = 2.5
"""Keepalive after one second, its answer missed for another, and the time for a token."""


class Counting(NullObserver):
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def dropped(self, kind: str) -> None:
        self.kinds.append(kind)


class Reader:
    """One client's stream, with the moment of every token."""

    def __init__(self, client: Client, call: GenerateCall) -> None:
        self.ids: list[int] = []
        self.at_s: list[float] = []
        self.end: Finished | None = None
        self.task = asyncio.create_task(self._read(client, call))

    async def _read(self, client: Client, call: GenerateCall) -> None:
        async for event in client.agenerate(call):
            if isinstance(event, Delta):
                self.ids += event.token_ids
                self.at_s.append(time.monotonic())
            elif isinstance(event, Finished):
                self.end = event


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


def test_a_frozen_worker_is_left_and_its_ghost_is_not_believed(runner: asyncio.Runner) -> None:
    """Guards silence: keepalive defaults take a minute. And the tokens of a zombie that wakes up in a new stream."""
    runner.run(_frozen(lambda process: process.freeze()))


async def _frozen(harm: Callable[[WorkerProcess], None]) -> None:
    observer = Counting()
    app = RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), observer, SECRETS)
    process = WorkerProcess("d0", SLOW_S)
    workers = FakeWorkers("d1")
    workers.slow_s = SLOW_S / 4
    try:
        addresses = await app.start()
        await workers.start()
        prefill, decode = workers.peers
        await app.set_workers(prefill, [process.peer])
        await until(app.hub.ready)
        async with Client(addresses.grpc) as client, asyncio.timeout(20):
            reader = Reader(client, GenerateCall(prompt="x"))
            await until(lambda: len(reader.ids) == 3)
            await app.set_workers(prefill, [process.peer, *decode])
            await until(lambda: len(app.hub.core.registry.role("decode")) == 2)
            harm(process)
            harmed_s = time.monotonic()
            had = len(reader.ids)
            await until(lambda: len(reader.ids) > had + 1)
            assert process.state == "T", "the worker was not frozen all along"
            assert reader.at_s[had + 1] - harmed_s < NOTICED_S
            process.thaw()
            await reader.task
            assert bytes(reader.ids[:-1]) == b"hello world"
            assert reader.end is not None and reader.end.stats.decode_worker == "d1"
            assert reader.end.stats.stages["unattributed"] > 1.0, "the frozen worker told its time"
            (place,) = [r for r in workers.got if isinstance(r, Place)]
            history = place.record.tokens[place.record.prompt_tokens :]
            assert place.placement == 2 and bytes(history) == b"hello world"[: len(history)]
            await until(lambda: "stale" in observer.kinds)
            await until(lambda: len(app.hub.core.registry.role("decode")) == 2)
        await until(lambda: not app.hub.core.open)
        app.hub.core.check()
    finally:
        process.kill()
        await app.stop(0.0)
        await workers.stop()


def test_a_worker_in_a_long_step_is_not_taken_for_dead(runner: asyncio.Runner) -> None:
    """Guards against a stream cut because an engine reports nothing for some seconds: its transport answers."""

    async def body() -> None:
        app = RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS)
        workers = FakeWorkers()
        try:
            addresses = await app.start()
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(app.hub.ready)
            async with Client(addresses.grpc) as client, asyncio.timeout(20):
                reader = Reader(client, GenerateCall(prompt="x", max_tokens=3))
                workers.slow_s, workers.mute_s = 0.0, 3.5
                await reader.task
                assert len(reader.ids) == 3 and reader.end is not None
                assert reader.end.e2e_s > 3.5, "there was no long step"
                assert len([r for r in workers.got if isinstance(r, Place)]) == 1
        finally:
            await app.stop(0.0)
            await workers.stop()

    runner.run(body())

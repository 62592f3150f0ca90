"""What one client costs the others: how long a slow one, or a long prompt, holds the router's loop at a time.

The loop's callbacks are timed by the processor time of its thread, so that it does not matter who else uses the cores.
Seconds of the wall are `python -m benchmarks.front --disturb slow` and `--disturb prompt`.
"""

import asyncio
import gc
import re
import socket
import time
from asyncio import events
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest

from engine.messages import Place
from router.app import RouterAddresses, RouterApp
from router.config import RouterConfig
from router.front.api import Delta, GenerateCall
from router.front.stream import SampleStream
from router.grpc.client import Client
from router.status.observer import NullObserver
from tests.router import fake_cluster
from tests.router.fake_cluster import ByteText, FakeWorkers, until
from tests.secrets_of_tests import SECRETS

TURNS = 600_000
"""As long as so many turns of a generator take may a callback hold the loop: about 12 ms of a core of its own, and more
where another test has the core's other half, as much as for everything else."""
LONG_PROMPT = "long prompt " * 2700
ANSWER = b"0123456789abcdef" * 1000
BLOCKS = 1 << 16
ROUNDS = 4


@contextmanager
def timed_callbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, str]]]:
    """Collect the processor seconds of every callback of the loop, and what it was; the garbage collector is off."""
    took: list[tuple[float, str]] = []
    run = events.Handle._run

    def timed(handle: events.Handle) -> None:
        begin_s = time.thread_time()
        run(handle)
        # What leaves the block below is the test's own.
        if events.Handle._run is timed:
            took.append((time.thread_time() - begin_s, repr(handle)))

    with monkeypatch.context() as patched:
        patched.setattr(events.Handle, "_run", timed)
        gc.collect()
        gc.disable()
        try:
            yield took
        finally:
            gc.enable()


def read_all(link: socket.socket) -> bytes:
    """Read a stream to its end."""
    link.setblocking(True)
    got = bytearray()
    while b"[DONE]" not in got[-64:]:
        got += link.recv(65536)
    return bytes(got)


def bound_s() -> float:
    """Return the processor seconds of so many turns, now."""
    begin_s = time.thread_time()
    sum(turn for turn in range(TURNS))
    return time.thread_time() - begin_s


async def least_held(rounds: Sequence[Callable[[], Awaitable[list[tuple[float, str]]]]]) -> None:
    """Raise AssertionError where every round has a callback that holds the loop too long. The first one imports what
    the others have, and a processor whose other half is busy is half as fast."""
    worst = []
    for one in rounds:
        before_s = bound_s()
        worst.append((max(await one()), bounds := (before_s, bound_s())))
        if worst[-1][0][0] < max(bounds):
            return
    raise AssertionError(f"the loop was held: {worst}")


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give both workers room for a long prompt."""
    info = fake_cluster.worker_info
    monkeypatch.setattr(
        fake_cluster, "worker_info", lambda name, role, life, *_, **more: info(name, role, life, BLOCKS, **more)
    )


Body = Callable[[RouterAddresses, FakeWorkers, RouterApp], Awaitable[None]]


def with_router(body: Body, answer: bytes) -> None:
    async def run() -> None:
        settings = RouterConfig(grpc_port=0, http_port=0, default_max_tokens=len(answer) + 1)
        text = ByteText()
        text.context_tokens = 1 << 20
        app, workers = RouterApp(settings, text, NullObserver(), SECRETS), FakeWorkers()
        workers.answer, workers.blocks = list(answer), BLOCKS
        try:
            addresses = await app.start()
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(app.hub.ready)
            async with asyncio.timeout(60):
                await body(addresses, workers, app)
        finally:
            await app.stop(0.0)
            await workers.stop()

    asyncio.run(run())


def test_a_slow_client_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the gaps between the tokens of all others: what waits for it is joined in parts that are soon written,
    and while it takes nothing nothing is done for it."""

    async def ask(http: str, workers: FakeWorkers, app: RouterApp) -> list[tuple[float, str]]:
        host, _, port = http.rpartition(":")
        data = msgspec.json.encode({"prompt": "x", "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n\r\n"
        workers.got.clear()
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            link.connect((host, int(port)))
            with timed_callbacks(monkeypatch) as took:
                link.sendall(head.encode() + data)
                await until(lambda: bool(workers.got) and not app.hub.core.open, 40.0)
            most = max(one.untaken for one in gc.get_objects() if type(one) is SampleStream)
            assert most > len(ANSWER) // 4, "it was not slow"
            with timed_callbacks(monkeypatch) as took_then:
                got = await asyncio.to_thread(read_all, link)
        assert b"".join(re.findall(rb'"text":"([^"]*)"', got)) == ANSWER
        return took + took_then

    async def body(addresses: RouterAddresses, workers: FakeWorkers, app: RouterApp) -> None:
        await least_held([partial(ask, addresses.http, workers, app)] * ROUNDS)

    with_router(body, ANSWER)


def test_a_long_prompt_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the same against a prompt of 32,400 tokens, from its bytes to the frame that places it."""

    async def ask(client: Client, workers: FakeWorkers, at: int) -> list[tuple[float, str]]:
        workers.got.clear()
        with timed_callbacks(monkeypatch) as took:
            events = [event async for event in client.agenerate(GenerateCall(prompt=f"{at}" + LONG_PROMPT))]
        assert any(isinstance(event, Delta) for event in events)
        (place,) = [record for record in workers.got if isinstance(record, Place)]
        assert len(place.record.tokens) > len(LONG_PROMPT), "it was not long"
        return took

    async def body(addresses: RouterAddresses, workers: FakeWorkers, app: RouterApp) -> None:
        async with Client(addresses.grpc) as client:
            await least_held([partial(ask, client, workers, at) for at in range(ROUNDS)])

    with_router(body, b"short")

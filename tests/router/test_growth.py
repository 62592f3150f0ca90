"""A router that serves thousands of requests, in a process of its own: what it remembers of them has a bound."""

import asyncio
import ctypes
import gc
import os
from collections import Counter
from pathlib import Path

import pytest
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from router.app import RouterApp
from router.config import RouterConfig
from router.front.api import ApiError
from router.front.outlet import Outlet
from router.front.samples import Samples, SamplesReader
from router.front.stream import Reader, SampleStream
from router.http.protocol import FrontProtocol
from router.server import RouterServer
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteText, FakeWorkers, until
from tests.router.growth import ALLOWED_BYTES, FRONTS, KINDS, anonymous_bytes, grown_bytes, measure
from tests.secrets_of_tests import SECRETS

OF_A_REQUEST = {
    "grpc": (Reader, Samples, SamplesReader, SampleStream),  # its library keeps the errors itself
    "http": (
        ApiError, FrontProtocol, Outlet, Reader, RequestResponseCycle, Samples, SamplesReader, SampleStream,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("front", FRONTS)
def test_an_answer_is_freed_without_the_collector(front: str, kind: str) -> None:
    """Guards against objects that lead back to themselves: they stay until the collector looks at everything, which is
    hundreds of requests later, and by then the heap is in pieces that nobody gets back."""

    def left() -> Counter[str]:
        return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, OF_A_REQUEST[front]))

    async def run() -> None:
        app = RouterApp(
            RouterConfig(grpc_port=0, http_port=0, resume_window_s=0.2), ByteText(), NullObserver(), SECRETS
        )
        workers = FakeWorkers()
        workers.answer = [*b"freed"]
        addresses = await app.start()
        try:
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(app.ready)
            address = addresses.http if front == "http" else addresses.grpc
            await FRONTS[front](address, iter(range(5)), {kind: 1})
            async with asyncio.timeout(10.0):
                while left():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"left behind: {left()}") from None
        finally:
            await app.stop(0.0)
            await workers.stop()

    gc.collect()
    gc.freeze()  # what other tests have left behind is not looked at
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_router_gives_back_what_loading_took() -> None:
    """Guards 40 MB of each router: a tokenizer is read by way of several times its size, and what is freed of that in
    the midst of the heap stays the process's until it is asked for."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    parts = [libc.malloc(1024) for _ in range(1 << 16)]
    for part in parts:
        ctypes.memset(part, 1, 1024)
    for part in parts[:-1]:
        libc.free(part)
    before_bytes = anonymous_bytes(os.getpid())
    server = RouterServer(RouterConfig(grpc_port=0, http_port=0), "", SECRETS, text=ByteText())
    server.start()
    try:
        assert before_bytes - anonymous_bytes(os.getpid()) > 32 << 20
    finally:
        server.stop(0.0)
        libc.free(parts[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("front", "after"), [("grpc", 2000), ("http", 3000)])
def test_a_router_grows_no_more_once_it_has_served_some_thousand_requests(
    demo_model: Path, front: str, after: int
) -> None:
    """Guards against 3 to 5 MB more with every thousand requests: each finished chat as a list of numbers and its text,
    each ended request with every gap between two of its tokens."""
    found = measure(after + 2000, 1000, demo_model, front=front)
    assert [one.requests for one in found] == list(range(1000, after + 2001, 1000))
    assert grown_bytes(found, after) < ALLOWED_BYTES, found

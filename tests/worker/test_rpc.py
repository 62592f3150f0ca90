"""Streams of frames between processes, one of which is killed."""

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from worker.rpc import RpcLoop, Send

STREAM = "/headrace.test/Stream"
SOON_S = 10.0

SERVER = """
import sys, time
from worker.rpc import RpcLoop

class Echo:
    def __init__(self, send): self.frame = send
    def closed(self, why): pass

print(RpcLoop("server").start("127.0.0.1", 0, {sys.argv[1]: Echo}), flush=True)
time.sleep(60)
"""


class Client:
    def __init__(self, send: Send) -> None:
        self.send = send
        self.echoed, self.ended = threading.Event(), threading.Event()

    def frame(self, data: bytes) -> None:
        self.echoed.set()

    def closed(self, why: str) -> None:
        self.ended.set()


@pytest.fixture
def loop() -> Iterator[RpcLoop]:
    loop = RpcLoop("client")
    loop.start("127.0.0.1", 0, {})
    yield loop
    loop.stop()


def test_a_stream_that_the_other_end_broke_leaves_no_task(
    loop: RpcLoop, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards the log of a worker whose peer was killed against "Task was destroyed but it is pending": gRPC ends a
    task that it feeds a stream with only where this side has cancelled the stream."""
    server = subprocess.Popen([sys.executable, "-c", SERVER, STREAM], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        before = _tasks(loop)
        clients: list[Client] = []

        def accept(send: Send) -> Client:
            clients.append(Client(send))
            return clients[-1]

        loop.connect(f"127.0.0.1:{port}", STREAM, accept)
        loop.connect("127.0.0.1:1", STREAM, accept)
        assert loop.call(_until(lambda: len(clients) == 2))
        for client in clients:
            client.send(b"frame")
        assert clients[0].echoed.wait(SOON_S), "there is a stream to break"
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert all(client.ended.wait(SOON_S) for client in clients)
    assert loop.call(_until(lambda: len(asyncio.all_tasks()) == before))
    with caplog.at_level(logging.ERROR, "asyncio"):
        clients.clear()
        gc.collect()
    assert not caplog.records


def _tasks(loop: RpcLoop) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return int(loop.call(count()))


async def _until(is_so: Callable[[], bool]) -> bool:
    for _ in range(round(SOON_S / 0.01)):
        if is_so():
            return True
        await asyncio.sleep(0.01)
    return False

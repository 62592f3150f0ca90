"""Streams of frames between processes: strangers, one that is killed, and those that take nothing."""

import asyncio
import gc
import logging
import marshal
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import msgspec
import pytest

import worker.rpc
from engine.handshake import Dialer, Keyring, Party
from engine.messages import FRAME_BYTES, Claim, encode, joined
from engine.types import Incarnation
from tests.secrets_of_tests import SECRETS
from worker.rpc import RpcLoop, Send, ServedStream

STREAM = "/headrace.test/Stream"
HERE, THERE = Party("router", "client", Incarnation(1)), Party("prefill", "server", Incarnation(2))
SOON_S = 10.0

SERVER = """
import sys, time
from tests.worker.test_rpc import SECRETS, THERE, Echo, RpcLoop, ServedStream

served = {sys.argv[1]: ServedStream(frozenset({"router"}), Echo)}
print(RpcLoop("server", THERE, SECRETS).start("127.0.0.1", 0, served), flush=True)
time.sleep(60)
"""


class Echo:
    """Says back what it hears."""

    unread_bytes = 0

    def __init__(self, send: Send, party: Party) -> None:
        self._send = send
        self.frame: Callable[[bytes], None] = self._echo
        self.party = party
        self.heard: list[bytes] = []
        self.why: list[str] = []

    def _echo(self, data: bytes) -> None:
        self.heard.append(data)
        self._send(data)

    def closed(self, why: str) -> None:
        self.why.append(why)


class Client:
    unread_bytes = 0

    def __init__(self, send: Send) -> None:
        self.send = send
        self.peer: Party | None = None
        self.heard: list[bytes] = []
        self.why = ""
        self.echoed, self.ended = threading.Event(), threading.Event()

    def proven(self, peer: Party) -> None:
        self.peer = peer

    def frame(self, data: bytes) -> None:
        self.heard.append(data)
        self.echoed.set()

    def closed(self, why: str) -> None:
        self.why = why
        self.ended.set()


@pytest.fixture
def loop() -> Iterator[RpcLoop]:
    loop = RpcLoop("client", HERE, SECRETS)
    loop.start("127.0.0.1", 0, {})
    yield loop
    loop.stop()


class Server:
    """Serves echoes; `sessions` are those that were accepted."""

    def __init__(self) -> None:
        self.sessions: list[Echo] = []
        self.loop = RpcLoop("server", THERE, SECRETS)
        port = self.loop.start("127.0.0.1", 0, {STREAM: ServedStream(frozenset({"router"}), self._accept)})
        self.address = f"127.0.0.1:{port}"

    def _accept(self, send: Send, party: Party) -> Echo:
        self.sessions.append(Echo(send, party))
        return self.sessions[-1]


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.loop.stop()


def dial(loop: RpcLoop, address: str) -> Client:
    clients: list[Client] = []

    def open_session(send: Send) -> Client:
        clients.append(Client(send))
        return clients[-1]

    loop.connect(address, STREAM, open_session)
    assert loop.call(_until(lambda: bool(clients)))
    return clients[0]


def test_both_ends_of_a_stream_know_each_other(loop: RpcLoop, server: Server) -> None:
    client = dial(loop, server.address)
    client.send(b"frame")
    assert client.echoed.wait(SOON_S) and client.heard == [b"frame"]
    assert client.peer == THERE and server.sessions[0].party == HERE


@pytest.mark.parametrize("wrong", ["secret", "role"])
def test_a_stranger_opens_no_stream(server: Server, wrong: str) -> None:
    """Guards all that a worker tells its routers and readers: it was told to whoever opened a connection."""
    me = HERE if wrong == "secret" else msgspec.structs.replace(HERE, role="decode")
    loop = RpcLoop("stranger", me, Keyring((b"x" * 32,)) if wrong == "secret" else SECRETS)
    loop.start("127.0.0.1", 0, {})
    try:
        client = dial(loop, server.address)
        client.send(b"frame")
        assert client.ended.wait(SOON_S)
        assert not server.sessions and not client.heard and client.peer is None
        assert ("secret" if wrong == "secret" else "no business here") in client.why
    finally:
        loop.stop()


def test_one_that_proves_nothing_hears_nothing_and_is_turned_away(
    loop: RpcLoop, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a worker against connections that are only held: the oldest leaves for a newer one, and all do in time."""
    monkeypatch.setattr(worker.rpc, "MAX_STRANGERS", 2)
    with grpc.insecure_channel(server.address) as channel:
        held = threading.Event()

        def nothing() -> Iterator[bytes]:
            held.wait(SOON_S)
            yield from ()

        silent = [channel.stream_stream(STREAM)(nothing()) for _ in range(3)]
        with pytest.raises(grpc.RpcError) as turned:
            next(iter(silent[0]))
        assert turned.value.code() is not grpc.StatusCode.OK
        client = dial(loop, server.address)
        client.send(b"frame")
        assert client.echoed.wait(SOON_S), "who has the secret is kept out by those who have not"
        held.set()
        for one in silent:
            one.cancel()
    assert len(server.sessions) == 1


def test_one_that_does_not_read_our_answer_is_turned_away_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against streams without number, held by one connection that lets nothing through: what waits there is our
    own answer."""
    monkeypatch.setattr(worker.rpc, "HANDSHAKE_S", 0.3)
    before = _tasks(server.loop)
    with closing(socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), SOON_S)) as sock:
        # HTTP/2 by hand: a window of 0 bytes for each stream, then streams that begin with a right greeting.
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _h2(4, 0, 0, struct.pack(">HI", 4, 0)))
        greeting = Dialer(SECRETS, STREAM, HERE, bytes(32)).greet()
        for number in range(1, 9, 2):
            sock.sendall(_h2(1, 4, number, _headers(STREAM)))
            sock.sendall(_h2(0, 0, number, b"\0" + struct.pack(">I", len(greeting)) + greeting))
        assert server.loop.call(_until(lambda: len(server.loop._strangers) == 4)), "they are streams"
        assert server.loop.call(_until(lambda: not server.loop._strangers))
        assert server.loop.call(_until(lambda: len(asyncio.all_tasks()) <= before + 3))
    assert not server.sessions


def _h2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _headers(path: str) -> bytes:
    """Return the head of a gRPC call, no name of which is compressed."""
    head = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers",
            "content-type": "application/grpc"}  # fmt: skip
    words = [part for pair in head.items() for part in pair]
    return b"".join(
        (b"\0" if at % 2 == 0 else b"") + bytes([len(word)]) + word.encode() for at, word in enumerate(words)
    )


def test_frames_that_wait_together_leave_as_one(loop: RpcLoop, server: Server) -> None:
    """Guards a router's time: each frame that it hears costs as much as a dozen records. One that would be larger than
    a frame should be leaves alone, and the end behind them all."""
    frames = [encode([Claim(bytes([at]))]) for at in range(3)]
    large = encode([Claim(bytes(FRAME_BYTES))])
    made: list[Client] = []

    def open_session(send: Send) -> Client:
        made.append(Client(send))
        for data in (*frames, large, frames[0], None):  # they wait until the other end has proven itself
            send(data)
        return made[0]

    loop.connect(server.address, STREAM, open_session)
    assert loop.call(_until(lambda: bool(made))) and made[0].ended.wait(SOON_S)
    assert server.sessions[0].heard == [joined(frames), large, frames[0]]


def test_frames_that_are_no_lists_of_messagepack_leave_one_by_one(loop: RpcLoop, server: Server) -> None:
    """Guards a machine without msgspec: what stands in for it there writes other bytes, which nobody can join."""
    frames = [marshal.dumps(["a record", at]) for at in range(3)]
    made: list[Client] = []

    def open_session(send: Send) -> Client:
        made.append(Client(send))
        for data in (*frames, None):
            send(data)
        return made[0]

    loop.connect(server.address, STREAM, open_session)
    assert loop.call(_until(lambda: bool(made))) and made[0].ended.wait(SOON_S)
    assert server.sessions[0].heard == frames


def test_a_stream_is_not_read_while_its_engine_has_enough_to_hear(loop: RpcLoop, server: Server) -> None:
    """Guards memory: what a peer sends faster than it is heard waits with the peer."""
    client = dial(loop, server.address)
    client.send(b"first")
    assert client.echoed.wait(SOON_S)
    echo = server.sessions[0]
    heard: list[bytes] = []
    echo.frame = lambda data: heard.append(data or b"")
    echo.unread_bytes = worker.rpc.MAX_UNREAD_BYTES + 1
    for _ in range(64):
        client.send(bytes(1 << 20))
    assert loop.call(_until(lambda: bool(heard)))
    threading.Event().wait(0.3)
    assert len(heard) == 1
    echo.unread_bytes = 0
    assert loop.call(_until(lambda: len(heard) == 64))


def test_a_stream_that_takes_nothing_is_ended(loop: RpcLoop, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.rpc, "MAX_UNSENT_BYTES", 32 << 20)
    client = dial(loop, server.address)
    client.send(b"first")
    assert client.echoed.wait(SOON_S)
    echo = server.sessions[0]
    echo.unread_bytes = worker.rpc.MAX_UNREAD_BYTES + 1
    for _ in range(64):
        client.send(bytes(1 << 20))
    assert client.ended.wait(SOON_S) and server.loop.call(_until(lambda: bool(echo.why)))


def test_a_frame_beyond_all_bounds_costs_its_stream_alone(loop: RpcLoop, server: Server) -> None:
    client, other = dial(loop, server.address), dial(loop, server.address)
    client.send(bytes(worker.rpc.MAX_FRAME_BYTES + 1))
    assert client.ended.wait(SOON_S)
    other.send(b"frame")
    assert other.echoed.wait(SOON_S)


def test_a_stream_that_the_other_end_broke_leaves_no_task(loop: RpcLoop, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the log of a worker whose peer was killed against "Task was destroyed but it is pending": gRPC ends a
    task that it feeds a stream with only where this side has cancelled the stream."""
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, STREAM], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        before = _tasks(loop)
        clients = [dial(loop, f"127.0.0.1:{port}"), dial(loop, "127.0.0.1:1")]
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

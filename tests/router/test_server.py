"""The router from outside: started, asked and stopped by a program without an event loop."""

import os
import socket
import stat
import threading
import time

import httpx
import pytest

from router.config import RouterConfig
from router.front.api import ApiError, GenerateCall
from router.grpc.client import Client
from router.server import HUNG_S, RouterServer
from tests.router.fake_cluster import ByteText
from tests.secrets_of_tests import SECRETS


def test_start_both_fronts_and_stop_twice() -> None:
    """Guards against a router that hangs without workers, keeps its ports, or cannot stop twice."""
    config = RouterConfig(grpc_port=0, http_port=0, unplaceable_s=0.3)
    server = RouterServer(config, "", SECRETS, text=ByteText())
    addresses = server.start()
    try:
        assert not server.ready()
        with Client(addresses.grpc) as client:
            assert client.models() == {"bytes": 512}
            with pytest.raises(ApiError) as raised:
                list(client.generate(GenerateCall(prompt="x")))
            assert raised.value.code == "UNAVAILABLE"
        assert httpx.get(f"http://{addresses.http}/health").status_code == 200
        assert httpx.get(f"http://{addresses.http}/ready").status_code == 503
        metrics = httpx.get(f"http://{addresses.http}/metrics").text
        assert 'outcome="error"' in metrics
        port = int(addresses.grpc.rsplit(":", 1)[1])
        second = RouterServer(RouterConfig(grpc_port=port, http_port=-1), "", SECRETS, text=ByteText())
        with pytest.raises(OSError, match=str(port)):
            second.start()
    finally:
        server.stop(0.0)
        server.stop(0.0)
    server.wait()
    for address in (addresses.grpc, addresses.http):
        host, number = address.rsplit(":", 1)
        with pytest.raises(ConnectionRefusedError), socket.create_connection((host, int(number))):
            pass


def test_small_writes_of_http_leave_at_once() -> None:
    """Guards the pace of every stream: with Nagle's algorithm on, a token waits for the client's delayed
    acknowledgement of the one before."""
    server = RouterServer(RouterConfig(grpc_port=0, http_port=0), "", SECRETS, text=ByteText())
    address = server.start().http
    try:
        with httpx.Client() as client:
            assert client.get(f"http://{address}/health").status_code == 200
            server_port = int(address.rpartition(":")[2])
            ours = [
                socket.socket(fileno=os.dup(fd))
                for fd in map(int, os.listdir("/proc/self/fd"))
                if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode)
            ]
            try:
                tcp = [one for one in ours if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM]
                accepted = [
                    one
                    for one in tcp
                    if one.getsockname()[1] == server_port
                    and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                ]
                assert [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in accepted] == [1]
            finally:
                for one in ours:
                    one.close()
    finally:
        server.stop(0.0)
        server.wait()


def test_a_router_whose_thread_hangs_owes_its_answer() -> None:
    """Guards a hung router behind a process that lives: its parent is answered by another thread."""
    server = RouterServer(RouterConfig(grpc_port=0, http_port=-1), "", SECRETS, text=ByteText())
    server.start()
    hang, hung = threading.Event(), threading.Event()

    def block() -> None:
        hung.set()
        hang.wait(20.0)

    try:
        assert server.condemned() == ()
        assert server._loop is not None
        server._loop.call_soon_threadsafe(block)
        assert hung.wait(5.0)
        time.sleep(HUNG_S + 0.2)
        answers: list[object] = []
        asking = threading.Thread(target=lambda: answers.append(server.condemned()), daemon=True)
        asking.start()
        asking.join(0.5)
        assert asking.is_alive() and not answers, "answered for a thread that hangs"
        hang.set()
        asking.join(5.0)
        assert answers == [()]
    finally:
        hang.set()
        server.stop(0.0)

"""The port of metrics: clients who hold it, and clients who are odd."""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from telemetry import page_server
from telemetry.page_server import PageServer

PAGE = b"headrace_requests_total 1.0\n" * 1000


@pytest.fixture
def server() -> Iterator[PageServer]:
    running = PageServer(lambda: PAGE, "127.0.0.1", 0)
    yield running
    running.close()


def connect(server: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def ask(server: PageServer, sent: bytes, *, ends: bool = False) -> bytes:
    with connect(server) as connection:
        connection.sendall(sent)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        got = b""
        while chunk := connection.recv(65536):
            got += chunk
        return got


def test_idle_connections_keep_no_scrape_out_and_no_thread(server: PageServer) -> None:
    """Guards a worker: every connection that said nothing had a thread of it, for ever."""
    before = threading.active_count()
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(400)]
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
            assert answer.read() == PAGE
        assert threading.active_count() == before
        assert idle[0].recv(1) == b""
        assert len(server._open) <= page_server.CONNECTIONS


def test_a_connection_has_so_much_time(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "LIMIT_S", 0.2)
    with connect(server) as connection:
        connection.sendall(b"GET /metrics HT")
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("sent", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200", PAGE),
        (b"GET /metrics?name=x HTTP/1.0\r\n\r\n", b"200", PAGE),
        (b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200", b""),
        (b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n", b"404", b"/metrics is served\n"),
        (b"DELETE /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"405", b"GET is served\n"),
        (b"\x00\xff\r\n\r\n", b"405", b"GET is served\n"),
    ],
)
@pytest.mark.parametrize("ends", [False, True], ids=["open", "half-closed"])
def test_odd_requests_are_answered(server: PageServer, sent: bytes, status: bytes, body: bytes, ends: bool) -> None:
    head, _, rest = ask(server, sent, ends=ends).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status) and rest == body


def test_a_head_without_end_is_cut(server: PageServer) -> None:
    """Guards memory from a head that goes on and on."""
    with connect(server) as connection, pytest.raises(OSError):
        for _ in range(1000):
            connection.sendall(b"x" * 65536)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
        assert answer.read() == PAGE

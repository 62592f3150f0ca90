"""Clients that send slowly, hold connections, or shut their sending side down, behind a real server and sockets."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from router.config import FrontLimits
from router.front.api import Delta
from router.http.bodies import BODY_LIMIT_BYTES
from tests.router.http.fakes import ANSWER, FINISHED, STARTED, FakeFrontend, serving, wait_for

FOREVER_S = 3600.0
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        yield connection


def request(body: dict[str, object], more: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def read_all(connection: socket.socket) -> bytes:
    got = b""
    while chunk := connection.recv(65536):
        got += chunk
    return got


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("slow_s", [0.0, 0.05, 1.5])
def test_a_client_that_has_shut_down_its_sending_side_is_answered(stream: bool, slow_s: float) -> None:
    """Guards `printf ... | nc`: its end of sending was taken for the end of its interest."""
    script = (STARTED, slow_s, Delta("Hé", (7,)), Delta("llo", (9,)), FINISHED)
    with serving(FakeFrontend(*script)) as port, connected(port) as connection:
        connection.sendall(request({"prompt": "hi", "stream": stream}))
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.count(b"HTTP/1.1") == 1
    assert (b"data: [DONE]" if stream else "Héllo".encode()) in answer


def test_a_half_closed_client_that_leaves_later_ends_its_request() -> None:
    """Guards the workers against clients that shut down one side first, as many do, and then are gone."""
    frontend = FakeFrontend(STARTED, FOREVER_S)
    with serving(frontend) as port, connected(port) as connection:
        connection.sendall(request({"prompt": "hi"}))
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.5)
        assert frontend.open == 1
        connection.close()
        assert wait_for(lambda: frontend.open == 0) < 1.0


def test_requests_sent_together_before_the_end_are_all_answered() -> None:
    with serving(FakeFrontend(*ANSWER)) as port, connected(port) as connection:
        connection.sendall(2 * request({"prompt": "hi"}))
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    ("sent", "limits"),
    [
        (HEAD, FrontLimits(header_s=0.4)),
        (request({"prompt": "hi"})[:-1], FrontLimits(body_s=0.4)),
        (request({"prompt": "hi"}, "Expect: 100-continue\r\n")[:-5], FrontLimits(body_s=0.4)),
    ],
    ids=["head", "body", "expected body"],
)
def test_who_sends_slowly_is_told_so(sent: bytes, limits: FrontLimits) -> None:
    """Guards the front from requests that never end, a byte at a time: the limit is on the whole of them."""
    frontend = FakeFrontend(*ANSWER)
    with serving(frontend, limits) as port, connected(port) as connection:
        began_s = time.monotonic()
        connection.sendall(sent)
        for _ in range(3):
            time.sleep(0.1)
            connection.sendall(b"x" if sent is HEAD else b"")
        answer = read_all(connection)
        assert 0.3 < time.monotonic() - began_s < 2
    assert b"HTTP/1.1 408 Request Timeout" in answer and b"took too long" in answer
    assert frontend.calls == []


@pytest.mark.parametrize("asked", [False, True], ids=["silent", "kept alive"])
def test_a_connection_without_a_request_is_closed(asked: bool) -> None:
    with serving(FakeFrontend(), FrontLimits(header_s=0.3, idle_s=0.3)) as port, connected(port) as connection:
        if asked:
            connection.sendall(HEAD + b"\r\n")
        began_s = time.monotonic()
        answer = read_all(connection)
        assert 0.2 < time.monotonic() - began_s < 2
    assert answer.startswith(b"HTTP/1.1 200 OK") if asked else answer == b""


def test_idle_connections_make_room_for_a_client() -> None:
    """Guards clients from a hundred connections that are held open and say nothing."""
    with serving(FakeFrontend(), connections=5) as port, ExitStack() as stack:
        idle = [stack.enter_context(connected(port)) for _ in range(100)]
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        idle[-1].sendall(HEAD + b"\r\n")
        assert idle[-1].recv(100).startswith(b"HTTP/1.1 200")
        assert idle[0].recv(100) == b""


def test_a_client_without_room_is_told_so_and_answers_are_not_given_up() -> None:
    frontend = FakeFrontend(STARTED, FOREVER_S)
    with serving(frontend, FrontLimits(connections_per_address=3)) as port, ExitStack() as stack:
        busy = [stack.enter_context(connected(port)) for _ in range(3)]
        for connection in busy:
            connection.sendall(request({"prompt": "hi"}))
        wait_for(lambda: frontend.open == 3)
        for _ in range(40):
            with connected(port) as late:
                late.sendall(HEAD + b"\r\n")
                assert late.recv(1000).startswith(b"HTTP/1.1 503 Service Unavailable")
        assert frontend.open == 3
        busy[0].close()
        wait_for(lambda: frontend.open == 2)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


UNFINISHED = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY_LIMIT_BYTES}\r\n\r\n".encode()


def asked(port: int, chars: int) -> int:
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x" * chars}).status_code


def test_bodies_that_are_received_have_a_budget() -> None:
    """Guards memory from many bodies, each within its limit, that are never finished."""
    with serving(FakeFrontend(), FrontLimits(bodies_bytes=200_000)) as port:
        with connected(port) as first, connected(port) as second:
            first.sendall(UNFINISHED + b"x" * 150_000)
            time.sleep(0.2)
            second.sendall(UNFINISHED + b"x" * 90_000)
            answer = first.recv(1000)
            assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer
            second.settimeout(0.2)
            with pytest.raises(TimeoutError):
                second.recv(1000)
        wait_for(lambda: asked(port, 180_000) == 200)


def test_half_sent_bodies_keep_nobody_out() -> None:
    """Guards everybody from sixteen clients that send all of a body but its end: they filled the budget for a minute,
    and each newcomer was refused."""
    with serving(FakeFrontend(), FrontLimits(bodies_bytes=300_000)) as port, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(port)).sendall(UNFINISHED + b"x" * 99_999)
        time.sleep(0.2)
        assert [asked(port, chars) for chars in (10, 90_000)] == [200, 200]


def test_the_address_that_has_sent_most_loses_its_largest_body() -> None:
    """Guards a client with a long prompt from another that holds many bodies, each smaller than its own."""
    with serving(FakeFrontend(), FrontLimits(bodies_bytes=400_000)) as port, ExitStack() as stack:
        held = []
        for chars in (80_000, 100_000, 90_000):
            other = socket.create_connection(("127.0.0.1", port), timeout=10, source_address=("127.0.0.2", 0))
            held.append(stack.enter_context(other))
            other.sendall(UNFINISHED + b"x" * chars)
        time.sleep(0.2)
        assert asked(port, 200_000) == 200
        assert held[1].recv(100).startswith(b"HTTP/1.1 503")
        for other in (held[0], held[2]):
            other.settimeout(0.1)
            with pytest.raises(TimeoutError):
                other.recv(100)


LONG = (STARTED, *[Delta("x" * 65_536, (7,))] * 384, FINISHED)
"""An answer of 24 MiB: more than the hosts of both ends keep for their programs."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_its_answer_is_cut_off(stream: bool) -> None:
    """Guards room for others: an answer that nobody read to its end held its connection for ever, past all limits."""
    frontend = FakeFrontend(*LONG)
    with serving(frontend, FrontLimits(idle_s=0.5)) as port, connected(port) as client:
        client.sendall(request({"prompt": "hi", "stream": stream}))
        wait_for(lambda: bool(frontend.calls))
        assert not stream or frontend.open == 1
        wait_for(lambda: frontend.open == 0)
        time.sleep(1.5)
        got = 0
        with suppress(ConnectionResetError):
            while chunk := client.recv(1 << 20):
                got += len(chunk)
        assert 0 < got < 384 * 65_536


def test_a_client_that_reads_slowly_is_not() -> None:
    """Guards slow lines: each look finds that something was read, though our buffer is as full as before."""
    with serving(FakeFrontend(*LONG), FrontLimits(idle_s=0.5)) as port, connected(port) as client:
        client.sendall(request({"prompt": "hi", "stream": True}))
        for _ in range(20):
            assert client.recv(50_000)
            time.sleep(0.1)
        assert read_all(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

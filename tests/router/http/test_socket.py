"""The HTTP front behind a real server and real sockets: what happens when the client goes away."""

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Iterator

import httpx
import pytest

from router.front.api import Delta, GenerateCall, GenerateEvent
from router.front.outlet import Outlet
from tests.router.http.fakes import FINISHED, STARTED, FakeFrontend, serving, wait_for

FOREVER_S = 3600.0


def post(port: int, body: dict[str, object]) -> socket.socket:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        (FOREVER_S,),
        (STARTED, FOREVER_S),
        (STARTED, Delta("a", (1,)), FOREVER_S),
    ],
    ids=["waiting", "prefilling", "decoding"],
)
def test_a_client_that_leaves_ends_its_request(script: tuple[object, ...], stream: bool) -> None:
    """Guards against generating for nobody: an idle stream notices a disconnect only if it listens for it."""
    frontend = FakeFrontend(*script)  # type: ignore[arg-type]
    with serving(frontend) as port:
        connection = post(port, {"prompt": "hi", "stream": stream})
        wait_for(lambda: frontend.open == 1)
        time.sleep(0.05)
        assert frontend.open == 1
        connection.close()
        assert wait_for(lambda: frontend.open == 0) < 0.5


def test_a_client_that_stops_reading_and_leaves_ends_its_request() -> None:
    """Guards against a writer stuck in flow control that no longer sees the disconnect."""
    flood = [Delta("x" * 65536, (1,))] * 400
    frontend = FakeFrontend(STARTED, *flood, FOREVER_S)
    with serving(frontend) as port:
        connection = post(port, {"prompt": "hi", "stream": True})
        wait_for(lambda: frontend.open == 1)
        time.sleep(0.2)
        assert frontend.yielded < len(flood)
        connection.close()
        assert wait_for(lambda: frontend.open == 0) < 0.5


class Bursting(FakeFrontend):
    """Says much at once, just as its client leaves: the server's loop stands still until it has left."""

    def __init__(self) -> None:
        super().__init__()
        self.left = threading.Event()
        self.said = False

    async def generate(self, call: GenerateCall, outlet: Outlet | None = None) -> AsyncGenerator[GenerateEvent, None]:
        yield STARTED
        yield Delta("a", (1,))
        self.left.wait(5.0)
        for _ in range(200):
            yield Delta("b", (2,))
        self.said = True
        yield FINISHED


def test_a_client_that_leaves_in_a_burst_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a line of asyncio's for every event that was ready when a client left."""
    frontend = Bursting()
    with serving(frontend) as port:
        connection = post(port, {"prompt": "hi", "stream": True})
        while b"data: " not in connection.recv(65536):
            pass
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        frontend.left.set()
        wait_for(lambda: frontend.said)
    assert not caplog.records, "those who leave fill the log"


def test_tokens_arrive_one_by_one_and_the_connection_is_reused() -> None:
    """Guards against a server or proxy header that collects the stream before it is sent."""
    frontend = FakeFrontend(STARTED, Delta("a", (1,)), 0.3, Delta("b", (2,)), FINISHED)
    with serving(frontend) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(2):
            began = time.monotonic()
            at = {}
            with client.stream(
                "POST", "/v1/completions", json={"prompt": "hi", "stream": True}
            ) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        text = json.loads(line[6:])["choices"][0]["text"]
                        at[text] = time.monotonic() - began
            assert at["a"] < 0.25 < at["b"]
            assert frontend.open == 0
        assert client.get("/health").status_code == 200


def test_an_oversized_body_is_refused_before_it_has_been_sent() -> None:
    """Guards memory: the refusal comes from the declared length, with nothing of the body read."""
    with serving(FakeFrontend()) as port:
        connection = socket.create_connection(("127.0.0.1", port), timeout=5)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        connection.close()


class Pushing(FakeFrontend):
    """Says `deltas` as fast as it can, through the outlet where that takes them."""

    def __init__(self, deltas: list[Delta]) -> None:
        super().__init__()
        self.deltas = deltas
        self.took = self.refused = 0

    async def generate(self, call: GenerateCall, outlet: Outlet | None = None) -> AsyncGenerator[GenerateEvent, None]:
        assert outlet is not None
        deltas = self.deltas if call.max_tokens is None else self.deltas[: call.max_tokens]
        yield STARTED
        for delta in deltas:
            if outlet.take is not None and outlet.take(delta):
                self.took += 1
            else:
                self.refused += 1
                yield delta
            await asyncio.sleep(0)
        yield FINISHED


def said(lines: Iterator[str]) -> list[str]:
    """The texts of a stream, event by event."""
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [text for chunk in chunks for choice in chunk["choices"] if (text := choice["text"])]


def test_a_client_that_does_not_read_gets_all_of_it_later_and_holds_nobody_up() -> None:
    """Guards the two ways to one client: none of the events may be lost, or pass another, where one way is refused."""
    frontend = Pushing([Delta(f"{at}{'x' * 65536}", (1,)) for at in range(300)])
    with serving(frontend) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        body = {"prompt": "hi", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as slow:
            wait_for(lambda: frontend.refused > 1)
            began = time.monotonic()
            with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 2}) as other:
                assert said(other.iter_lines()) == [delta.text for delta in frontend.deltas[:2]]
            assert time.monotonic() - began < 1.0
            assert said(slow.iter_lines()) == [delta.text for delta in frontend.deltas]
    assert frontend.took > 1


def test_others_are_served_while_one_waits() -> None:
    frontend = FakeFrontend(STARTED, FOREVER_S)
    with serving(frontend) as port:
        connection = post(port, {"prompt": "hi"})
        wait_for(lambda: frontend.open == 1)
        assert httpx.get(f"http://127.0.0.1:{port}/ready").json() == {"ready": True}
        connection.close()
        wait_for(lambda: frontend.open == 0)

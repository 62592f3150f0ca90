"""Connections to an https port that have not shaken hands: counted, bounded in time, and refused like others."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from access.config import AccessConfig
from access.tls import ServerCertificates
from router.config import FrontLimits
from tests.access.certificates import make_authority, make_certificate
from tests.router.http.fakes import ANSWER, STARTED, FakeFrontend, serving, wait_for
from tests.router.http.test_limits import FOREVER_S, HEAD, connected, read_all, request

SIDES = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> SIDES:
    """What a server and its client know."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = make_authority(folder)
    pair = make_certificate(folder, authority, "headrace", san="IP:127.0.0.1")
    server = ServerCertificates(AccessConfig(cert_file=pair.cert, key_file=pair.key).front_files).context(lets_in=True)
    return server, ssl.create_default_context(cafile=str(Path(authority.cert)))


@contextmanager
def secured(port: int, client: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with connected(port) as plain, client.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
        yield connection


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def test_a_request_is_answered_and_the_connection_kept(sides: SIDES) -> None:
    frontend = FakeFrontend(*ANSWER)
    with serving(frontend, context=sides[0]) as port, httpx.Client(verify=sides[1]) as client:
        for _ in range(2):
            assert client.post(f"https://127.0.0.1:{port}/v1/completions", json={"prompt": "hi"}).status_code == 200


def test_what_comes_together_with_the_handshake_is_heard(sides: SIDES) -> None:
    """Guards a request that is read with the end of the handshake, before its connection is told of: it was lost."""
    with serving(FakeFrontend(*ANSWER), context=sides[0]) as port:
        for _ in range(20):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = sides[1].wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            with connected(port) as connection:
                while True:
                    try:
                        tls.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        connection.sendall(outgoing.read())
                        incoming.write(connection.recv(65536))
                tls.write(HEAD + b"\r\n")
                connection.sendall(outgoing.read())  # the last of the handshake, and the request
                incoming.write(connection.recv(65536))
                assert tls.read(12) == b"HTTP/1.1 200"


def test_who_never_shakes_hands_holds_nobody_up(sides: SIDES) -> None:
    """Guards clients, and descriptors, from a hundred connections that are opened and say nothing: none of them
    counted, and each stayed for a minute."""
    with serving(FakeFrontend(), connections=5, context=sides[0]) as port, ExitStack() as stack:
        silent = [stack.enter_context(connected(port)) for _ in range(100)]
        answer = httpx.get(f"https://127.0.0.1:{port}/health", verify=sides[1])
        assert answer.status_code == 200
        wait_for(lambda: sum(map(is_open, silent[-8:])) <= 5)
        assert not any(map(is_open, silent[:90])), "they do not count before their handshake"


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"], ids=["silent", "stalled"])
def test_a_handshake_has_a_time_limit(said: bytes, sides: SIDES) -> None:
    with serving(FakeFrontend(), FrontLimits(header_s=0.4), context=sides[0]) as port, connected(port) as connection:
        began_s = time.monotonic()
        connection.sendall(said)
        connection.settimeout(5.0)
        with suppress(ConnectionError):
            assert read_all(connection) == b""
        assert 0.3 < time.monotonic() - began_s < 3.0


def test_who_speaks_no_tls_is_let_go(sides: SIDES, caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakeFrontend(), connections=3, context=sides[0]) as port:
        for _ in range(20):
            with connected(port) as connection:
                connection.sendall(HEAD + b"\r\n")
                connection.settimeout(5.0)
                wait_for(lambda: not is_open(connection))
        assert httpx.get(f"https://127.0.0.1:{port}/health", verify=sides[1]).status_code == 200
    assert not caplog.records, "strangers fill the log"


def test_a_client_without_room_is_told_so(sides: SIDES) -> None:
    """Guards the limit for one address, which counted no connection before its handshake; and answers under way."""
    frontend = FakeFrontend(STARTED, FOREVER_S)
    limits = FrontLimits(connections_per_address=3)
    with serving(frontend, limits, context=sides[0]) as port, ExitStack() as stack:
        busy = [stack.enter_context(secured(port, sides[1])) for _ in range(3)]
        for connection in busy:
            connection.sendall(request({"prompt": "hi"}))
        wait_for(lambda: frontend.open == 3)
        for _ in range(5):
            with secured(port, sides[1]) as late:
                late.sendall(HEAD + b"\r\n")
                assert late.recv(1000).startswith(b"HTTP/1.1 503 Service Unavailable")
        silent = [stack.enter_context(connected(port)) for _ in range(100)]
        wait_for(lambda: sum(map(is_open, silent[-20:])) <= 16)
        assert frontend.open == 3
        busy[0].close()
        wait_for(lambda: frontend.open == 2)
        wait_for(lambda: httpx.get(f"https://127.0.0.1:{port}/health", verify=sides[1]).status_code == 200)

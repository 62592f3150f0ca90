"""Whether a browser lets a page of another origin ask the HTTP front, and read what it answers."""

import asyncio
import http.server
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from access.authenticator import Authenticator
from access.config import AccessConfig
from access.keys import make_key
from access.tenants import CredentialTable, Tenant
from router.http.gate import HttpGate, with_cors
from router.http.routes import build_app
from tests.access.test_authenticator import write
from tests.router.http.browser import MISSING, browsing, chromium
from tests.router.http.fakes import ANSWER, CHAT, FakeFrontend, FakeState, serving

PAGE = "https://page.example"
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


def ask(
    origins: Sequence[str], method: str, path: str, *, access: AccessConfig | None = None, **request: object
) -> httpx.Response:
    """One request to the front as the router builds it."""

    async def go() -> httpx.Response:
        gate = HttpGate(build_app(FakeFrontend(*ANSWER), FakeState()), Authenticator(access or AccessConfig()))
        transport = httpx.ASGITransport(with_cors(gate, origins))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **request)  # type: ignore[arg-type]

    return asyncio.run(go())


@pytest.fixture
def locked(tmp_path: Path) -> AccessConfig:
    """Credentials are asked for."""
    _, kept = make_key("acme", "tenant", "")
    write(tmp_path / "keys.json", CredentialTable(tenants={"acme": Tenant()}, keys=[kept]))
    return AccessConfig(keys_file=str(tmp_path / "keys.json"))


def preflight(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-headrace-session",
    }


def test_without_origins_there_is_not_a_word_of_it() -> None:
    """Guards against a server on somebody's machine that any page may ask."""
    for method, headers in (("POST", {"origin": PAGE}), ("OPTIONS", preflight(PAGE))):
        reply = ask((), method, CHAT, json=BODY, headers=headers)
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_a_browser_asks_first_without_a_credential(locked: AccessConfig) -> None:
    """Guards against a gate that answers the question with 401, after which no browser ever sends the key."""
    reply = ask([PAGE], "OPTIONS", CHAT, access=locked, headers=preflight(PAGE))
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "authorization" in reply.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in reply.headers
    assert ask([PAGE], "OPTIONS", CHAT, headers=preflight("https://other.example")).status_code == 400


def test_answers_and_refusals_can_be_read(locked: AccessConfig) -> None:
    streamed = ask([PAGE], "POST", CHAT, json=BODY, headers={"origin": PAGE})
    refused = ask([PAGE], "POST", CHAT, access=locked, json=BODY, headers={"origin": PAGE})
    assert (streamed.status_code, refused.status_code) == (200, 401)
    for reply in (streamed, refused):
        assert reply.headers["access-control-allow-origin"] == PAGE
        exposed = reply.headers["access-control-expose-headers"]
        assert {"x-request-id", "x-headrace-resume-token", "retry-after"} <= set(exposed.split(", "))
    other = ask([PAGE], "POST", CHAT, json=BODY, headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert ask(["*"], "POST", CHAT, json=BODY, headers={"origin": PAGE}).headers["access-control-allow-origin"] == "*"


@contextmanager
def elsewhere() -> Iterator[str]:
    """An origin with a page that is empty."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.send_header("content-type", "text/html")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.skipif(chromium() is None, reason=MISSING)
def test_a_browser_agrees(tmp_path: Path) -> None:
    """The same page, with its origin let in and not."""
    asks = """fetch("http://127.0.0.1:%d/v1/chat/completions", {method: "POST", body: JSON.stringify(%s),
        headers: {"content-type": "application/json", "x-request-id": "mine"}})
        .then(async (reply) => [reply.headers.get("x-request-id"), (await reply.text()).includes("data: [DONE]")],
              (error) => error.name)"""
    body = '{messages: [{role: "user", content: "hi"}], stream: true}'
    with elsewhere() as origin, browsing(tmp_path) as browser:
        tab = browser.open(origin)
        for origins, said in (([origin], ["mine", True]), ([PAGE], "TypeError")):
            with serving(FakeFrontend(), around=lambda app, origins=origins: with_cors(app, origins)) as port:
                assert tab.run(asks % (port, body)) == said

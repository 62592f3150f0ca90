"""What other people's web pages can make a browser send to a front that asks for no credential."""

import asyncio
from pathlib import Path

import httpx
import pytest

from access.authenticator import Authenticator
from access.config import AccessConfig
from router.config import RouterConfig
from router.http.browsers import BrowserGuard
from router.http.gate import HttpGate
from router.http.routes import build_app
from router.server import RouterServer
from tests.router.fake_cluster import ByteText
from tests.router.http.browser import MISSING, browsing, chromium
from tests.router.http.fakes import CHAT, FakeFrontend, FakeState, serving
from tests.router.http.test_cors import elsewhere
from tests.secrets_of_tests import SECRETS

BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'
PAGE = "https://page.example"
JSON = "application/json"
OURS = "http://127.0.0.1:8000"


def ask(
    frontend: FakeFrontend, headers: dict[str, str], url: str = OURS, method: str = "POST", host: str = "127.0.0.1"
) -> httpx.Response:
    """One request to a front that was told to listen on `host`."""

    async def go() -> httpx.Response:
        gate = HttpGate(build_app(frontend, FakeState()), Authenticator(AccessConfig()))
        transport = httpx.ASGITransport(BrowserGuard(gate, host))
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            path = CHAT if method == "POST" else "/v1/models"
            return await client.request(method, path, content=BODY, headers=headers)

    return asyncio.run(go())


@pytest.mark.parametrize("kind", ["text/plain;charset=UTF-8", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("origin", [PAGE, "null", OURS])
def test_a_page_cannot_ask_without_being_asked_first(origin: str, kind: str) -> None:
    """Guards a server on somebody's machine: browsers send bodies of these kinds to any origin without asking it, and
    so any page could have it compute."""
    frontend = FakeFrontend()
    reply = ask(frontend, {"origin": origin} | ({"content-type": kind} if kind else {}))
    assert reply.status_code == 415 and reply.json()["error"]["code"] == "unsupported_media_type"
    assert reply.headers["connection"] == "close" and frontend.calls == []


def test_programs_and_pages_that_say_json_are_answered() -> None:
    """Guards curl, which says that any body is a form, against what is meant for browsers."""
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {}, {"origin": OURS, "content-type": JSON},
                    {"origin": PAGE, "content-type": "Application/JSON; charset=utf-8"}):
        assert ask(FakeFrontend(), headers).status_code == 200, headers


@pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1.evil.example:8000", "evil.example.:8000"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_name_of_somebody_else_that_leads_here_is_refused(host: str, method: str) -> None:
    """Guards against a page whose own name has come to stand for this machine: to its browser we are its origin, and it
    may read everything."""
    frontend = FakeFrontend()
    reply = ask(frontend, {"content-type": JSON}, f"http://{host}", method)
    assert reply.status_code == 421 and reply.json()["error"]["code"] == "misdirected_request"
    assert "access-control-allow-origin" not in reply.headers and frontend.calls == []


def test_a_page_cannot_say_that_it_came_over_tls() -> None:
    """Guards against a page that is taken for ours and so may send any header: a proxy's would switch the guard off."""
    server = RouterServer(RouterConfig(grpc_port=0, http_port=0), "", SECRETS, text=ByteText())
    http = server.start().http
    try:
        headers = {"host": f"evil.example:{http.rpartition(':')[2]}", "x-forwarded-proto": "https"}
        assert httpx.get(f"http://{http}/v1/models", headers=headers, trust_env=False).status_code == 421
    finally:
        server.stop(0.0)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1"),
        ("http://localhost:8000", "127.0.0.1"),
        ("http://app.localhost:8000", "localhost"),
        ("http://[::1]:8000", "::1"),
        ("http://127.1:8000", "127.0.0.1"),
        ("http://workstation:8000", "127.0.0.1"),  # a name without a dot is of this network, or of this machine
        ("https://chat.example", "127.0.0.1"),  # a proxy beside us
        ("http://chat.example:8000", "0.0.0.0"),  # meant to be reached by names
        ("http://chat.example:8000", "chat.example"),
    ],
)
def test_who_may_call_us_so_is_answered(url: str, host: str) -> None:
    frontend = FakeFrontend()
    headers = {"content-type": JSON}
    if url == "https://chat.example":
        reply = ask(frontend, {**headers, "host": "chat.example"}, OURS, host=host)
    else:
        reply = ask(frontend, headers, url, host=host)
    assert reply.status_code == 200


@pytest.mark.skipif(chromium() is None, reason=MISSING)
def test_a_real_page_cannot_make_us_compute(tmp_path: Path) -> None:
    """The same from a browser: what it sends without asking has no effect here."""
    frontend = FakeFrontend()
    asks = """fetch("http://127.0.0.1:%d/v1/chat/completions", {method: "POST", mode: "no-cors", body: %r})
        .then(() => "sent", (error) => error.name)"""
    with elsewhere() as origin, browsing(tmp_path) as browser:
        tab = browser.open(origin)
        with serving(frontend, around=lambda app: BrowserGuard(app, "127.0.0.1")) as port:
            assert tab.run(asks % (port, BODY.decode())) == "sent"
    assert frontend.calls == []

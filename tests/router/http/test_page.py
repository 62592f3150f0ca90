"""The page at `/`: that it shows the whole of an answer, runs what the file holds and nothing else, and asks nobody but
its server. In a real browser, where there is one."""

import asyncio
import base64
import hashlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import msgspec
import pytest

from access.authenticator import Authenticator
from access.config import AccessConfig
from access.keys import make_key
from access.tenants import CredentialTable, Tenant
from router.front.api import ApiError, ChatMessage, Delta, GenerateEvent
from router.http.gate import HttpGate
from router.http.routes import build_app
from telemetry.labels import STAGES
from tests.access.test_authenticator import write
from tests.router.http.browser import MISSING, Browser, Tab, browsing, chromium
from tests.router.http.fakes import ANSWER, FINISHED, STARTED, FakeFrontend, FakeState, ask, serving

HTML = (Path(__file__).parents[3] / "router" / "http" / "chat.html").read_text()
browsed = pytest.mark.skipif(chromium() is None, reason=MISSING)
SECONDS = dict.fromkeys(STAGES, 0.0) | {"prefill_run": 0.06, "migrate": 0.01, "decode_run": 0.13}
LAST = msgspec.structs.replace(FINISHED, stats=msgspec.structs.replace(FINISHED.stats, stages=SECONDS))


def test_the_policy_allows_the_files_own_script_and_style_and_no_other() -> None:
    reply = ask(FakeFrontend(), "GET", "/")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert reply.text == HTML
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("style", "script"):
        (inline,) = re.findall(rf"<{kind}>(.*?)</{kind}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_file_names_no_other_place_and_all_stages_in_their_order() -> None:
    assert "//" not in re.sub(r"(?m)^\s*//.*$|; // .*$", "", HTML)
    table = HTML.partition("const STAGES = {")[2].partition("};")[0]
    assert tuple(re.findall(r"(\w+): \"#", table)) == STAGES


def test_it_can_be_left_out() -> None:
    async def go() -> int:
        transport = httpx.ASGITransport(build_app(FakeFrontend(), FakeState(), chat_page=False))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get("/")).status_code

    assert asyncio.run(go()) == 404


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as one:
        yield one


def playing(*script: GenerateEvent | Exception | float) -> tuple[FakeFrontend, AbstractContextManager[int]]:
    frontend = FakeFrontend(*script)
    return frontend, serving(frontend)


def opened(browser: Browser, port: int, **how: str) -> Tab:
    tab = browser.open(f"http://127.0.0.1:{port}/", **how)  # type: ignore[arg-type]
    tab.until("document.querySelector('#model').textContent || !document.querySelector('#fault').hidden")
    return tab


@browsed
def test_a_chat_streams_and_shows_where_it_ran(browser: Browser) -> None:
    """Guards against text that comes all at once at the end, figures that are missing, and a second turn that forgets
    the first."""
    frontend, served = playing(STARTED, Delta("Hé", (7,)), 1.5, Delta("llo", (9,)), LAST)
    with served as port:
        tab = opened(browser, port)
        assert tab.text("#model") == "tiny, org/tiny"
        tab.type("Say hello\n")
        tab.until("document.querySelector('article:last-child p')?.textContent === 'Hé'")
        assert tab.run("document.querySelector('.bar') === null"), "the answer was over before its text came"
        assert tab.run("document.querySelector('#talk').getAttribute('aria-busy')") == "true"
        tab.until("document.querySelector('.bar')")
        assert tab.text("article:last-child p") == "Héllo"
        assert tab.text(".workers") == "prefill-0 → decode-0"
        assert tab.text(".cached") == "cached tokens: 4 of 5 on prefill-0, 0 of 5 on decode-0"
        assert tab.text(".migrated") == "2 blocks migrated (0.00 MiB, 10.0 ms, shm)"
        assert tab.text(".length") == "3 tokens in 200 ms"
        label = tab.run("document.querySelector('.bar').getAttribute('aria-label')")
        assert label == "Stages: prefill_run 60.0 ms, migrate 10.0 ms, decode_run 130 ms"
        widths = tab.run("Array.from(document.querySelectorAll('.bar i'), (one) => one.getBoundingClientRect().width)")
        assert widths[0] == pytest.approx(sum(widths) * 0.3, rel=0.05)
        tab.until("!document.querySelector('#send').hidden")
        tab.type("Again\n")
        tab.until("document.querySelectorAll('.bar').length === 2")
        first, second = frontend.calls
        assert first.prompt == [ChatMessage("user", "Say hello")]
        assert second.prompt == [*first.prompt, ChatMessage("assistant", "Héllo"), ChatMessage("user", "Again")]
        assert first.session == second.session != ""
        asked = {one["request"]["url"] for one in tab.told("Network.requestWillBeSent")}
        own = f"http://127.0.0.1:{port}/"
        assert {url for url in asked if not url.startswith((own, "data:"))} == set()
        assert f"{own}v1/chat/completions" in asked
        assert tab.complaints() == []


@browsed
def test_an_answer_is_text_whatever_it_holds(browser: Browser) -> None:
    """Guards against markup of a model that becomes part of the page; and were it to, the policy holds it back."""
    evil = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    _, served = playing(STARTED, Delta(evil, (7,)), LAST)
    with served as port:
        tab = opened(browser, port)
        tab.type("Be evil\n")
        tab.until("document.querySelector('.bar')")
        assert tab.text("article:last-child p") == evil
        assert tab.complaints() == []
        # The same by hand, past the page's care.
        tab.run("document.querySelector('#talk').innerHTML = " + msgspec.json.encode(evil).decode())
        script = "Object.assign(document.createElement('script'), {text: \"document.title='taken'\"})"
        tab.run(f"document.body.append({script})")
        browser.listen(0.3)
        assert tab.run("document.title") == "Headrace"
        refused = [entry for entry in tab.complaints() if "Content Security Policy" in str(entry)]
        assert len(refused) >= 2, tab.complaints()


@browsed
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([ApiError("UNAVAILABLE", "no worker is left", "")], "no worker is left"),
        ([STARTED, Delta("a", (1,)), ApiError("INTERNAL", "it broke", "")], "it broke"),
        ([*ANSWER[:-1], 0.0], "the server failed on this request"),
    ],
)
def test_a_failure_is_told(browser: Browser, script: list[GenerateEvent | Exception | float], said: str) -> None:
    _, served = playing(*script)
    with served as port:
        tab = opened(browser, port)
        tab.type("Hello\n")
        tab.until("document.querySelector('.fault')")
        assert tab.text(".fault") == said
        assert not tab.run("document.querySelector('#send').hidden"), "one may ask again"


@browsed
def test_an_answer_can_be_stopped(browser: Browser) -> None:
    frontend, served = playing(STARTED, *[Delta("a", (1,)), 0.05] * 1000, LAST)
    with served as port:
        tab = opened(browser, port)
        tab.type("Hello\n")
        tab.until("document.querySelector('article:last-child p')?.textContent.startsWith('a')")
        tab.run("document.querySelector('#stop').click()")
        tab.until("document.querySelector('.fault')")
        assert tab.text(".fault") == "Stopped."
        for _ in range(100):
            if not frontend.open:
                break
            browser.listen(0.05)
        assert frontend.open == 0, "the server works on for nobody"


@browsed
def test_where_credentials_are_on_it_asks_for_a_key(browser: Browser, tmp_path: Path) -> None:
    """Guards against a page that needs the key which it is to ask for, and one that keeps it beyond its tab."""
    key, kept = make_key("acme", "tenant", "")
    write(tmp_path / "keys.json", CredentialTable(tenants={"acme": Tenant()}, keys=[kept]))
    authenticator = Authenticator(AccessConfig(keys_file=str(tmp_path / "keys.json")))
    frontend = FakeFrontend(STARTED, Delta("a", (1,)), LAST)
    with serving(frontend, around=lambda app: HttpGate(app, authenticator)) as port:
        tab = opened(browser, port)
        tab.until("!document.querySelector('#key').hidden")
        assert tab.run("document.activeElement.id") == "secret"
        tab.type("wrong\n")
        tab.until("document.querySelector('#secret').value === '' && !document.querySelector('#fault').hidden")
        tab.run("document.querySelector('#secret').focus()")
        tab.type(f"{key}\n")
        tab.until("document.querySelector('#key').hidden")
        assert tab.text("#model") == "tiny, org/tiny"
        tab.run("document.querySelector('#words').focus()")
        tab.type("Hello\n")
        tab.until("document.querySelector('.bar')")
        assert [call.tenant for call in frontend.calls] == ["acme"]
        assert tab.run("JSON.stringify(localStorage)") == "{}"
        assert key not in tab.run("document.documentElement.outerHTML")


@browsed
def test_dark_and_light(browser: Browser) -> None:
    """As the system has it, and as its reader says, who is remembered."""
    ground = "getComputedStyle(document.body).backgroundColor"
    _, served = playing()
    with served as port:
        tab = opened(browser, port, scheme="dark")
        dark = tab.run(ground)
        tab.run("document.querySelector('#theme').click()")
        light = tab.run(ground)
        assert (dark, light) == ("rgb(13, 17, 23)", "rgb(246, 248, 250)")
        again = opened(browser, port, scheme="dark")
        assert again.run(ground) == light
        again.run("localStorage.clear()")


@browsed
def test_everything_that_can_be_used_has_a_name(browser: Browser) -> None:
    """As a screen reader is told."""
    _, served = playing(STARTED, Delta("a", (1,)), LAST)
    with served as port:
        tab = opened(browser, port)
        tab.type("Hello\n")
        tab.until("document.querySelector('.bar')")
        tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        tab.run("document.querySelector('#key').hidden = false")
        tab.call("Accessibility.enable")
        nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
        used = ("button", "textbox", "spinbutton", "log", "image", "img")
        found = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and node["role"]["value"] in used
        ]
        assert {role for role, _ in found} >= {"button", "textbox", "spinbutton", "log"}
        assert [role for role, name in found if not name] == []

"""Deadlines, sessions, capped priorities and cancelled requests over both fronts, with scripted workers behind them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from access.client import ClientCredentials
from access.config import AccessConfig
from engine.messages import Place
from engine.types import RequestRecord
from router.core.events import WorkerSaid
from router.front.api import ApiError, GenerateCall
from router.grpc.client import Client
from tests.access.test_authenticator import write
from tests.router.fake_cluster import load, until
from tests.router.test_credentials import Keys, Site, by_key, shown

OPEN = AccessConfig()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


def served(runner: asyncio.Runner, access: AccessConfig, body: Callable[[Site], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), Site(access) as site:
            await body(site)

    runner.run(whole())


def records(site: Site) -> list[RequestRecord]:
    return [message.record for message in site.workers.got if isinstance(message, Place)]


def test_no_priority_is_above_that_of_its_credential(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Guards other tenants' KV memory: a lower priority may be asked for, a higher one becomes the credential's."""
    keys = Keys(tmp_path)
    acme, globex, monitor = keys.table.keys
    granted = [msgspec.structs.replace(acme, max_priority=5), globex, monitor]
    write(keys.path, msgspec.structs.replace(keys.table, keys=granted))

    async def body(site: Site) -> None:
        async with httpx.AsyncClient() as web:
            for key, asked in ((keys.acme, 50), (keys.acme, 3), (keys.acme, -7), (keys.globex, 1)):
                await site.ask(by_key(key), GenerateCall(prompt="x", priority=asked))
                body = {"prompt": "x", "priority": asked}
                assert (await web.post(site.url("/v1/completions"), headers=shown(key), json=body)).status_code == 200
            error = await site.refused(by_key(keys.acme), GenerateCall(prompt="x", priority=101))
            assert (error.code, error.field) == ("INVALID_ARGUMENT", "priority"), "what is nonsense stays nonsense"
        assert [record.priority for record in records(site)] == [5, 5, 3, 3, -7, -7, 0, 0]

    served(runner, AccessConfig(keys_file=str(keys.path)), body)


def test_without_credentials_nothing_caps_a_priority(runner: asyncio.Runner) -> None:
    async def body(site: Site) -> None:
        await site.ask(ClientCredentials(), GenerateCall(prompt="x", priority=100))
        assert [record.priority for record in records(site)] == [100]

    served(runner, OPEN, body)


def test_a_session_is_named_over_both_fronts_and_is_its_tenants(runner: asyncio.Runner, tmp_path: Path) -> None:
    keys = Keys(tmp_path)

    async def body(site: Site) -> None:
        sessions = site.app.hub.core._sessions
        async with httpx.AsyncClient() as web:
            headers = shown(keys.acme) | {"x-headrace-session": "over http"}
            answer = await web.post(site.url("/v1/completions"), headers=headers, json={"prompt": "x"})
            assert answer.status_code == 200
            headers["x-headrace-session"] = "s" * 129
            answer = await web.post(site.url("/v1/completions"), headers=headers, json={"prompt": "x"})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-headrace-session"
        await site.ask(by_key(keys.globex), GenerateCall(prompt="x", session="over gRPC"))
        for name, tenant, other in (("over http", "acme", "globex"), ("over gRPC", "globex", "acme")):
            namespaces = site.app._frontend._intake.namespaces
            pin = sessions.find(namespaces.session(tenant, name), 0.0)
            assert pin is not None and pin.decode[0] == "d0" and pin.prefill is not None and pin.prefill[0] == "p0"
            assert sessions.find(namespaces.session(other, name), 0.0) is None
        with pytest.raises(ApiError, match="printable ASCII"):
            await site.ask(by_key(keys.acme), GenerateCall(prompt="x", session="ä"))
        assert len(sessions) == 2

    served(runner, AccessConfig(keys_file=str(keys.path)), body)


def test_who_names_a_deadline_that_cannot_be_met_is_told_when_to_come_back(runner: asyncio.Runner) -> None:
    """Guards callers against waiting for what will not come, and both fronts' way to say so."""

    async def body(site: Site) -> None:
        async def backlog() -> None:
            """The scripted worker has none, and says so whenever it says anything."""
            while True:
                site.app.hub._handle(WorkerSaid("p0", load(2, s_per_token=0.01, waiting_tokens=1000)))
                await asyncio.sleep(0.0005)

        async with httpx.AsyncClient() as web, Client(site.grpc) as client:
            # A router that holds nothing refuses nobody: this one runs all the while.
            site.workers.hold = True
            held = client.agenerate(GenerateCall(prompt="held", max_tokens=4))
            running = asyncio.ensure_future(anext(held))  # type: ignore[arg-type]
            await until(lambda: len(records(site)) == 1)
            site.workers.hold = False
            url, text = site.url("/v1/completions"), {"prompt": "x"}
            stated = asyncio.ensure_future(backlog())
            answer = await web.post(url, json=text, headers={"x-request-timeout-s": "2"})
            assert answer.status_code == 429 and 7 <= int(answer.headers["retry-after"]) <= 10
            assert "predicted" in answer.json()["error"]["message"]
            with pytest.raises(ApiError) as raised:
                await anext(client.agenerate(GenerateCall(prompt="x", timeout_s=2.0)))  # type: ignore[arg-type]
            assert raised.value.code == "RESOURCE_EXHAUSTED"
            assert raised.value.retry_after_s == pytest.approx(8.0, abs=0.5)
            assert len(records(site)) == 1, "no worker hears of it"
            assert (await web.post(url, json=text)).status_code == 200, "it names none"
            assert (await web.post(url, json=text | {"timeout": 20})).status_code == 200
            for task in (running, stated):
                task.cancel()
            await asyncio.gather(running, stated, return_exceptions=True)

    served(runner, OPEN, body)


def test_what_is_cancelled_while_it_waits_reaches_no_worker(runner: asyncio.Runner) -> None:
    """Guards workers against work for nobody, over real connections."""

    async def body(site: Site) -> None:
        core = site.app.hub.core
        site.workers.hold = True
        big = GenerateCall(prompt="big", max_tokens=400)
        async with Client(site.grpc) as client:

            async def ask(call: GenerateCall) -> None:
                async for _ in client.agenerate(call):
                    pass

            tasks = [asyncio.create_task(ask(big)) for _ in range(2)]
            await until(lambda: len(records(site)) == 2)
            late = asyncio.create_task(ask(GenerateCall(prompt="cancelled in the line", max_tokens=400)))
            await until(lambda: core.waiting == 1)
            late.cancel()
            await until(lambda: not core.waiting)
            for task in tasks:
                task.cancel()
            await asyncio.gather(late, *tasks, return_exceptions=True)
        site.workers.hold = False
        assert await site.ask(ClientCredentials(), GenerateCall(prompt="after")) == "hello world"
        prompts = {bytes(record.tokens) for record in records(site)}
        assert prompts == {b"big", b"after"} and len(site.workers.got) == 5, "two offers, their cancels, and the last"

    served(runner, OPEN, body)

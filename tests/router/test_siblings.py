"""Two routers behind the same workers, in one process over fake devices: what one knows, the other acts upon."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import worker.opening
from decode_worker.role import open_decode_worker
from engine.kv.layout import KVLayout
from engine.messages import PeerAddress
from engine.types import RequestId
from prefill_worker.role import open_prefill_worker
from router.app import RouterApp
from router.config import RouterConfig
from router.core.other_lines import HEARD_S
from router.front.api import Finished, GenerateCall
from router.status.observer import NullObserver
from tests.integration.fake_device import fake_device
from tests.router.fake_cluster import ByteText, until
from tests.secrets_of_tests import SECRETS
from worker.config import DecodeConfig, PrefillConfig
from worker.worker import Worker

LAYOUT = KVLayout(kv_heads=1, layers=1, block_size=4, head_dim=1)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Worker[Any]], list[Worker[Any]]]]:
    """Two prefill workers and two decode workers."""
    monkeypatch.setattr(worker.opening, "open_device", lambda *config: fake_device(LAYOUT, 256))
    prefill: list[Worker[Any]] = [
        open_prefill_worker(f"p{at}", PrefillConfig(), "127.0.0.1", 0, SECRETS) for at in range(2)
    ]
    decode: list[Worker[Any]] = [
        open_decode_worker(f"d{at}", DecodeConfig(), "127.0.0.1", 0, SECRETS) for at in range(2)
    ]
    for one in (*prefill, *decode):
        one.start()
    yield prefill, decode
    for one in (*prefill, *decode):
        one.stop()


class Routers:
    """Routers of one cluster, by number."""

    def __init__(self, workers: tuple[list[Worker[Any]], list[Worker[Any]]]) -> None:
        self._peers = tuple([PeerAddress(one.name, one.info.address) for one in pool] for pool in workers)
        self.each: list[RouterApp] = []

    async def begin(self, at: int) -> RouterApp:
        """Start router `at`, or another one in its place."""
        config = RouterConfig(grpc_port=0, http_port=-1, name=f"router-{at}", namespace_key="key", policy="round-robin")
        app = RouterApp(config, ByteText(), NullObserver(), SECRETS)
        self.each[at : at + 1] = [app]
        await app.start()
        app.set_routers([PeerAddress(f"router-{number}", f"h:{number + 1}") for number in range(2)])
        await app.set_workers(*self._peers)
        await until(app.hub.ready, 10.0)
        await until(lambda: len(app._links._outboxes) == 4, 10.0)
        return app

    async def ask(self, at: int, prompt: str, session: str = "chat", tenant: str = "acme") -> tuple[str, str]:
        """Return the pair that has answered."""
        call = GenerateCall(prompt=prompt, max_tokens=2, session=session, tenant=tenant)
        events = [event async for event in self.each[at]._frontend.generate(call)]
        end = events[-1]
        assert isinstance(end, Finished) and end.stats is not None
        return end.stats.prefill_worker, end.stats.decode_worker


def served(
    workers: tuple[list[Worker[Any]], list[Worker[Any]]], body: Callable[[Routers], Awaitable[None]]
) -> None:
    async def whole() -> None:
        routers = Routers(workers)
        try:
            async with asyncio.timeout(60):
                for at in range(2):
                    await routers.begin(at)
                await body(routers)
        finally:
            for app in routers.each:
                await app.stop(0.0)

    asyncio.run(whole())


def test_what_waits_at_one_router_is_waited_for_at_the_other(
    workers: tuple[list[Worker[Any]], list[Worker[Any]]],
) -> None:
    """Guards the way of a line's words: through a worker, in the name that its router has proven, to the other's
    accounts."""

    async def body(routers: Routers) -> None:
        here, there = (app.hub.core for app in routers.each)
        words = [{"acme": (1500.0, False, False)}, {"acme": (1000.0, True, True)}, {"acme": (0.0, True, True)}]
        here.lines = lambda now, *, is_stopping: (0, words.pop() if words else {})  # type: ignore[method-assign]
        await until(lambda: "acme" in there._share._accounts and there._share._accounts["acme"].spent == 1000.0)
        assert there._share.is_waited_for_elsewhere and not here._share.is_waited_for_elsewhere
        await until(lambda: there._share._accounts["acme"].spent == 1500.0)
        assert not there._share.is_waited_for_elsewhere and not here._share._accounts

    served(workers, body)


def test_a_router_that_stops_says_first_that_nobody_waits_there(
    workers: tuple[list[Worker[Any]], list[Worker[Any]]],
) -> None:
    """Guards all others against one that stops in good order: until its last word had aged they were held back."""

    async def body(routers: Routers) -> None:
        here, there = (app.hub.core for app in routers.each)
        here._queue.advance = lambda now, out: None  # type: ignore[method-assign]
        here._share.enter(RequestId("a1"), "acme", 1.0, 0, 1)
        await until(lambda: there._share.is_waited_for_elsewhere)
        told_s = time.monotonic()
        stopping = asyncio.create_task(routers.each.pop(0).stop(1.0))
        await until(lambda: not there._share.is_waited_for_elsewhere)
        assert time.monotonic() - told_s < HEARD_S
        await stopping

    served(workers, body)


def test_a_conversation_goes_on_where_it_was_whichever_router_its_turns_reach(
    workers: tuple[list[Worker[Any]], list[Worker[Any]]],
) -> None:
    """Guards a client whose connections are at several routers: each had pins of its own. The prompts share nothing, so
    that only the pin leads there."""

    async def body(routers: Routers) -> None:
        homes = {}
        for at in range(4):
            name = f"talk {at}"
            homes[name] = await routers.ask(at % 2, f"{at} begins and shares nothing", name)
            assert await routers.ask(1 - at % 2, f"{at}: the second turn", name) == homes[name]
            assert await routers.ask(at % 2, f"{at}- the third", name) == homes[name]
        assert len(set(homes.values())) > 1, "a pair that is everybody's would prove nothing"
        sessions = routers.each[1].hub.core._sessions
        assert len(sessions) == 4
        await routers.ask(0, "of another tenant", "talk 0", "globex")
        await until(lambda: len(sessions) == 5)
        await routers.each[1].stop(0.0)
        begun = await routers.begin(1)
        await until(lambda: len(begun.hub.core._sessions) == 5, 10.0)
        for name, home in homes.items():
            assert await routers.ask(1, f"{name}: after a restart", name) == home

    served(workers, body)

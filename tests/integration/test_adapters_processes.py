"""Blocks of adapters between processes: a prefill worker and a decode worker exchange them under the adapter's digest,
and neither they nor a router that attaches later take one adapter's for another's, or for the base model's.

The fake model's keys and values are other ones under each adapter, and its next token depends on every byte of them: a
block that is found under another adapter is a wrong token.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from engine import identity
from engine.identity import chain, space
from engine.messages import Fault
from engine.types import FinishReason, RequestId, RequestRecord, SamplingParams
from router.app import RouterApp
from router.config import RouterConfig
from router.core.events import Complete, Submit
from router.status.observer import NullObserver
from tests.integration.adapted_worker import ADAPTERS, LAYOUT, AdaptedWorker, expected
from tests.router.fake_cluster import ByteText, until
from tests.secrets_of_tests import SECRETS

SIZE = LAYOUT.block_size
PROMPT = [7 * at % 251 for at in range(240)]
OTHER = [5 * at % 241 + 3 for at in range(160)]
UNDER = ("", *ADAPTERS)
FINGERPRINT = "fake"


@dataclass(slots=True)
class Told:
    """The client's side of a request."""

    ids: list[int] = field(default_factory=list)
    end: Complete | None = None
    fault: Fault | None = None

    def offered(self, now: float) -> None:
        pass

    def accepted(self, now: float) -> None:
        pass

    def interrupted(self, now: float) -> None:
        raise AssertionError("a worker was lost")

    def moved(self, stages: dict[str, float], now: float) -> None:
        raise AssertionError("no worker leaves")

    def tokens(self, ids: list[int], *rest: object) -> int | None:
        self.ids += ids
        return None

    def completed(self, end: Complete, now: float) -> None:
        self.end = end

    def failed(self, fault: Fault, outcome: FinishReason, retry_after_s: float | None, now: float) -> None:
        self.fault = fault


def record(name: str, tokens: list[int], adapter: str) -> RequestRecord:
    return RequestRecord(
        request=RequestId(name),
        tokens=tokens,
        prompt_tokens=len(tokens),
        max_tokens=9,
        seed=1,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
        adapter=adapter,
    )


async def asked(app: RouterApp, one: RequestRecord) -> Complete:
    """Ask, and compare the answer with one that was computed without any KV memory."""
    told = Told()
    app.hub.submit(Submit(one), told)
    await until(lambda: told.end is not None or told.fault is not None, 20.0)
    assert told.end is not None, told.fault
    assert told.ids == expected(one)
    return told.end


@pytest.fixture(params=["shm", "tcp"])
def workers(request: pytest.FixtureRequest) -> Iterator[tuple[AdaptedWorker, AdaptedWorker]]:
    prefill = AdaptedWorker("prefill", "p0", request.param)
    decode = AdaptedWorker("decode", "d0", request.param)
    yield prefill, decode
    prefill.close()
    decode.close()


async def routed(workers: tuple[AdaptedWorker, AdaptedWorker]) -> RouterApp:
    app = RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS)
    await app.start()
    await app.set_workers([workers[0].peer], [workers[1].peer])
    await until(app.hub.ready)
    return app


def depths(app: RouterApp, tokens: list[int], adapter: str) -> dict[str, int]:
    return app.hub.core.index.depths(chain(identity.root(space(b"", adapter), FINGERPRINT), tokens, SIZE))


def test_each_adapter_has_its_own_blocks_on_both_workers_and_in_every_router(
    workers: tuple[AdaptedWorker, AdaptedWorker],
) -> None:
    """Guards what a digest is there for, over the whole way: records, identities, handoffs, caches, and what workers
    tell a router of what they hold."""

    async def body() -> None:
        app = await routed(workers)
        try:
            answers = set[tuple[int, ...]]()
            for at, adapter in enumerate(UNDER):
                one = record(f"first-{at}", PROMPT, adapter)
                end = await asked(app, one)
                stats = end.stats
                assert (stats.prefill_cached_tokens, stats.decode_cached_tokens) == (0, 0), "found under another"
                assert end.expected_tokens == 0, "believed of another"
                assert stats.migrated_blocks == len(PROMPT) // SIZE and stats.prefill_worker == "p0"
                answers.add(tuple(expected(one)))
            assert len(answers) == len(UNDER), "the fake model answers alike under all of them"
            for at, adapter in enumerate(UNDER):
                end = await asked(app, record(f"again-{at}", PROMPT, adapter))
                assert end.stats.decode_cached_tokens == len(PROMPT) - SIZE and end.stats.migrated_blocks == 1
            await asked(app, record("other", OTHER, ADAPTERS[0]))
        finally:
            await app.stop(0.0)

        app = await routed(workers)
        try:
            whole, part = len(PROMPT) // SIZE, len(OTHER) // SIZE
            await until(lambda: depths(app, OTHER, ADAPTERS[0]) == {"p0": part, "d0": part}, 10.0)
            for adapter in UNDER:
                assert depths(app, PROMPT, adapter) == {"p0": whole, "d0": whole}
            for adapter in ("", ADAPTERS[1], "5ad2" * 8):
                assert not depths(app, OTHER, adapter), "another adapter's blocks are believed in"
            assert not depths(app, PROMPT, "5ad2" * 8)
            app.hub.core.index.check()
            end = await asked(app, record("behind the next router", OTHER, ADAPTERS[1]))
            assert end.expected_tokens == end.stats.prefill_cached_tokens == end.stats.decode_cached_tokens == 0
            assert end.stats.migrated_blocks == part
            end = await asked(app, record("and its own", OTHER, ADAPTERS[0]))
            assert end.stats.decode_cached_tokens == len(OTHER) - SIZE and end.stats.migrated_blocks == 1
        finally:
            await app.stop(0.0)

    asyncio.run(body())


def test_an_adapter_that_no_worker_has_is_refused(workers: tuple[AdaptedWorker, AdaptedWorker]) -> None:
    """Guards a request that the base model would answer in its adapter's place."""

    async def body() -> None:
        app = await routed(workers)
        told = Told()
        try:
            app.hub.submit(Submit(record("unknown", OTHER, "5ad2" * 8)), told)
            await until(lambda: told.end is not None or told.fault is not None, 20.0)
        finally:
            await app.stop(0.0)
        assert told.fault is not None and (told.fault.code, told.fault.field) == ("NOT_FOUND", "adapter")
        assert not told.ids

    asyncio.run(body())

"""Real workers, and one router after another: what they hold is known again at once."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import decode_worker.role
import worker.opening
import worker.worker
from decode_worker.role import open_decode_worker
from engine import plan
from engine.config import TierConfig
from engine.identity import SHORT_BYTES, chain
from engine.kv.layout import KVLayout
from engine.kv.manager import KVCacheManager
from engine.messages import DecodeRecord, HoldingTold, PeerAddress, WorkerInfo
from prefill_worker.role import open_prefill_worker
from router.app import RouterApp
from router.config import RouterConfig
from router.core import policy
from router.front.api import Finished, GenerateCall
from router.status.observer import NullObserver
from tests.integration.fake_device import fake_device
from tests.router.fake_cluster import ByteText, until
from tests.secrets_of_tests import SECRETS
from worker.config import DecodeConfig, PrefillConfig
from worker.telling import Tellings
from worker.worker import HELD_AT_ONCE, Worker

LAYOUT = KVLayout(kv_heads=1, layers=1, block_size=4, head_dim=1)
BLOCKS = 20_000
PROMPT_BLOCKS = 500
PROMPTS = BLOCKS // PROMPT_BLOCKS
KNOWN_WITHIN_S = 2.0


def prompt(number: int) -> list[int]:
    return [number + 1] * (PROMPT_BLOCKS * LAYOUT.block_size)


def fill(one: Worker[Any]) -> None:
    """Let a worker that does not run yet have served one prompt after another."""
    kv = one.parts.kv
    for number in range(PROMPTS):
        tokens = prompt(number)
        lease = kv.acquire(b"", tokens, match_limit=0, room_tokens=len(tokens))
        assert lease is not None
        kv.commit(lease, tokens)
        kv.release(lease)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker[Any]]]:
    monkeypatch.setattr(worker.opening, "open_device", lambda *config: fake_device(LAYOUT, BLOCKS))
    opened: list[Worker[Any]] = [
        open_prefill_worker("p0", PrefillConfig(), "127.0.0.1", 0, SECRETS),
        open_decode_worker("d0", DecodeConfig(), "127.0.0.1", 0, SECRETS),
    ]
    for one in opened:
        fill(one)
        one.start()
    yield opened
    for one in opened:
        one.stop()


def test_a_restarted_router_knows_what_workers_hold(workers: list[Worker[Any]]) -> None:
    """Guards the hit rate after a restart: 20,000 blocks of each worker are known within two seconds of the start, in
    pieces, and routed by; and the next router learns them as well."""
    assert BLOCKS > 4 * HELD_AT_ONCE
    p0, d0 = ([PeerAddress(one.name, one.info.address)] for one in workers)

    async def one_router() -> float:
        app = RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS)
        await app.start()
        try:
            began = time.monotonic()
            await app.set_workers(p0, d0)
            index = app.hub.core.index
            await until(lambda: all(index.held_blocks(name) == BLOCKS for name in ("p0", "d0")), 10.0)
            took_s = time.monotonic() - began
            root = workers[0].parts.kv.cache.root_identity(b"")
            for number in range(PROMPTS):
                depths = index.depths(chain(root, prompt(number), LAYOUT.block_size))
                assert depths == {"p0": PROMPT_BLOCKS, "d0": PROMPT_BLOCKS}
            index.check()
            return took_s
        finally:
            await app.stop(0.0)

    async def body() -> None:
        # The quicker of two, since others may have the cores for a while.
        assert min(await one_router(), await one_router()) < KNOWN_WITHIN_S

    asyncio.run(body())


def test_what_is_told_goes_on_where_the_stream_was_cut(
    workers: list[Worker[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a router whose connections break while it learns what workers hold: of more than 20 pieces each worker's
    stream is cut behind the fifth that is heard, and it hears next what followed; all is known in the end."""
    piece = BLOCKS // 20
    monkeypatch.setattr(worker.worker, "HELD_AT_ONCE", piece)
    prefill, decode = ([PeerAddress(one.name, one.info.address)] for one in workers)
    told: dict[str, list[bytes]] = {"p0": [], "d0": []}
    numbers: dict[str, list[int]] = {"p0": [], "d0": []}
    streams: list[str] = []

    async def body() -> None:
        app = RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS)
        hear, join = app.hub.heard, app.hub.joined

        def joined(peer: PeerAddress, info: WorkerInfo) -> None:
            streams.append(peer.name)
            join(peer, info)

        def heard(name: str, records: Sequence[DecodeRecord]) -> None:
            hear(name, records)
            for record in records:
                if isinstance(record, HoldingTold):
                    numbers[name].append(record.number)
                    packed = b"".join(run.blocks for run in record.runs)
                    told[name] += [packed[at : at + SHORT_BYTES] for at in range(0, len(packed), SHORT_BYTES)]
                    if len(numbers[name]) == 5:
                        app._links.sever(name)

        monkeypatch.setattr(app.hub, "heard", heard)
        monkeypatch.setattr(app.hub, "joined", joined)
        await app.start()
        try:
            await app.set_workers(prefill, decode)
            index = app.hub.core.index
            await until(lambda: all(index.held_blocks(name) == BLOCKS for name in told), 10.0)
            index.check()
        finally:
            await app.stop(0.0)

    asyncio.run(body())
    assert sorted(streams) == ["d0", "d0", "p0", "p0"]
    for name, blocks in told.items():
        assert len(blocks) - len(set(blocks)) <= piece, f"{name} tells more than a piece twice"
        assert numbers[name][:5] == [1, 2, 3, 4, 5] and len(numbers[name]) > 20
        assert numbers[name] == sorted(set(numbers[name])), "no number comes twice"


class Hits(NullObserver):
    """Adds up what prefill workers found in their caches."""

    def __init__(self) -> None:
        self.cached_tokens = 0

    def hits(self, expected_tokens: int, actual_tokens: int) -> None:
        self.cached_tokens += actual_tokens


PREFIXES = [f"{number:03d}" * 60 for number in range(12)]


async def realised(app: RouterApp, hits: Hits, lap: int) -> float:
    """The share of prompt tokens that were cached, while each prefix is asked for with another end, one by one."""
    hits.cached_tokens, tokens = 0, 0
    for number, prefix in enumerate(PREFIXES):
        text = f"{prefix} and {lap} of {number}"
        tokens += len(text)
        call = GenerateCall(prompt=text, max_tokens=4)
        events = [event async for event in app._frontend.generate(call)]
        assert isinstance(events[-1], Finished)
    return hits.cached_tokens / tokens


def hit_rates(told: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """The share of cached tokens before and after a restart of the router, over two prefill and two decode workers
    that are as quick as each other."""
    monkeypatch.setattr(worker.opening, "open_device", lambda *config: fake_device(LAYOUT, 4000))
    # Else all goes to the one that seems quicker.
    monkeypatch.setattr(plan.TokenSpeed, "s_per_token", policy.ASSUMED_S_PER_TOKEN)
    monkeypatch.setattr(decode_worker.role, "mean", lambda *measured: 0.0)
    if not told:
        monkeypatch.setattr(Tellings, "attached", lambda *told: None)
    prefills = [open_prefill_worker(f"p{n}", PrefillConfig(), "127.0.0.1", 0, SECRETS) for n in range(2)]
    decodes = [open_decode_worker(f"d{n}", DecodeConfig(), "127.0.0.1", 0, SECRETS) for n in range(2)]
    opened: list[Worker[Any]] = [*prefills, *decodes]
    for one in opened:
        one.start()
    peers = [[PeerAddress(one.name, one.info.address) for one in pool] for pool in (prefills, decodes)]

    async def laps(seed: int, first: int, count: int) -> float:
        hits = Hits()
        app = RouterApp(RouterConfig(grpc_port=0, http_port=-1, seed=seed), ByteText(), hits, SECRETS)
        await app.start()
        try:
            await app.set_workers(*peers)
            await until(app.hub.ready)
            await asyncio.sleep(0.3)  # as soon as a supervisor lets clients in
            return [await realised(app, hits, first + lap) for lap in range(count)][-1]
        finally:
            await app.stop(0.0)

    async def body() -> tuple[float, float]:
        return await laps(1, 0, 2), await laps(2, 2, 1)

    try:
        return asyncio.run(body())
    finally:
        for one in opened:
            one.stop()


def test_the_hit_rate_outlives_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what all of this is for: the first requests after a restart find what the last before it found."""
    before, after = hit_rates(True, monkeypatch)
    assert before > 0.85 and after > before - 0.05


def test_without_being_told_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: where nobody says what is held, every other prefix is looked for at the wrong worker."""
    before, after = hit_rates(False, monkeypatch)
    assert before > 0.85 and after < before - 0.15


@pytest.mark.parametrize("siblings", [1, 2])
def test_another_router_knows_of_a_prompt_that_is_about_to_be_read(
    siblings: int, workers: list[Worker[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a burst over several routers. Here workers tell nothing of what they have cached, and nobody is told by a
    router that takes itself for the only one."""
    monkeypatch.setattr(KVCacheManager, "take_cached", lambda kv: [])
    prefill, decode = ([PeerAddress(one.name, one.info.address)] for one in workers)
    text = "a prompt that no worker holds: " + "x" * 100
    call = GenerateCall(prompt=text, max_tokens=4)

    async def body() -> None:
        apps = [RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS) for _ in "ab"]
        for app in apps:
            await app.start()
        try:
            for app in apps:
                app.set_routers([PeerAddress(f"router-{at}", f"h:{at + 1}") for at in range(siblings)])
                await app.set_workers(prefill, decode)
            indexes = [app.hub.core.index for app in apps]
            await until(lambda: all(index.held_blocks("p0") == BLOCKS for index in indexes), 10.0)
            events = [event async for event in apps[0]._frontend.generate(call)]
            assert isinstance(events[-1], Finished)
            asked = chain(workers[0].parts.kv.cache.root_identity(b""), list(text.encode()), LAYOUT.block_size)
            assert indexes[0].match("p0", asked) == len(asked) > 20
            if siblings > 1:  # it is told on a stream of its own
                await until(lambda: indexes[1].match("p0", asked) == len(asked))
            assert indexes[1].match("p0", asked) == (len(asked) if siblings > 1 else 0)
        finally:
            for app in apps:
                await app.stop(0.0)

    asyncio.run(body())


def test_a_router_hears_where_blocks_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the way of these words through real workers: what no longer fits on the device is believed to lie where it
    does, and what a prompt brings back is believed to be back."""
    monkeypatch.setattr(worker.opening, "open_device", lambda *config: fake_device(LAYOUT, 64))
    tiers = TierConfig(host_bytes=1 << 20)
    opened: list[Worker[Any]] = [
        open_prefill_worker("p0", PrefillConfig(tiers=tiers), "127.0.0.1", 0, SECRETS),
        open_decode_worker("d0", DecodeConfig(), "127.0.0.1", 0, SECRETS),
    ]
    kv = opened[0].parts.kv
    for one in opened:
        one.start()
    prefill, decode = ([PeerAddress(one.name, one.info.address)] for one in opened)
    chains = [chain(kv.cache.root_identity(b""), list(f"{number}".encode() * 120), 4) for number in range(4)]

    def lies() -> list[tuple[int, int]]:
        """How much of each prompt is on the device, and how much in host memory alone."""
        assert kv.tiers is not None
        here, host = {node.identity for node in list(kv.cache.nodes())}, kv.tiers.host
        return [(sum(one in here for one in c), sum(one in host and one not in here for one in c)) for c in chains]

    async def body() -> None:
        app = RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), NullObserver(), SECRETS)
        await app.start()
        try:
            await app.set_workers(prefill, decode)
            await until(app.hub.ready)
            index = app.hub.core.index
            index.add("p0", 1000, 1000)  # by their age alone, all blocks would be on the device

            def believed() -> list[tuple[int, int]]:
                held = [index.tiers(c).get("p0", {"device": 0, "host": 0}) for c in chains]
                return [(one["device"], one["host"] - one["device"]) for one in held]

            for number in (0, 1, 2, 3, 0):
                call = GenerateCall(prompt=f"{number}" * 120, max_tokens=4)
                assert isinstance([event async for event in app._frontend.generate(call)][-1], Finished)
                await until(lambda: believed() == lies(), 3.0)
            assert sum(host for _, host in lies()) > 20, "nothing has been demoted"
            index.check()
        finally:
            await app.stop(0.0)

    try:
        asyncio.run(body())
    finally:
        for one in opened:
            one.stop()

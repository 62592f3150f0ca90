"""Decisions of a real router over real workers: its log is repeated bit for bit, and holds nothing that callers said.
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import worker.opening
from cluster.cli.replay import ReplayReport, replay
from decode_worker.role import open_decode_worker
from engine.kv.layout import KVLayout
from engine.messages import PeerAddress
from prefill_worker.role import open_prefill_worker
from router.app import RouterApp
from router.config import RouterConfig
from router.core.policies import POLICIES
from router.front.api import Finished, GenerateCall
from telemetry.router_metrics import RouterMetrics
from tests.integration.fake_device import fake_device
from tests.router.fake_cluster import ByteText, until
from tests.secrets_of_tests import SECRETS
from tests.telemetry.pages import Samples, samples
from worker.config import DecodeConfig, PrefillConfig
from worker.worker import Worker

LAYOUT = KVLayout(kv_heads=1, layers=1, block_size=4, head_dim=1)
SHADOWS = ("affinity-threshold", "power-of-two")
SECRET_WORDS = ["marigold", "thistle", "foxglove", "campion"]
TENANT = "hollyhock"
ROUNDS = 3


@pytest.fixture(scope="module")
def peers() -> Iterator[list[list[PeerAddress]]]:
    """Two prefill and two decode workers, so small that requests wait for room and are offered again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(worker.opening, "open_device", lambda *config: fake_device(LAYOUT, 60))
        prefills = [open_prefill_worker(f"p{n}", PrefillConfig(), "127.0.0.1", 0, SECRETS) for n in range(2)]
        decodes = [open_decode_worker(f"d{n}", DecodeConfig(), "127.0.0.1", 0, SECRETS) for n in range(2)]
    opened: list[Worker[Any]] = [*prefills, *decodes]
    for one in opened:
        one.start()
    yield [[PeerAddress(one.name, one.info.address) for one in pool] for pool in (prefills, decodes)]
    for one in opened:
        one.stop()


def serve(peers: list[list[PeerAddress]], log: Path | str, policy: str = "least-cost") -> Samples:
    """Let a router with shadows answer some requests, several at a time; return its metrics."""
    metrics = RouterMetrics("m", policy=policy, shadows=SHADOWS)
    config = RouterConfig(
        grpc_port=0, http_port=-1, policy=policy, seed=4, shadow_policies=SHADOWS, decision_log=str(log), settle_s=0.1
    )

    async def ask(app: RouterApp, number: int) -> None:
        word = SECRET_WORDS[number % len(SECRET_WORDS)]
        call = GenerateCall(prompt=f"{word} " * (4 + number % 5) + str(number), max_tokens=8, tenant=TENANT)
        events = [event async for event in app._frontend.generate(call)]
        assert isinstance(events[-1], Finished)

    async def body() -> None:
        app = RouterApp(config, ByteText(), metrics, SECRETS)
        await app.start()
        try:
            await app.set_workers(*peers)
            await until(app.hub.ready)
            for lap in range(ROUNDS):
                await asyncio.gather(*(ask(app, 10 * lap + number) for number in range(10)))
        finally:
            await app.stop(0.0)

    asyncio.run(body())
    return samples(metrics.render())


def counted(seen: Samples, what: str) -> float:
    return seen["headrace_router_decision_log_lines_total", (("what", what),)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_real_routers_log_is_repeated_bit_for_bit(
    policy: str, peers: list[list[PeerAddress]], tmp_path: Path
) -> None:
    """Guards what a log is for: something that a policy was given, and that is not in the record."""
    path = tmp_path / "log"
    seen = serve(peers, path, policy)
    report: ReplayReport = replay(path, SHADOWS)
    assert report.decisions >= 10 * ROUNDS and report.equal == report.decisions, report.first_difference
    assert counted(seen, "written") == report.decisions and not report.missing and not report.is_torn
    for shadow, other in report.others.items():
        labels = {what: (("policy", shadow), ("what", what)) for what in ("same", "other", "missed", "failed")}
        found = {what: seen["headrace_router_shadow_decisions_total", label] for what, label in labels.items()}
        same = other.decisions - other.otherwise
        said = {"same": same, "other": other.otherwise, "missed": 0, "failed": 0}
        assert found == said, "what the shadow has said on live traffic is what the replay says"


def test_nothing_that_a_caller_said_is_in_the_log(peers: list[list[PeerAddress]], tmp_path: Path) -> None:
    """Guards prompts, as text and as token ids, and tenants."""
    path = tmp_path / "log"
    serve(peers, path)
    text = path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    for word in (*SECRET_WORDS, TENANT):
        assert word not in text and ",".join(map(str, word.encode())) not in text
    assert {"demand", "prompt_tokens", "before"} <= set(re.findall(r'"(\w+)":', text))
    assert not re.findall(r"\[\s*\d+\s*,", text), "no list of numbers"


def test_a_full_disk_stops_no_request(peers: list[list[PeerAddress]]) -> None:
    """Guards clients against the log: all are answered, and what is lost is counted."""
    seen = serve(peers, "/dev/full")
    assert counted(seen, "dropped") >= 10 * ROUNDS and counted(seen, "written") == 0
    ended = [seen["headrace_requests_total", (("outcome", outcome),)] for outcome in ("length", "stop")]
    assert sum(ended) == 10 * ROUNDS

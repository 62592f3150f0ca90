"""Lower tiers in real processes with the demo model: a prefix that has left the device comes back, also after a
restart."""

import random
import time
import urllib.request
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.launch import Cluster, make_launcher
from decode_worker.config import DecodeConfig
from engine.config import EngineConfig, TierConfig
from engine.model.cache import prepare
from engine.types import SamplingParams
from prefill_worker.config import PrefillConfig
from router.api import Delta, Finished, GenerateCall
from router.client import Client
from router.config import RouterConfig
from tests.integration.probe import Probe

BLOCK_BYTES = 720 * 1024
SMALL = EngineConfig(pool_bytes=16 * BLOCK_BYTES)


def _ask(client: Client, prompt: list[int]) -> tuple[list[int], Finished]:
    call = GenerateCall(
        prompt=prompt, max_tokens=4, ignore_eos=True, sampling=SamplingParams(temperature=0.0)
    )
    tokens: list[int] = []
    for event in client.generate(call):
        if isinstance(event, Delta):
            tokens += event.token_ids
        elif isinstance(event, Finished):
            return tokens, event
    raise AssertionError("the stream has no end")


def _hits(worker: Probe, tier: str) -> float:
    """Blocks that the prefill worker has loaded from a tier, by its own account."""
    worker.wait_quiet(10.0)
    time.sleep(0.5)  # a report more
    assert worker.info is not None
    with urllib.request.urlopen(f"http://{worker.info.metrics_address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    name = "headrace_kv_tier_hit_blocks_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and f'tier="{tier}"' in line)


def _cluster(model_dir: Path, disk_dir: Path) -> ClusterConfig:
    tiers = TierConfig(
        host_bytes=32 * BLOCK_BYTES, disk_bytes=200 * BLOCK_BYTES, disk_dir=str(disk_dir)
    )
    return ClusterConfig(
        launcher="process",
        router=RouterConfig(grpc_port=0, http_port=-1),
        prefill=PrefillConfig(engine=SMALL, tiers=tiers),
        decode=DecodeConfig(engine=SMALL),
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(None, tmp_path_factory.mktemp("models"))


def test_a_prefix_that_left_the_device_comes_back_in_this_life_and_in_the_next(
    model_dir: Path, tmp_path: Path
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(161)] for _ in range(6)]
    config = _cluster(model_dir, tmp_path)
    first: list[list[int]] = []
    for life in range(2):
        cluster = Cluster(config, make_launcher("process"), model_dir=str(model_dir))
        addresses = cluster.start()
        client = Client(addresses.grpc)
        where = {worker.name: worker.address for worker in addresses.workers}
        prefill = Probe("prefill", where["prefill-0"])
        try:
            if life == 0:
                first = [_ask(client, prompt)[0] for prompt in prompts]
            again = [_ask(client, prompt) for prompt in prompts]
            assert [tokens for tokens, _ in again] == first, "the same tokens, from loaded blocks"
            assert sum(finished.cached_tokens for _, finished in again) > 0
            assert _hits(prefill, "disk") > 0
            assert life == 1 or _hits(prefill, "host") > 0
        finally:
            prefill.close()
            client.close()
            cluster.stop()
    assert list((tmp_path / "prefill-0").glob("*.segment"))

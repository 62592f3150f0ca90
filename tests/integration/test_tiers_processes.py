"""Lower tiers in real processes with the demo model: a prefix that has left the device comes back, also after a
restart; and a disk that does not answer costs no request."""

import errno
import os
import random
import time
import urllib.request
from pathlib import Path

import pytest
from msgspec.structs import replace

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from engine.config import EngineConfig, TierConfig
from engine.types import SamplingParams
from router.config import RouterConfig
from router.front.api import Delta, Finished, GenerateCall
from router.grpc.client import Client
from tests.integration.probe import Probe
from transfer.config import TransferConfig
from worker.config import DecodeConfig, PrefillConfig

BLOCK_BYTES = 720 * 1024
SMALL = EngineConfig(pool_bytes=16 * BLOCK_BYTES)
STUCK_S = 2.0


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


def _counted(worker: Probe, family: str, label: str = "") -> float:
    """Return the worker's own account, once it is at rest."""
    worker.wait_quiet(10.0)
    time.sleep(0.5)  # a report more
    assert worker.info is not None
    with urllib.request.urlopen(f"http://{worker.info.metrics_address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith(f"headrace_{family}{{") and label in line]
    assert found, family
    return sum(float(line.split()[-1]) for line in found)


def _hits(worker: Probe, tier: str) -> float:
    """Blocks that it has loaded from a tier."""
    return _counted(worker, "kv_tier_hit_blocks_total", f'tier="{tier}"')


def _cluster(disk_dir: Path, role: str, engine: EngineConfig = SMALL) -> ClusterConfig:
    """Start a cluster with lower tiers under the worker of one role."""
    tiers = {
        role: TierConfig(
            host_bytes=32 * BLOCK_BYTES, disk_bytes=200 * BLOCK_BYTES, disk_dir=str(disk_dir)
        )
    }
    transfer = TransferConfig(stuck_s=STUCK_S)
    return ClusterConfig(
        launcher="process",
        router=RouterConfig(grpc_port=0, http_port=-1),
        prefill=PrefillConfig(
            engine=engine, transfer=transfer, tiers=tiers.get("prefill", TierConfig())
        ),
        decode=DecodeConfig(
            engine=engine, transfer=transfer, tiers=tiers.get("decode", TierConfig())
        ),
    )


@pytest.fixture(scope="module")
def model_dir(demo_model: Path) -> Path:
    return demo_model


@pytest.mark.parametrize(
    "engine",
    [SMALL, pytest.param(replace(SMALL, tensor_parallel=3, rank_pools="own"), marks=pytest.mark.slow)],
    ids=["one process", "three ranks with a pool each"],
)
def test_a_prefix_that_left_the_device_comes_back_in_this_life_and_in_the_next(
    model_dir: Path, tmp_path: Path, engine: EngineConfig
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(161)] for _ in range(6)]
    config = _cluster(tmp_path, "prefill", engine)
    first: list[list[int]] = []
    for life in range(2):
        cluster = Cluster(config, make_launcher("process"), model_dir=str(model_dir))
        addresses = cluster.start()
        client = Client(addresses.grpc)
        where = {worker.name: worker.address for worker in addresses.workers}
        prefill = Probe("prefill", where["prefill-0"], cluster.keys.valid())
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


def _waiting_in(path: Path) -> bool:
    """Say whether somebody is stuck in the call that opens this fifo for reading; nobody is any more after this."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        assert error.errno == errno.ENXIO
        return False
    return True


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_disk_that_does_not_answer_costs_no_request(model_dir: Path, tmp_path: Path, role: str) -> None:
    """Guards whoever waits for a load: its tokens are computed, and the worker lives on without its disk. The files
    that it knows of have become fifos, whose opening blocks in the kernel."""
    rng = random.Random(2)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(161)] for _ in range(6)]
    cluster = Cluster(_cluster(tmp_path, role), make_launcher("process"), model_dir=str(model_dir))
    addresses = cluster.start()
    client = Client(addresses.grpc)
    (worker,) = [worker for worker in addresses.workers if worker.name == f"{role}-0"]
    probe = Probe(role, worker.address, cluster.keys.valid())
    try:
        first = [_ask(client, prompt)[0] for prompt in prompts]
        probe.wait_quiet(10.0)
        files = list((tmp_path / worker.name).glob("*.segment"))
        assert files
        for file in files:
            file.unlink()
            os.mkfifo(file)
        again = [_ask(client, prompt)[0] for prompt in prompts]
        assert again == first
        assert _counted(probe, "kv_tier_disk_given_up") == 1
        assert _counted(probe, "kv_tier_broken_total", 'what="call"') == 1
        assert _hits(probe, "disk") == 0
        assert [_ask(client, prompt)[0] for prompt in prompts] == first
        assert sum(map(_waiting_in, files)) == 1, "nothing was stuck, or more than one call was"
        os.kill(worker.pid, 0)
        assert cluster.workers[worker.name].pid == worker.pid
    finally:
        probe.close()
        client.close()
        cluster.stop()

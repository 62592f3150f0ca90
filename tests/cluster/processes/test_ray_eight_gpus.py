"""`deploy/ray/headrace-8gpu.toml` on one Ray node that pretends to have eight GPUs, and `headrace-2x8gpu.toml` on two:
their workers find one each. `headrace-8gpu-2x4.toml` and `headrace-2x8gpu-4x4.toml`: four each, of one host."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster
from cluster.processes.leftovers import descendants, running
from cluster.processes.placement import RayConfig
from cluster.processes.ray_cluster import RayClusterLauncher
from cluster.processes.ray_launcher import RAY_VARIABLES, imported_ray
from cluster.processes.spec import LaunchError
from engine.config import EngineConfig
from tests.cluster.processes.test_launchers import CONFIG, FAKES, eventually
from tests.cluster.processes.test_ray_cluster import STORE_BYTES, places
from tests.deploy.test_ray_files import DEPLOY, resolved

pytestmark = [pytest.mark.ray, pytest.mark.slow]
POOLS = ("prefill", "decode")


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch, *labels: dict[str, str], each: int = 8) -> Iterator[Any]:
    """A Ray cluster of one node for each of `labels`, with so many GPUs each, of which the first is the head."""
    imported_ray()
    from ray.cluster_utils import Cluster as Nodes

    before = descendants()
    for name, value in RAY_VARIABLES.items():
        monkeypatch.setenv(name, value)
    nodes = Nodes()
    try:
        for own in labels:
            more = {} if nodes.head_node else {"include_dashboard": False}
            nodes.add_node(num_cpus=0, num_gpus=each, labels=own, object_store_memory=STORE_BYTES, **more)
        yield nodes
    finally:
        nodes.shutdown()
    left = {pid: name for pid, name in descendants().items() if pid not in before}
    assert eventually(lambda: not running(left), 20.0), running(left)


def of_fakes(ours: ClusterConfig) -> ClusterConfig:
    """Return a configuration of workers that compute nothing, in numbers and with engines of `ours`."""
    return msgspec.structs.replace(
        CONFIG,
        prefill_workers=ours.prefill_workers,
        decode_workers=ours.decode_workers,
        prefill=msgspec.structs.replace(CONFIG.prefill, engine=ours.prefill.engine),
        decode=msgspec.structs.replace(CONFIG.decode, engine=ours.decode.engine),
    )


def shown() -> dict[str, str]:
    """The GPUs that each process sees, by name."""
    import ray

    return {
        name: ray.get(ray.get_actor(name).__ray_call__.remote(lambda actor: os.environ.get("CUDA_VISIBLE_DEVICES", "")))
        for name in ray.util.list_named_actors()
    }


def test_eight_workers_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards two workers on one GPU, and a worker that waits for a node of its pool, which there is none of."""
    ours = resolved(DEPLOY / "ray/headrace-8gpu.toml")
    with pretended(monkeypatch, {}) as nodes:
        launcher = RayClusterLauncher(msgspec.structs.replace(ours.ray, address=nodes.address))
        with Cluster(of_fakes(ours), launcher, FAKES, model_dir="x") as cluster:
            cluster.start()
            seen = shown()
    assert seen.pop("router") == ""
    assert sorted(seen) == [f"{pool}-{at}" for pool in sorted(POOLS) for at in range(4)]
    assert sorted(seen.values()) == [str(at) for at in range(8)]


def test_sixteen_workers_of_two_hosts_have_a_gpu_each_on_their_pools_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a pool that is spread over both hosts, where its blocks would go over the network for nothing, and workers
    that wait for GPUs of the other."""
    ours = resolved(DEPLOY / "ray/headrace-2x8gpu.toml")
    with pretended(monkeypatch, *({"pool": pool} for pool in POOLS)) as nodes:
        launcher = RayClusterLauncher(msgspec.structs.replace(ours.ray, address=nodes.address))
        with Cluster(of_fakes(ours), launcher, FAKES, model_dir="x") as cluster:
            cluster.start()
            seen, at = shown(), places()
    assert seen.pop("router") == "" and at.pop("router").startswith("prefill "), "not where `headrace up` runs"
    for pool in POOLS:
        assert sorted(gpu for name, gpu in seen.items() if name.startswith(pool)) == [str(at) for at in range(8)]
    assert len(at) == 16 and all(name.startswith(place.split()[0]) for name, place in at.items()), at


def test_workers_of_four_ranks_have_half_of_their_pools_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards ranks of one worker on two hosts, two workers that see one GPU, and a worker on the other pool's host."""
    for name, hosts in (("headrace-8gpu-2x4.toml", 1), ("headrace-2x8gpu-4x4.toml", 2)):
        ours = resolved(DEPLOY / "ray" / name)
        labels: list[dict[str, str]] = [{}] if hosts == 1 else [{"pool": pool} for pool in POOLS]
        with pretended(monkeypatch, *labels) as nodes:
            launcher = RayClusterLauncher(msgspec.structs.replace(ours.ray, address=nodes.address))
            with Cluster(of_fakes(ours), launcher, FAKES, model_dir="x") as cluster:
                cluster.start()
                seen, at = shown(), places()
        assert seen.pop("router") == "" and len(seen) == 2 * hosts
        halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
        for some in POOLS if hosts == 2 else ("",):
            found = [sorted(map(int, gpus.split(","))) for worker, gpus in seen.items() if worker.startswith(some)]
            assert sorted(found) == halves, seen
        if hosts == 2:
            at.pop("router")
            assert all(worker.startswith(place.split()[0]) for worker, place in at.items()), at


def of_ranks(ranks: int) -> ClusterConfig:
    """Two workers that compute nothing, of so many ranks each; what a cluster may be set to is decided elsewhere."""
    engine = EngineConfig(device="cuda", tensor_parallel=ranks)
    one = msgspec.structs.replace(CONFIG, prefill_workers=1, decode_workers=1)
    return msgspec.structs.replace(
        one,
        prefill=msgspec.structs.replace(CONFIG.prefill, engine=engine),
        decode=msgspec.structs.replace(CONFIG.decode, engine=engine),
    )


@pytest.mark.parametrize(("nodes", "each"), [(1, 8), (2, 4)])
def test_the_ranks_of_a_worker_are_on_one_host(monkeypatch: pytest.MonkeyPatch, nodes: int, each: int) -> None:
    """Guards ranks that see GPUs of another worker, or fewer than they are, and a worker that is spread over hosts."""
    with pretended(monkeypatch, *[{}] * nodes, each=each) as ray_nodes:
        launcher = RayClusterLauncher(RayConfig(address=ray_nodes.address, pool_label=""))
        with Cluster(of_ranks(4), launcher, FAKES, model_dir="x") as cluster:
            cluster.start()
            seen = shown()
    assert seen.pop("router") == ""
    found = [sorted(map(int, gpus.split(","))) for gpus in seen.values()]
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]] if nodes == 1 else [[0, 1, 2, 3]] * 2
    assert sorted(found) == halves


def test_ranks_that_no_host_has_gpus_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a start that waits for ever for a host of eight GPUs, where there are two of four."""
    with pretended(monkeypatch, {}, {}, each=4) as ray_nodes:
        launcher = RayClusterLauncher(RayConfig(address=ray_nodes.address, pool_label=""))
        with (
            Cluster(of_ranks(8), launcher, FAKES, model_dir="x") as cluster,
            pytest.raises(LaunchError, match="need 8 GPUs of one host, and no node has more than 4"),
        ):
            cluster.start()

"""`deploy/ray/headrace-8gpu.toml` on one Ray node that pretends to have eight GPUs, and `headrace-2x8gpu.toml` on two:
their workers find one each."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster
from cluster.processes.leftovers import descendants, running
from cluster.processes.ray_cluster import RayClusterLauncher
from cluster.processes.ray_launcher import RAY_VARIABLES, imported_ray
from tests.cluster.processes.test_launchers import CONFIG, FAKES, eventually
from tests.cluster.processes.test_ray_cluster import STORE_BYTES, places
from tests.deploy.test_ray_files import DEPLOY, resolved

pytestmark = [pytest.mark.ray, pytest.mark.slow]
POOLS = ("prefill", "decode")


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch, *labels: dict[str, str]) -> Iterator[Any]:
    """A Ray cluster of one node for each of `labels`, with eight GPUs each, of which the first is the head."""
    imported_ray()
    from ray.cluster_utils import Cluster as Nodes

    before = descendants()
    for name, value in RAY_VARIABLES.items():
        monkeypatch.setenv(name, value)
    nodes = Nodes()
    try:
        for own in labels:
            more = {} if nodes.head_node else {"include_dashboard": False}
            nodes.add_node(num_cpus=0, num_gpus=8, labels=own, object_store_memory=STORE_BYTES, **more)
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

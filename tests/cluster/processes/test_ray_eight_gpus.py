"""`deploy/ray/headrace-8gpu.toml` on one Ray node that pretends to have eight GPUs: its workers find one each."""

import os

import msgspec
import pytest

from cluster.processes.launch import Cluster
from cluster.processes.leftovers import descendants, running
from cluster.processes.ray_cluster import RayClusterLauncher
from cluster.processes.ray_launcher import RAY_VARIABLES, imported_ray
from tests.cluster.processes.test_launchers import CONFIG, FAKES, eventually
from tests.cluster.processes.test_ray_cluster import STORE_BYTES
from tests.deploy.test_ray_files import DEPLOY, resolved

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_eight_workers_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards two workers on one GPU, and a worker that waits for a node of its pool, which there is none of."""
    imported_ray()
    from ray.cluster_utils import Cluster as Nodes

    before = descendants()
    for name, value in RAY_VARIABLES.items():
        monkeypatch.setenv(name, value)
    ours = resolved(DEPLOY / "ray/headrace-8gpu.toml")
    head = {"num_cpus": 0, "num_gpus": 8, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    nodes = Nodes(initialize_head=True, head_node_args=head)
    try:
        launcher = RayClusterLauncher(msgspec.structs.replace(ours.ray, address=nodes.address))
        config = msgspec.structs.replace(
            CONFIG,
            prefill_workers=ours.prefill_workers,
            decode_workers=ours.decode_workers,
            prefill=msgspec.structs.replace(CONFIG.prefill, engine=ours.prefill.engine),
            decode=msgspec.structs.replace(CONFIG.decode, engine=ours.decode.engine),
        )
        with Cluster(config, launcher, FAKES, model_dir="x") as cluster:
            cluster.start()
            import ray

            shown = {
                name: ray.get(
                    ray.get_actor(name).__ray_call__.remote(lambda actor: os.environ.get("CUDA_VISIBLE_DEVICES", ""))
                )
                for name in ray.util.list_named_actors()
            }
        assert shown.pop("router") == ""
        assert sorted(shown) == [f"{pool}-{at}" for pool in ("decode", "prefill") for at in range(4)]
        assert sorted(shown.values()) == [str(at) for at in range(8)]
    finally:
        nodes.shutdown()
    left = {pid: name for pid, name in descendants().items() if pid not in before}
    assert eventually(lambda: not running(left), 20.0), running(left)

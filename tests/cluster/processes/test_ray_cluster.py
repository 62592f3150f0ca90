"""Actors on a Ray cluster of several nodes that others run; the nodes are processes of this machine."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster
from cluster.processes.leftovers import descendants, running
from cluster.processes.placement import RayConfig
from cluster.processes.ray_cluster import RayClusterLauncher
from cluster.processes.ray_launcher import RAY_VARIABLES, imported_ray
from cluster.processes.ray_leave import empty
from cluster.processes.spec import ChildReady, LaunchError
from cluster.processes.supervisor import RestartConfig
from engine.config import EngineConfig
from tests.cluster.processes.test_launchers import CONFIG, FAKES, eventually, gone
from worker.config import DecodeConfig, PrefillConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
STORE_BYTES = 80 * 1024 * 1024
CLUSTER = msgspec.structs.replace(CONFIG, restart=RestartConfig(limit=3), decode_workers=2)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A head, one node for prefill workers and two for decode workers, on which each test has a cluster of ours. They
    are all there until the last test, which empties one of them."""
    imported_ray()
    from ray.cluster_utils import Cluster as Nodes

    before = descendants()
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in RAY_VARIABLES.items():
            patched.setenv(name, value)
        nodes = Nodes(initialize_head=True, head_node_args=head)
        try:
            for pool in ("prefill", "decode", "decode"):
                nodes.add_node(num_cpus=1, num_gpus=1, labels={"pool": pool}, object_store_memory=STORE_BYTES)
            yield nodes
        finally:
            nodes.shutdown()
    left = {pid: name for pid, name in descendants().items() if pid not in before}
    assert eventually(lambda: not running(left), 20.0), running(left)


@contextmanager
def watched(nodes: Any, config: ClusterConfig = CLUSTER) -> Iterator[Cluster]:
    """Our cluster of fakes on those nodes, watched by a thread."""
    launcher = RayClusterLauncher(RayConfig(address=nodes.address))
    with Cluster(config, launcher, FAKES, model_dir="x") as cluster:
        cluster.start()
        end = threading.Event()
        watcher = threading.Thread(target=cluster.watch, args=(end,))
        watcher.start()
        try:
            yield cluster
        finally:
            end.set()
            watcher.join()


def places() -> dict[str, str]:
    """The pool label of the node that each process is on, and its id."""
    import ray

    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    found = {}
    for name in ray.util.list_named_actors():
        node = ray.get(ray.get_actor(name).node.remote())
        found[name] = f"{labels[node].get('pool', 'head')} {node}"
    return found


def test_workers_go_to_their_pools_and_are_ended_on_their_nodes(ray_cluster: Any) -> None:
    """Guards against a pool on the wrong node or heaped on one, a kill by a pid of another host, and a shutdown that
    takes the Ray of others with it."""
    with watched(ray_cluster) as cluster:
        at = places()
        assert {name: place.split()[0] for name, place in at.items()} == {
            "prefill-0": "prefill",
            "decode-0": "decode",
            "decode-1": "decode",
            "router": "head",
        }
        assert at["decode-0"] != at["decode-1"]
        workers = cluster.workers
        assert all(not up.address.startswith("127.") for up in workers.values()), workers
        old = workers["decode-0"]
        # A stopped process answers nothing: only a signal from its own host ends it.
        os.kill(old.pid, signal.SIGSTOP)
        cluster._children["decode-0"].kill()
        assert eventually(lambda: gone(old.pid), 10.0)
        assert eventually(lambda: is_new(cluster, old), 30.0)
        again = places()
        assert again["decode-0"] == at["decode-0"], "the other node has one already"
        pids = [up.pid for up in [*cluster.workers.values(), cluster.router]]
    assert eventually(lambda: all(gone(pid) for pid in pids), 10.0)
    imported_ray().init(address=ray_cluster.address, logging_level=40)
    try:
        assert sum(node["Alive"] for node in imported_ray().nodes()) == 4, "it was not ours to end"
    finally:
        imported_ray().shutdown()


def test_a_worker_on_a_gpu_has_it_for_itself(ray_cluster: Any) -> None:
    """Guards against two workers on one GPU of a host that has several, as Ray gives none to who asks for none."""
    engine = EngineConfig(device="cuda")
    config = msgspec.structs.replace(
        CLUSTER, prefill=PrefillConfig(engine=engine), decode=DecodeConfig(engine=engine)
    )
    with watched(ray_cluster, config):
        import ray

        shown = {
            name: ray.get(
                ray.get_actor(name).__ray_call__.remote(
                    lambda actor: os.environ.get("CUDA_VISIBLE_DEVICES", "")
                )
            )
            for name in ray.util.list_named_actors()
        }
        free = ray.available_resources().get("GPU", 0.0)
    assert shown.pop("router") == ""
    assert shown == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), "0")
    assert free == 0.0, "three GPUs were there, and three were asked for"


def test_a_process_that_nobody_can_end_is_named_with_its_host(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a shutdown that says all is well because a host said nothing."""
    launcher = RayClusterLauncher(RayConfig(address=ray_cluster.address))
    cluster = Cluster(CLUSTER, launcher, FAKES, model_dir="x")
    frozen: list[int] = []
    try:
        cluster.start()
        worker = cluster.workers["decode-0"]
        (process,) = (one.process for one in launcher._children if one.child.spec.name == "decode-0")
        asked = launcher._keepers[process.node].__ray_call__.remote(lambda keeper: os.getpid())
        keeper = imported_ray().get(asked)
        monkeypatch.setattr("cluster.processes.ray_cluster.ANSWER_TIMEOUT_S", 2.0)
        monkeypatch.setattr("cluster.processes.ray_cluster.END_TIMEOUT_S", 1.0)
        frozen = [worker.pid, keeper]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        named = rf"^decode-0 \(process {worker.pid} on [\d.]+\) may still run: its host does not answer$"
        with pytest.raises(LaunchError, match=named):
            cluster.stop()
    finally:
        for pid in frozen:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        cluster.stop()


SECOND = """
import sys
from cluster.processes import ray_cluster
from cluster.processes.placement import RayConfig
from cluster.processes.spec import LaunchError
ray_cluster.LEFT_S = 1.0
launcher = ray_cluster.RayClusterLauncher(RayConfig(address=sys.argv[1]))
try:
    launcher.open()
except LaunchError as error:
    print(error)
finally:
    launcher.close()
"""


def test_one_cluster_of_ours_on_a_ray(ray_cluster: Any) -> None:
    """Guards against a `headrace up` on another host of the same Ray that takes names, or processes, of the first."""
    with watched(ray_cluster) as cluster:
        before = {name: up.pid for name, up in cluster.workers.items()}
        command = [sys.executable, "-c", SECOND, ray_cluster.address]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60.0, cwd=ROOT)
        there = "this Ray already runs decode-0, decode-1, prefill-0, router: `headrace down`"
        assert said.stdout.startswith(there), said
        assert {name: up.pid for name, up in cluster.workers.items()} == before
        assert not any(gone(pid) for pid in before.values())


def is_new(cluster: Cluster, old: ChildReady) -> bool:
    return cluster.workers["decode-0"].incarnation != old.incarnation


def test_a_node_that_is_emptied_loses_its_workers_to_another(ray_cluster: Any) -> None:
    """Guards against a preStop hook that kills requests, and against a replacement on the node that is about to go."""
    with watched(ray_cluster) as cluster:
        import ray

        before = places()
        old = cluster.workers["decode-0"]
        node = before["decode-0"].split()[1]
        assert empty(ray, node, 20.0) == ["decode-0"]
        assert eventually(lambda: gone(old.pid), 10.0)
        assert eventually(lambda: is_new(cluster, old), 30.0)
        after = places()
        assert after["decode-0"] == after["decode-1"] == before["decode-1"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:ray"])
def test_no_ray_is_told_plainly(address: str) -> None:
    """Guards against minutes of silence where nobody listens."""
    with pytest.raises(LaunchError, match=rf"no Ray cluster at {address} \(ray.address\): \w+"):
        RayClusterLauncher(RayConfig(address=address)).open()

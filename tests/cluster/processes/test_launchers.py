"""Both launchers, with fakes hosted the way the real workers are: start, failure, stop, nothing left."""

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec
import pytest

from cluster.config import ClusterConfig
from cluster.processes.child import SetWorkers, encode_line
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.leftovers import SHARED_MEMORY, descendants, mapped_segments, running
from cluster.processes.process_launcher import ProcessLauncher
from cluster.processes.ray_child import RayChild
from cluster.processes.ray_launcher import RayLauncher, imported_ray
from cluster.processes.spec import ChildSpec, Launcher, LaunchError, Sealed
from cluster.processes.supervisor import RestartConfig
from engine.config import EngineConfig
from engine.messages import PeerAddress
from router.config import RouterConfig
from tests.chaos.faults import freeze, frozen
from worker.config import PrefillConfig

FAKES = {
    "prefill": "tests.cluster.fakes:FakeWorker",
    "decode": "tests.cluster.fakes:FakeWorker",
    "router": "tests.cluster.fakes:FakeRouter",
}
LAUNCHERS = [
    "process",
    pytest.param("ray", marks=pytest.mark.ray),
]
CONFIG = ClusterConfig(
    start_timeout_s=60.0,
    stop_grace_s=1.0,
    restart=RestartConfig(limit=0),
    router=RouterConfig(grpc_port=0, http_port=-1),
)


def children() -> set[int]:
    return set(descendants())


def orphaned() -> set[str]:
    """Shared memory of nobody: other programs of this machine may come and go with theirs."""
    everybody = {int(entry.name): "" for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return {SHARED_MEMORY + name for name in os.listdir(SHARED_MEMORY)} - mapped_segments(everybody)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


class LentRay:
    """A Ray that outlives the clusters which it is lent to. They leave nothing there."""

    def __init__(self, launcher: RayLauncher) -> None:
        self.launcher = launcher

    def open(self) -> None:
        pass

    def launch(self, spec: ChildSpec) -> RayChild:
        return self.launcher.launch(spec)

    def close(self) -> None:
        named = imported_ray().util.list_named_actors
        assert eventually(lambda: not named(), 10.0), named()

    @classmethod
    @contextmanager
    def started(cls) -> Iterator["LentRay"]:
        launcher = RayLauncher()
        launcher.open()
        try:
            yield cls(launcher)
        finally:
            launcher.close()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_start_and_stop_leave_nothing(name: str) -> None:
    """Guards against orphans, against a router told of no workers, and against thread counts that
    are set too late or differ between the launchers."""
    before, segments = children(), orphaned()
    config = msgspec.structs.replace(
        CONFIG, prefill=PrefillConfig(engine=EngineConfig(threads=3)), prefill_workers=2
    )
    cluster = Cluster(config, make_launcher(name), FAKES, model_dir="x")
    with cluster:
        addresses = cluster.start()
        host, port = addresses.grpc.split(":")
        with socket.create_connection((host, int(port)), timeout=5):
            pass
        assert {up.name: up.address for up in addresses.workers} == {
            "prefill-0": "127.0.0.1:3",
            "prefill-1": "127.0.0.1:3",
            "decode-0": "127.0.0.1:1",
        }
        pids = {up.pid for up in addresses.workers}
        assert len(pids) == 3 and os.getpid() not in pids
    cluster.stop()
    assert all(gone(pid) for pid in pids)
    assert eventually(lambda: children() <= before, within_s=3.0), children() - before
    assert eventually(lambda: orphaned() <= segments, within_s=3.0), orphaned() - segments


def start_and_watch(cluster: Cluster) -> None:
    cluster.start()
    cluster.watch()


def fail(launcher: Launcher) -> None:
    """A worker cannot start, and one dies later."""
    broken = {**FAKES, "decode": "tests.cluster.fakes:FailingWorker"}
    with (
        Cluster(CONFIG, launcher, broken, model_dir="x") as cluster,
        pytest.raises(LaunchError, match=r"^decode-0: no such model file: /nowhere$"),
    ):
        cluster.start()
    killed = {**FAKES, "decode": "tests.cluster.fakes:KilledWorker"}
    with (
        Cluster(CONFIG, launcher, killed, model_dir="x") as cluster,
        pytest.raises(LaunchError, match=r"decode-0: (killed by SIGKILL|its process died)"),
    ):
        start_and_watch(cluster)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_failures_end_the_cluster_with_one_line(name: str) -> None:
    """Guards against a start that hangs on the healthy rest, and against a death nobody notices."""
    before = children()
    with LentRay.started() if name == "ray" else nullcontext(make_launcher(name)) as launcher:
        fail(launcher)
    assert eventually(lambda: children() <= before, within_s=3.0), children() - before


def test_a_dead_engine_ends_the_cluster() -> None:
    """Guards against a process that lives on, and looks well, after its engine thread died."""
    dying = {**FAKES, "prefill": "tests.cluster.fakes:DyingWorker"}
    with (
        Cluster(CONFIG, ProcessLauncher(), dying, model_dir="x") as cluster,
        pytest.raises(LaunchError, match="prefill-0: RuntimeError: block 7 is owned twice"),
    ):
        start_and_watch(cluster)


@pytest.mark.parametrize(
    ("worker", "why"),
    [("SilentWorker", "ended with status 7"), ("NamelessWorker", f"killed by signal {signal.SIGRTMIN + 1:d}")],
)
def test_a_death_has_a_reason(worker: str, why: str) -> None:
    """Guards against `decode-0: None`, of a process that was not reaped yet when its pipe ended, and against a signal
    that ends its parent."""
    broken = {**FAKES, "decode": f"tests.cluster.fakes:{worker}"}
    with (
        Cluster(CONFIG, ProcessLauncher(), broken, model_dir="x") as cluster,
        pytest.raises(LaunchError, match=rf"^decode-0: {why}$"),
    ):
        cluster.start()


def test_a_process_that_cannot_be_made_is_a_death_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the supervisor of a host that is out of processes or descriptors for a moment."""

    def cannot(*rest: object, **more: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("cluster.processes.process_launcher.subprocess.Popen", cannot)
    with (
        Cluster(CONFIG, ProcessLauncher(), FAKES, model_dir="x") as cluster,
        pytest.raises(LaunchError, match=r"^prefill-0: cannot be started: Resource temporarily unavailable$"),
    ):
        cluster.start()


def test_a_port_in_use_is_told_plainly(free_port: int) -> None:
    """Guards against a traceback, or a cluster half started, where one line would do."""
    before = children()
    config = msgspec.structs.replace(CONFIG, router=RouterConfig(grpc_port=free_port))
    with (
        socket.create_server(("127.0.0.1", free_port)),
        Cluster(config, ProcessLauncher(), FAKES, model_dir="x") as cluster,
        pytest.raises(LaunchError, match=rf"^router: port {free_port} is in use$"),
    ):
        cluster.start()
    assert children() <= before


def test_a_stubborn_child_is_killed_and_a_slow_one_given_up() -> None:
    """Guards against a stop, or a start, that waits for ever."""
    before = children()
    stubborn = {**FAKES, "decode": "tests.cluster.fakes:StubbornWorker"}
    cluster = Cluster(CONFIG, ProcessLauncher(), stubborn, model_dir="x")
    cluster.start()
    began_s = time.monotonic()
    cluster.stop()
    assert time.monotonic() - began_s < 5.0
    slow = {**FAKES, "decode": "tests.cluster.fakes:SlowWorker"}
    config = msgspec.structs.replace(CONFIG, start_timeout_s=2.0)
    with (
        Cluster(config, ProcessLauncher(), slow, model_dir="x") as cluster,
        pytest.raises(LaunchError, match="decode-0: not started in 2 s"),
    ):
        cluster.start()
    assert children() <= before


def test_a_frozen_router_holds_nobody_up() -> None:
    """Guards the thread that watches the cluster, and that alone ends a frozen router: the pipe there holds 64 KiB, and
    a write of more would wait as long as the router is frozen."""
    peers = [PeerAddress(f"decode-{number}", f"127.0.0.1:{number}") for number in range(1, 4000)]
    assert len(encode_line(SetWorkers([], peers))) > 1 << 17
    settings, secrets = msgspec.to_builtins(CONFIG.router), Sealed.of((bytes(32),))
    spec = ChildSpec(kind="router", name="router", factory=FAKES["router"], config=settings, secrets=secrets)
    child = ProcessLauncher().launch(spec)
    assert child.started_within(60.0) is not None

    def announce() -> None:
        child.set_workers([], peers)
        # Half of it is in the pipe, and the rest can't be: what comes now waits.
        eventually(lambda: not child._unsent, 4.0)
        for _ in range(20):
            child.set_workers([], peers)
        child.set_workers([], [])

    watcher = threading.Thread(target=announce, daemon=True)
    with frozen(child.pid):
        assert child.condemned() == []
        watcher.start()
        watcher.join(5.0)
        held_up = watcher.is_alive()
        assert child.condemned() is None
        waiting = 0 if held_up else len(child._unsent)
    watcher.join()
    assert not held_up and 0 < waiting <= 2
    # What it was told last counts.
    assert not child.ready()
    child.set_workers([], peers)
    assert child.ready()
    freeze(child.pid)
    child.set_workers([], peers)
    child.stop(0.0)
    assert child.failure() == "killed by SIGKILL"


# As the kernel cuts their names.
RAY_AGENTS = ("ray::DashboardA", "ray::RuntimeEnv")

PARENT = """
import sys, time
from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from router.config import RouterConfig
from tests.cluster.processes.test_launchers import CONFIG, FAKES
cluster = Cluster(CONFIG, make_launcher(sys.argv[1]), FAKES, model_dir="x")
print("pids", *[up.pid for up in cluster.start().workers], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_killed_parent_leaves_no_orphan(name: str) -> None:
    """Guards against workers that hold memory and ports after their parent was killed outright."""
    # A killed parent cannot remove Ray's folder; the test does, and keeps its path short for Ray.
    with tempfile.TemporaryDirectory() as folder:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, name],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TMPDIR": folder},
        )
        with parent:
            assert parent.stdout is not None
            # Ray prints what its workers print on the same standard output.
            told = next(line for line in parent.stdout if line.startswith("pids"))
            pids = [int(word) for word in told.split()[1:]]
            assert len(pids) == 2 and not any(gone(pid) for pid in pids)
            below = descendants(parent.pid)
            parent.send_signal(signal.SIGKILL)
        # Ray's two agents first try, for up to a minute, to report the loss to its dead server.
        agents = {pid: name for pid, name in below.items() if name in RAY_AGENTS}
        try:
            assert eventually(lambda: running(below).keys() <= agents.keys(), 15.0), running(below)
        finally:
            for pid in running(below):
                os.kill(pid, signal.SIGKILL)

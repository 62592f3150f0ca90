"""The admin surface of a cluster of fakes, in this process: what it tells, does and refuses."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from cluster.admin import AdminServer, Drain, Scale
from cluster.admin_client import AdminClient, NotRunning
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.leftovers import descendants
from cluster.processes.spec import LaunchError
from cluster.processes.supervisor import RestartConfig
from cluster.resolve import Setting
from cluster.rundir import RunDir
from tests.cluster.processes.test_launchers import CONFIG, FAKES, eventually

SETTINGS = (Setting("model", "", "default"), Setting("router.namespace_key", "hush", "file x"))


class Served:
    """A cluster of fakes with its admin surface, watched by a thread."""

    def __init__(self, folder: Path) -> None:
        self.config = msgspec.structs.replace(
            CONFIG,
            run_dir=str(folder / "run"),
            decode_workers=2,
            restart=RestartConfig(limit=3, first_pause_s=0.05),
        )
        self.rundir = RunDir(self.config, {})
        self.ended = threading.Event()
        self.cluster = Cluster(self.config, make_launcher("process"), FAKES, model_dir="x")
        self.admin = AdminServer(self.cluster, self.rundir, SETTINGS, "process", self.ended.set)
        self.client = AdminClient(self.rundir)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    before = descendants()
    one = Served(tmp_path)
    with one.rundir.hold():
        one.admin.start()
        try:
            with one.cluster:
                one.admin.ready(one.cluster.start())
                watching = threading.Thread(target=one.cluster.watch, args=(one.ended,))
                watching.start()
                try:
                    with one.client:
                        yield one
                finally:
                    one.ended.set()
                    watching.join()
        finally:
            one.admin.stop()
    assert not one.rundir.socket.exists()
    assert eventually(lambda: set(descendants()) <= set(before), 5.0)


def test_status_tells_who_runs_and_who_died(served: Served) -> None:
    """Guards against an operator who cannot see that a worker dies again and again, or what of."""
    status = served.client.status()
    assert (status.state, status.pid, status.launcher) == ("running", os.getpid(), "process")
    assert status.grpc == served.cluster.router.address
    assert [one.name for one in status.processes] == ["prefill-0", "decode-0", "decode-1", "router"]
    assert all(one.state == "up" and one.pid for one in status.processes)
    before = {one.name: one for one in status.processes}["decode-1"]
    os.kill(before.pid, signal.SIGKILL)

    def again() -> bool:
        now = {one.name: one for one in served.client.status().processes}["decode-1"]
        return now.state == "up" and now.pid != before.pid and now.deaths == 1

    assert eventually(again, 20.0)
    now = {one.name: one for one in served.client.status().processes}["decode-1"]
    assert now.why == "killed by SIGKILL" and now.incarnation != before.incarnation


def test_pools_are_scaled_and_workers_drained(served: Served) -> None:
    """Guards against an order that is answered before it is done, and against a pool that grows back."""

    def names(kind: str) -> list[str]:
        return [p.name for p in served.client.status().processes if p.kind == kind]

    told = served.client.scale(Scale(prefill=2, decode=3))
    assert {p.name for p in told.processes} >= {"prefill-1", "decode-2"}
    assert all(p.state == "up" for p in told.processes) and len(told.processes) == 6
    served.client.scale(Scale(decode=1))
    assert names("decode") == ["decode-0"] and names("prefill") == ["prefill-0", "prefill-1"]
    served.client.drain(Drain("prefill-0"))
    assert names("prefill") == ["prefill-1"]
    served.client.scale(Scale(prefill=2))
    assert sorted(names("prefill")) == ["prefill-0", "prefill-1"]
    pid = served.cluster.workers["decode-0"].pid
    served.client.drain(Drain("decode-0", replace=True))
    assert served.cluster.workers["decode-0"].pid != pid and names("decode") == ["decode-0"]


def test_what_would_empty_a_pool_is_refused(served: Served) -> None:
    served.client.scale(Scale(decode=1))
    with pytest.raises(LaunchError, match="decode-0 is the last decode worker"):
        served.client.drain(Drain("decode-0"))
    with pytest.raises(LaunchError, match="a pool has at least one worker"):
        served.client.scale(Scale(decode=0))
    with pytest.raises(LaunchError, match="there is no worker decode-7"):
        served.client.drain(Drain("decode-7"))
    with pytest.raises(LaunchError, match="there is no worker router"):
        served.client.drain(Drain("router"))
    assert all(one.state == "up" for one in served.client.status().processes)


def test_what_no_command_line_has_checked_is_bounded(served: Served) -> None:
    """Guards against a script that posts a slip of the keyboard, and starts a million processes, or half an order."""
    before = served.client.status().processes
    with pytest.raises(LaunchError, match="1025"):
        served.client.scale(Scale(prefill=2, decode=1025))
    with pytest.raises(LaunchError, match="at least one worker"):
        served.client.scale(Scale(prefill=2, decode=-1))
    for timeout_s in (0.0, -1.0, 1e308):
        with pytest.raises(LaunchError, match="timeout_s"):
            served.client.scale(Scale(prefill=2, timeout_s=timeout_s))
        with pytest.raises(LaunchError, match="timeout_s"):
            served.client.drain(Drain("decode-1", timeout_s=timeout_s))
    assert served.client.status().processes == before


def test_secrets_stay_here_and_nonsense_is_told(served: Served) -> None:
    """Guards the namespace key, which would let whoever reads it probe other tenants' prefixes."""
    assert served.client.config()["router.namespace_key"] == {"value": "(set)", "origin": "file x"}
    transport = httpx.HTTPTransport(uds=str(served.rundir.socket))
    with httpx.Client(transport=transport, base_url="http://x") as http:
        answer = http.post("/scale", content=b'{"decode": 2, "replicas": 3}')
        assert answer.status_code == 400 and "replicas" in answer.json()["error"]
        assert http.post("/drain", content=b"not json").status_code == 400
        assert http.get("/drain").status_code == 405
    with pytest.raises(LaunchError, match="cannot be asked for 'overview'"):
        served.client.overview()
    told = served.client.flights("r")
    assert told.flights == [] and "cannot be asked" in told.silent["decode-0"]


def test_only_this_user_may_ask(served: Served) -> None:
    assert served.rundir.folder.stat().st_mode & 0o077 == 0


def test_down_is_asked_for_once_the_caller_has_its_answer(served: Served) -> None:
    assert served.client.down().state == "stopping"
    assert served.ended.is_set()


def test_the_processes_are_written_down(served: Served) -> None:
    """Guards `down` after the supervisor was killed: nobody else knows the pids. Other children of this process, such
    as a resource tracker, are written down as well."""
    wanted = {up.pid: name for name, up in served.cluster.processes().items()}
    wanted[os.getpid()] = "supervisor"

    def noted() -> bool:
        found = {p.pid: p.name for p in served.rundir.processes()}
        return wanted.items() <= found.items() and set(found) <= {*wanted, *descendants()}

    assert len(wanted) == 5 and eventually(noted, 5.0)


def test_nobody_there_is_one_clear_word(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, run_dir=str(tmp_path / "run"))
    with (
        AdminClient(RunDir(config, {})) as client,
        pytest.raises(NotRunning, match="no cluster named 'headrace' runs here"),
    ):
        client.status()

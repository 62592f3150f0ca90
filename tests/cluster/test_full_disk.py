"""A disk that is full takes nothing away but what is written to it: no process, no list, no way to end a cluster."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from cluster.admin import ProcessStatus
from cluster.admin_client import AdminClient
from cluster.cli.down import take_down
from cluster.config import ClusterConfig, ConfigError
from cluster.rundir import ProcessIdentity, RunDir
from router.config import RouterConfig
from tests.cluster.processes.test_launchers import eventually, gone
from tests.small_disk import fill, small_disk

SUPERVISOR = """
import os, sys
from functools import partial
import msgspec
from cluster.cli import serve
from cluster.config import ClusterConfig
from cluster.resolve import Resolved
from tests.cluster.processes.test_launchers import FAKES
serve.Cluster = partial(serve.Cluster, factories=FAKES, model_dir="x")
config = msgspec.json.decode(sys.argv[1], type=ClusterConfig)
sys.exit(serve.serve(Resolved(config, ()), os.environ))
"""


@contextmanager
def supervised(config: ClusterConfig, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor of stand-ins, with its output in `log`."""
    command = [sys.executable, "-c", SUPERVISOR, msgspec.json.encode(config).decode()]
    with log.open("wb") as output:
        supervisor = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield supervisor
    finally:
        supervisor.kill()
        supervisor.wait()


def process(rundir: RunDir, name: str) -> ProcessStatus:
    with AdminClient(rundir) as client:
        return next(one for one in client.status().processes if one.name == name)


def replaced(rundir: RunDir, name: str) -> int:
    """Kill a worker; return the pid of the one that takes its place."""
    was = process(rundir, name)
    os.kill(was.pid, signal.SIGKILL)

    def is_another() -> bool:
        now = process(rundir, name)
        return now.state == "up" and now.pid != was.pid

    assert eventually(is_another, 30.0)
    return process(rundir, name).pid


def listed(rundir: RunDir) -> bytes:
    return (rundir.folder / f"{rundir.name}.json").read_bytes()


@pytest.mark.slow
def test_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the list of processes, whose thread died of the first write that failed, and `down`, which then left a
    worker behind that was stopped, and in no list."""
    # A socket's path is short: so is the name of this test, which is a part of it.
    with small_disk(tmp_path / "d") as disk:
        config = ClusterConfig(
            run_dir=str(disk),
            launcher="process",
            stop_grace_s=1.0,
            router=RouterConfig(grpc_port=0, http_port=-1),
        )
        rundir = RunDir(config, {})
        with supervised(config, tmp_path / "log") as supervisor:
            log = tmp_path / "log"
            assert eventually(lambda: "headrace is ready" in log.read_text(), 60.0)
            assert eventually(lambda: b"decode-0" in listed(rundir), 10.0)
            before, filler = listed(rundir), fill(disk)
            fresh = replaced(rundir, "decode-0")
            assert eventually(lambda: "the list of processes cannot be kept" in log.read_text(), 10.0)
            assert listed(rundir) == before
            filler.unlink()
            assert eventually(lambda: str(fresh).encode() in listed(rundir), 10.0), "it is written as soon as it can be"
            fill(disk)
            unlisted = replaced(rundir, "decode-0")
            assert str(unlisted).encode() not in listed(rundir)
            os.kill(unlisted, signal.SIGSTOP)
            supervisor.kill()
            supervisor.wait()
            assert not gone(unlisted)
            assert take_down(rundir, 0.0) == 0
        assert gone(unlisted)
        assert f"Killing {unlisted} (decode-0): left behind." in capsys.readouterr().out


def test_a_supervisor_that_has_written_nothing_is_found(tmp_path: Path) -> None:
    """Guards `down` on a disk that was full from the beginning, where the supervisor and all below it are stopped."""
    rundir = RunDir(ClusterConfig(run_dir=str(tmp_path / "run")), {})
    code = (
        "import os, subprocess, sys; from pathlib import Path; from cluster.config import ClusterConfig\n"
        "from cluster.rundir import RunDir\nrundir = RunDir(ClusterConfig(run_dir=sys.argv[1]), {})\n"
        "with rundir.hold():\n    os.environ.update(rundir.mark)\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "    print(child.pid, flush=True); child.wait()"
    )
    command = [sys.executable, "-c", code, str(rundir.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        try:
            # What marks a process can be read a moment after it has begun.
            assert eventually(lambda: len(rundir.processes()) == 2, 5.0)
            found = {one.pid: one.name for one in rundir.processes()}
            assert found.keys() == {supervisor.pid, child} and found[supervisor.pid] == "supervisor"
            other = RunDir(ClusterConfig(run_dir=str(tmp_path / "run"), name="other"), {})
            assert other.processes() == [], "they are another cluster's"
        finally:
            for pid in (child, supervisor.pid):
                os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: rundir.processes() == [], 5.0)


def failing(problem: int) -> Callable[..., None]:
    def cannot(path: Path, *rest: object) -> None:
        raise OSError(problem, os.strerror(problem), str(path))

    return cannot


def test_a_list_that_cannot_be_written_leaves_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir = RunDir(ClusterConfig(run_dir=str(tmp_path / "run")), {})
    rundir.make()
    mine = ProcessIdentity.of("mine", os.getpid())
    assert mine is not None
    rundir.write([mine])
    monkeypatch.setattr(Path, "write_bytes", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        rundir.write([])
    assert rundir.processes() == [mine]
    monkeypatch.undo()
    listed_at = rundir.folder / f"{rundir.name}.json"
    listed_at.write_bytes(listed_at.read_bytes()[:-5])
    assert rundir.processes() == [], "a list cut short tells nothing, and fails nobody"


def test_a_key_that_cannot_be_kept_is_told_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first start on a full disk, which ended with the kernel's word and no file, and the next one there."""
    rundir = RunDir(ClusterConfig(run_dir=str(tmp_path / "run")), {})
    rundir.make()
    path, open_file = rundir.folder / f"{rundir.name}.key", os.open

    def on_full_disk(name: Path, flags: int, mode: int) -> int:
        os.close(open_file(name, flags, mode))
        return open_file("/dev/full", os.O_WRONLY)

    with monkeypatch.context() as full:
        full.setattr(os, "open", on_full_disk)
        with pytest.raises(ConfigError, match=f"^run_dir: {path}: No space left on device$"):
            rundir.namespace_key()
    assert list(rundir.folder.iterdir()) == []
    assert rundir.namespace_key() == path.read_text()

"""`headrace up`: what becomes of signals and of a full disk before the cluster serves, and after."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.cli import serve
from cluster.config import ClusterConfig
from cluster.processes.launch import Addresses
from cluster.processes.spec import LaunchError
from cluster.resolve import Resolved
from cluster.rundir import MARK
from router.config import RouterConfig
from tests.cluster.processes.test_launchers import eventually


def resolved(folder: Path) -> Resolved:
    router = RouterConfig(grpc_port=0, http_port=-1)
    return Resolved(ClusterConfig(run_dir=str(folder / "run"), launcher="process", router=router), ())


@pytest.fixture
def hangups() -> Iterator[list[int]]:
    """The SIGHUPs that would have ended this process."""
    deadly: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: deadly.append(number))
    yield deadly
    signal.signal(signal.SIGHUP, before)


def test_a_hangup_ends_no_supervisor_and_rolls_only_one_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangups: list[int]
) -> None:
    """Guards workers that are left behind where the terminal is closed while `headrace up` starts or stops."""
    rolled: list[str] = []

    def hang_up(seen: Callable[[], bool]) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        assert hangups or eventually(seen, 5.0)

    def passed_over(count: int) -> Callable[[], bool]:
        return lambda: sum("it starts or stops" in message for message in caplog.messages) == count

    class Cluster:
        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> "Cluster":
            return self

        def __exit__(self, *_: object) -> None:
            hang_up(passed_over(2))

        def start(self) -> Addresses:
            hang_up(passed_over(1))
            return Addresses(grpc="127.0.0.1:1", http="", workers=())

        def roll(self) -> None:
            rolled.append("roll")

        def watch(self) -> None:
            hang_up(lambda: rolled == ["roll"])

    status = SimpleNamespace(processes=(), grpc="127.0.0.1:1", http="")
    admin = SimpleNamespace(start=lambda: None, stop=lambda: None, ready=lambda _: None, status=lambda: status)
    monkeypatch.setenv(MARK, "")
    monkeypatch.setattr(serve.logs, "configure", lambda *_: None)
    monkeypatch.setattr(serve, "Cluster", Cluster)
    monkeypatch.setattr(serve, "AdminServer", lambda *_: admin)
    before = signal.getsignal(signal.SIGHUP)
    with caplog.at_level(logging.WARNING):
        assert serve.serve(resolved(tmp_path), {}) == 0
    assert not hangups and rolled == ["roll"]
    assert signal.getsignal(signal.SIGHUP) is before


def test_a_supervisor_that_ends_without_a_word_leaves_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `up --detach` on a full disk, where what the supervisor said of it is nowhere."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(serve.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 << 10))
    log = tmp_path / "run" / "headrace.log"
    with pytest.raises(LaunchError, match=f"it ended with 1, and {log} is empty; of its disk 4 KiB are free"):
        serve.detach(resolved(tmp_path), {}, ["up", "--detach"])

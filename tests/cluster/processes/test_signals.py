"""SIGHUP asks for work beside what the main thread does."""

import os
import signal
import threading

import pytest

from cluster.processes.signals import on_hangup
from cluster.processes.spec import LaunchError
from tests.cluster.processes.test_launchers import eventually


def test_each_hangup_is_acted_on_and_none_of_them_ends_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards `headrace up` against the default action, death, and a failed roll that takes the watcher along."""
    done: list[int] = []
    twice = threading.Event()

    def act() -> None:
        done.append(1)
        if len(done) == 1:
            raise RuntimeError("no such worker")
        twice.set()

    before = signal.getsignal(signal.SIGHUP)
    with on_hangup(act):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        while not twice.wait(0.05):
            # Two signals of one kind may arrive as one.
            os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is before
    assert "no such worker" in caplog.text


def test_a_cluster_that_is_taken_down_while_it_rolls_has_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a traceback in the log where nothing was wrong: `headrace down` came before the last worker."""

    def act() -> None:
        raise LaunchError("nobody watches the cluster any more")

    with on_hangup(act):
        os.kill(os.getpid(), signal.SIGHUP)
        assert eventually(lambda: bool(caplog.records), 5.0)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.exc_info is None
    assert "nobody watches the cluster any more" in record.getMessage()

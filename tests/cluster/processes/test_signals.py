"""SIGHUP asks for work beside what the main thread does."""

import os
import signal
import threading

import pytest

from cluster.processes.signals import on_hangup


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

"""One small Ray actor per node: ends worker processes there by their pid, and proves that they have ended.

Ray's own `kill` asks a process to end itself, which a stopped one does not, and a pid means nothing on another host.
"""

import os
import signal
import time

from transfer.liveness import ProcessWatch

LOOK_S = 0.02


class Keeper:
    """Mutable state: the processes that it was told of, by pid. It ends no other."""

    def __init__(self) -> None:
        self._watches: dict[int, ProcessWatch] = {}

    def watch(self, pid: int) -> None:
        """Remember a process while it surely lives: its start time tells it from a later owner of the pid."""
        self._watches[pid] = ProcessWatch(pid)

    def kill(self, pid: int) -> None:
        watch = self._watches.get(pid)
        if watch is not None and not watch.is_dead():
            os.kill(pid, signal.SIGKILL)

    def ended_within(self, pid: int, timeout_s: float) -> bool:
        """Wait until it has ended, and kill it if that takes too long; whether it ended by itself."""
        watch = self._watches.pop(pid, None)
        deadline_s = time.monotonic() + timeout_s
        while watch is not None and not watch.is_dead():
            if time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
                return False
            time.sleep(LOOK_S)
        return True

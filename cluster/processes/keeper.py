"""One small Ray actor per node: ends worker processes there by their pid, and proves that they have ended.

Ray's own `kill` asks a process to end itself, which a stopped one does not, and a pid means nothing on another host.
"""

import os
import signal
import time
from typing import Literal

from transfer.liveness import ProcessWatch

LOOK_S = 0.02
KILLED_S = 5.0
"""How long a killed process may take to be gone."""

End = Literal["ended", "killed", "runs"]
"""How a process ended: by itself, killed, or not at all."""


class Keeper:
    """Ends processes of its node. Mutable state: the processes that it was told of, by pid; it ends no others."""

    def __init__(self) -> None:
        self._watches: dict[int, ProcessWatch] = {}

    def watch(self, pid: int) -> None:
        """Remember a process while it surely lives: its start time tells it from a later owner of the pid."""
        self._watches[pid] = ProcessWatch(pid)

    def kill(self, pid: int) -> None:
        watch = self._watches.get(pid)
        if watch is not None and not watch.is_dead():
            os.kill(pid, signal.SIGKILL)

    def end(self, pid: int, timeout_s: float) -> End:
        """Wait until it has ended, and kill it if that takes too long."""
        watch = self._watches.pop(pid, None)
        if watch is None or _gone(watch, timeout_s):
            return "ended"
        os.kill(pid, signal.SIGKILL)
        return "killed" if _gone(watch, KILLED_S) else "runs"


def _gone(watch: ProcessWatch, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not watch.is_dead():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOOK_S)
    return True

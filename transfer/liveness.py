"""Which machine this is, and whether a process on it has ended: the proofs that a fence may rest on."""

import os
from pathlib import Path


def host_id() -> str:
    """Equal for two processes exactly when each can reach the other through `/proc`: one kernel, one pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


class ProcessWatch:
    """Watches one process of this host by pid and start time, so that a recycled pid is no proof of life."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = _start_ticks(pid)

    def is_dead(self) -> bool:
        """True is proof: the process has ended and touches no memory any more."""
        return self._started is None or _start_ticks(self.pid) != self._started


def _start_ticks(pid: int) -> str | None:
    """The process's start time in clock ticks since boot, or None where there is none, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]

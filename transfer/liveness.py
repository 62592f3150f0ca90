"""Tells what still lives: which machine this is, whether a process on it has ended (the proofs that a fence may rest
on), and whether what should move has stopped."""

import os
from pathlib import Path

LOOK_S = 1.0
"""Time between two looks counts for at most this much: a process that was stopped as a whole proves nothing."""


def host_id() -> str:
    """Equal for two processes exactly when each can reach the other through `/proc`: one kernel, one pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


class ProcessWatch:
    """Watches one process of this host by pid and start time, so that a recycled pid is no proof of life. Raises
    OSError where it cannot be looked at."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = _start_ticks(pid)

    def is_dead(self) -> bool:
        """True is proof: the process has ended and touches no memory any more. Where it cannot be looked at, as with no
        descriptor left, nothing is proven."""
        try:
            return self._started is None or _start_ticks(self.pid) != self._started
        except OSError:
            return False


def _start_ticks(pid: int) -> str | None:
    """The process's start time in clock ticks since boot, or None where there is none, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


class Watchdog:
    """Judges by looks every now and then whether a thread, or a stream of bytes, has stopped."""

    # Mutable state: the last beat seen, for how long it has not changed, and when that was looked at.

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._beat: int | None = None
        self._stuck_s = 0.0
        self._looked_s = 0.0

    def __repr__(self) -> str:
        return f"Watchdog(stuck for {self._stuck_s:.1f} of {self._limit_s:.1f} s)"

    def is_stuck(self, beat: int | None, now: float) -> bool:
        """`beat` changes with whatever gets done, and is None while there is nothing to do."""
        looked_s, self._looked_s = self._looked_s, now
        if beat is None or beat != self._beat:
            self._beat, self._stuck_s = beat, 0.0
            return False
        self._stuck_s += min(now - looked_s, LOOK_S)
        return self._stuck_s >= self._limit_s

"""What a chaos test does to processes. Every function proves that it took effect, or raises NoEffectError."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

EFFECT_S = 2.0


class NoEffectError(AssertionError):
    """A fault was injected and did not happen: whatever the test saw proves nothing."""


def process_state(pid: int) -> str:
    """The kernel's letter for the process (R, S, D, T, Z), or an empty text where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def _wait_until(pid: int, reached: Callable[[str], bool], what: str) -> None:
    deadline_s = time.monotonic() + EFFECT_S
    while not reached(state := process_state(pid)):
        if time.monotonic() > deadline_s:
            raise NoEffectError(f"process {pid} is {state!r} after {what}")
        time.sleep(0.002)


def kill(pid: int) -> None:
    """Send SIGKILL; returns once the process is gone, or a zombie that its parent has not reaped yet."""
    if process_state(pid) in ("", "Z"):
        raise NoEffectError(f"process {pid} was dead already")
    os.kill(pid, signal.SIGKILL)
    _wait_until(pid, lambda state: state in ("", "Z"), "SIGKILL")


def killed_within(pid: int, limit_s: float) -> None:
    """Wait until somebody else has ended the process; fails after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while (state := process_state(pid)) not in ("", "Z"):
        assert time.monotonic() < deadline_s, f"process {pid} is {state!r} after {limit_s} s"
        time.sleep(0.01)


def freeze(pid: int) -> None:
    """Send SIGSTOP; returns once the kernel says that the process is stopped."""
    os.kill(pid, signal.SIGSTOP)
    _wait_until(pid, lambda state: state == "T", "SIGSTOP")


def thaw(pid: int) -> None:
    """Send SIGCONT; a process that has died meanwhile needs none."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
    _wait_until(pid, lambda state: state != "T", "SIGCONT")


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """Keep the process stopped inside the block, whatever happens in it."""
    try:
        for pid in pids:
            freeze(pid)
        yield
    finally:
        for pid in pids:
            thaw(pid)


def stutter(pid: int, times: int, stopped_s: float, running_s: float) -> None:
    """Slow a process down: stop it again and again, each stop proven."""
    for _ in range(times):
        with frozen(pid):
            time.sleep(stopped_s)
        time.sleep(running_s)

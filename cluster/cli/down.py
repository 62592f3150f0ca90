"""`headrace down`: ask, wait, kill what does not go, and prove that no process and no shared memory is left."""

import os
import signal
import time
from pathlib import Path

from cluster.admin_client import AdminClient
from cluster.processes.leftovers import mapped_segments
from cluster.processes.spec import LaunchError
from cluster.rundir import ProcessIdentity, RunDir

STOP_S = 60.0
"""How long the router and the workers may take to stop, one group after the other, beside twice the grace that requests
have."""
VANISH_S = 10.0
"""How long the processes of a killed supervisor may take to end: they notice within two seconds."""
LOOK_S = 0.1


def take_down(rundir: RunDir, grace_s: float) -> int:
    """Stop the cluster of this name, whatever state it is in. Raises LaunchError if something of it is left here, or
    with what its supervisor could not end, which may be on other hosts."""
    began_s = time.monotonic()
    found = {process.pid: process for process in rundir.processes()}
    segments = mapped_segments({pid: one.name for pid, one in found.items()})
    if not found and not rundir.is_held:
        rundir.forget()
        rundir.take_fault()
        print(f"No cluster named {rundir.name!r} runs here.")
        return 0
    _ask(rundir, found, 2 * grace_s + STOP_S)
    if rundir.is_held and (supervisor := _supervisor(found)) is not None:
        _kill([supervisor], "the supervisor did not end")
    _gone(list(found.values()), VANISH_S)
    left = [process for process in found.values() if process.runs]
    if left:
        _kill(left, "left behind")
        _gone(left, VANISH_S)
    _prove(rundir, list(found.values()), segments)
    fault = rundir.take_fault()
    if fault:
        raise LaunchError(f"nothing of it is left on this host, but {fault}")
    took_s = time.monotonic() - began_s
    print(
        f"Stopped after {took_s:.1f} s: none of {len(found)} processes and no shared memory is left."
    )
    return 0


def _ask(rundir: RunDir, found: dict[int, ProcessIdentity], within_s: float) -> None:
    """Ask the supervisor to end, and wait; `found` gains what it starts until then."""
    if not rundir.is_held:
        return  # there is nobody to ask
    try:
        with AdminClient(rundir) as client:
            client.down()
    except LaunchError as error:
        if rundir.is_held:
            print(f"It cannot be asked: {error}")
        return
    deadline_s = time.monotonic() + within_s
    while rundir.is_held and time.monotonic() < deadline_s:
        found.update({process.pid: process for process in rundir.processes()})
        time.sleep(LOOK_S)


def _supervisor(found: dict[int, ProcessIdentity]) -> ProcessIdentity | None:
    return next((one for one in found.values() if one.name == "supervisor" and one.runs), None)


def _kill(processes: list[ProcessIdentity], why: str) -> None:
    for process in processes:
        if process.runs:
            print(f"Killing {process.pid} ({process.name}): {why}.")
            os.kill(process.pid, signal.SIGKILL)


def _gone(processes: list[ProcessIdentity], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while any(process.runs for process in processes) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)


def _prove(rundir: RunDir, processes: list[ProcessIdentity], segments: set[str]) -> None:
    left = [f"process {one.pid} ({one.name})" for one in processes if one.runs]
    left += sorted(path for path in segments if Path(path).exists())
    if rundir.is_held:
        left.append(f"the lock of {rundir.name!r}")
    if left:
        raise LaunchError(f"still there: {', '.join(left)}")
    rundir.forget()

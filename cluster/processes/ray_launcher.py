"""Workers and router as Ray actors on a local Ray of our own.

The Ray started here is small (no dashboard, no idle workers, the smallest object store, since KV
blocks never pass through it), private (its own folder under the temporary folder) and ours alone:
`close` proves by pid that nothing of it is left.
"""

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from cluster.processes.ray_child import LocalProcess, RayChild, cause_of
from cluster.processes.spec import ChildSpec, LaunchError

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""The least that Ray accepts, with room to spare for its own messages."""
SHUTDOWN_TIMEOUT_S = 10.0

# Read by Ray when it is imported or started. Accelerator variables are left alone: which device a
# worker uses is in its own config.
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_worker_prestart": "0",
}


def imported_ray() -> Any:
    """Import Ray, with the variables set that it reads meanwhile."""
    for name, value in RAY_VARIABLES.items():
        os.environ.setdefault(name, value)
    import ray

    return ray


def init(ray: Any, **options: Any) -> None:
    """Call `ray.init` and take SIGTERM back from it: what a signal means is decided in `cluster.cli`."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=True, logging_level=logging.ERROR, **options)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


class RayLauncher:
    """A Ray of this process's own, on this machine, gone when closed."""

    def __init__(self) -> None:
        self._ray: Any = None
        self._folder = ""

    def open(self) -> None:
        ray = imported_ray()
        self._folder = tempfile.mkdtemp(prefix="headrace-", dir=_short_folder())
        self._ray = ray
        try:
            init(
                ray,
                address="local",
                num_cpus=0,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=self._folder,
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:
            self.close()
            raise LaunchError(f"Ray did not start: {cause_of(error)}") from error

    def launch(self, spec: ChildSpec) -> RayChild:
        try:
            return RayChild(self._ray, spec, LocalProcess())
        except ValueError as error:  # the name still belongs to the actor that it replaces
            raise LaunchError(cause_of(error)) from error

    def close(self) -> None:
        if self._ray is None:
            return
        self._ray.shutdown()
        self._ray = None
        ended = _end_processes(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)
        if ended:
            raise LaunchError(f"still running after Ray's shutdown: {', '.join(ended)}")


def _short_folder() -> str:
    """Return the temporary folder, unless it is so deep that Ray's socket paths would pass 107 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 24 else "/tmp"


def processes_of(folder: str) -> dict[int, str]:
    """Return the processes that name `folder` in their command line or environment, by pid: those of one Ray."""
    found = {}
    needle = folder.encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            if needle in command or needle in (entry / "environ").read_bytes():
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")[:80]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return {pid: command for pid, command in found.items() if command}


def _end_processes(folder: str) -> list[str]:
    """Wait until nothing of a shut-down Ray runs; kill what still does in the end, and name it."""
    deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
    while left := processes_of(folder):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return [f"{pid} {command}" for pid, command in left.items()]
        time.sleep(0.05)
    return []

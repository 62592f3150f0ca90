"""Workers and router as Ray actors on a local Ray of our own: all calls to Ray are in this file.

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

from cluster.actors import ACTORS
from cluster.spec import ChildReady, ChildSpec, LaunchError, child_environment
from engine.messages import PeerAddress
from router.escalation import Verdict
from transfer.liveness import ProcessWatch

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""The least that Ray accepts, with room to spare for its own messages."""
ANSWER_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 10.0

# Read by Ray when it is imported or started. Accelerator variables are left alone: which device a
# worker uses is in its own config.
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_worker_prestart": "0",
}


class RayChild:
    """One actor."""

    def __init__(self, ray: Any, spec: ChildSpec) -> None:
        self.spec = spec
        self._ray = ray
        self._stopped = False
        actor_class = ray.remote(ACTORS[spec.kind])
        self._actor = actor_class.options(
            name=spec.name,
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
            runtime_env={"env_vars": child_environment(spec.threads, os.environ)},
        ).remote(spec)
        self._start = self._actor.start.remote()
        self._wait: Any = None
        self._watch: ProcessWatch | None = None
        self._asked: Any = None

    def started_within(self, timeout_s: float) -> ChildReady | None:
        done, _ = self._ray.wait([self._start], timeout=timeout_s)
        if not done:
            return None
        answer = self._get(self._start, ANSWER_TIMEOUT_S, "start")
        if isinstance(answer, str):
            raise LaunchError(f"{self.spec.name}: {answer}")
        self._wait = self._actor.wait.remote()
        ready: ChildReady = answer
        self._watch = ProcessWatch(ready.pid)
        return ready

    def failure(self) -> str | None:
        why = self._end()
        return "ended" if why == "" else why

    def left(self) -> bool:
        return self._end() == ""

    def _end(self) -> str | None:
        """Why it failed, nothing where it ended well, None while it runs."""
        if self._wait is None:
            return None
        done, _ = self._ray.wait([self._wait], timeout=0)
        if not done:
            return None
        try:
            why: str = self._ray.get(self._wait)
        except self._ray.exceptions.RayError as error:
            return _cause(error)
        return why

    def leave(self, grace_s: float) -> None:
        self._get(self._actor.leave.remote(grace_s), ANSWER_TIMEOUT_S, "answer")

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        self._get(self._actor.set_workers.remote(prefill, decode), ANSWER_TIMEOUT_S, "answer")

    def ready(self) -> bool:
        return bool(self._get(self._actor.ready.remote(), ANSWER_TIMEOUT_S, "answer"))

    def condemned(self) -> list[Verdict] | None:
        if self._wait is None:
            return []
        found: list[Verdict] = []
        if self._asked is not None:
            done, _ = self._ray.wait([self._asked], timeout=0)
            if not done:
                return None
            try:
                found = self._ray.get(self._asked)
            except self._ray.exceptions.RayError as error:
                # Its death is `failure`'s to tell.
                logging.getLogger(__name__).debug("%s: %s", self.spec.name, _cause(error))
        self._asked = self._actor.condemned.remote()
        return found

    def ask(self, what: str, argument: str) -> bytes:
        answer = self._get(self._actor.ask.remote(what, argument), ANSWER_TIMEOUT_S, "answer")
        if isinstance(answer, str):
            raise LaunchError(answer)
        told: bytes = answer
        return told

    def kill(self) -> None:
        # Not by Ray, which asks the process to end itself: a stopped one does not.
        if self._watch is not None and not self._watch.is_dead():
            os.kill(self._watch.pid, signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        try:
            self._ray.get(self._actor.stop.remote(grace_s), timeout=grace_s + 2.0)
        except self._ray.exceptions.RayError as error:
            logging.getLogger(__name__).info("%s: %s", self.spec.name, _cause(error))
            self.kill()
        self._ray.kill(self._actor)

    def _get(self, reference: Any, timeout_s: float, verb: str) -> Any:
        try:
            return self._ray.get(reference, timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise LaunchError(f"{self.spec.name} did not {verb} in {timeout_s:.0f} s") from error
        except self._ray.exceptions.RayError as error:
            raise LaunchError(f"{self.spec.name}: {_cause(error)}") from error


class RayLauncher:
    """A Ray of this process's own, on this machine, gone when closed."""

    def __init__(self) -> None:
        self._ray: Any = None
        self._folder = ""

    def open(self) -> None:
        for name, value in RAY_VARIABLES.items():
            os.environ.setdefault(name, value)
        import ray

        # ray.init takes over SIGTERM; what a signal means is decided in `cluster.cli`.
        handler = signal.getsignal(signal.SIGTERM)
        self._folder = tempfile.mkdtemp(prefix="headrace-", dir=_short_folder())
        self._ray = ray
        try:
            ray.init(
                address="local",
                num_cpus=0,
                num_gpus=0,
                include_dashboard=False,
                log_to_driver=True,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=self._folder,
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:
            self.close()
            raise LaunchError(f"Ray did not start: {_cause(error)}") from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)

    def launch(self, spec: ChildSpec) -> RayChild:
        try:
            return RayChild(self._ray, spec)
        except ValueError as error:  # the name still belongs to the actor that it replaces
            raise LaunchError(_cause(error)) from error

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
    """The temporary folder, unless it is so deep that Ray's socket paths would pass 107 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 24 else "/tmp"


def processes_of(folder: str) -> dict[int, str]:
    """Processes that name `folder` in their command line or environment, by pid: those of one Ray."""
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


def _cause(error: BaseException) -> str:
    """The gist of a Ray error, which prints a page."""
    name = type(error).__name__
    if name in {"ActorDiedError", "ActorUnavailableError", "RayActorError"}:
        return "its process died"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{name}: {lines[-1]}" if lines else name

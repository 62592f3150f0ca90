"""One worker or router as a Ray actor, from its start to its end; the same on a Ray of our own and on a cluster."""

import logging
import os
import signal
from typing import Any, Protocol

from cluster.processes.actors import ACTORS
from cluster.processes.spec import ChildReady, ChildSpec, LaunchError, Sealed, environment_of
from engine.messages import PeerAddress
from router.core.escalation import Verdict
from transfer.liveness import ProcessWatch

ANSWER_TIMEOUT_S = 10.0


class ActorProcess(Protocol):
    """Ends the process of one actor, which may be on another host."""

    def found(self, actor: Any, pid: int) -> None:
        """Note that the actor is up, in this process."""

    def kill(self) -> None:
        """End the process, whatever state it is in, if it was found and is still that one. Never blocks."""


class LocalProcess:
    """A process of this host."""

    def __init__(self) -> None:
        self._watch: ProcessWatch | None = None

    def found(self, actor: Any, pid: int) -> None:
        self._watch = ProcessWatch(pid)

    def kill(self) -> None:
        if self._watch is not None and not self._watch.is_dead():
            os.kill(self._watch.pid, signal.SIGKILL)


class RayChild:
    """One actor. `process` ends its process; `options` are Ray's, to place it."""

    def __init__(self, ray: Any, spec: ChildSpec, process: ActorProcess, **options: object) -> None:
        self.spec = spec
        self._ray = ray
        self._process = process
        self._stopped = False
        actor_class = ray.remote(ACTORS[spec.kind])
        self._actor = actor_class.options(
            name=spec.name,
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
            runtime_env={"env_vars": environment_of(spec, os.environ)},
            **options,
        ).remote(spec)
        self._start = self._actor.start.remote()
        self._wait: Any = None
        self._asked: Any = None
        self._asked_loading: Any = None
        self._loading: tuple[int, int] | None = None

    def started_within(self, timeout_s: float) -> ChildReady | None:
        done, _ = self._ray.wait([self._start], timeout=timeout_s)
        if not done:
            return None
        answer = self._get(self._start, ANSWER_TIMEOUT_S, "start")
        if isinstance(answer, str):
            raise LaunchError(f"{self.spec.name}: {answer}")
        self._wait = self._actor.wait.remote()
        ready: ChildReady = answer
        self._process.found(self._actor, ready.pid)
        return ready

    def loading(self) -> tuple[int, int] | None:
        if self._asked_loading is None:
            self._asked_loading = self._actor.loading.remote()
        done, _ = self._ray.wait([self._asked_loading], timeout=0)
        if done:
            try:
                self._loading = self._ray.get(self._asked_loading)
            except self._ray.exceptions.RayError as error:
                # Its death is `failure`'s to tell.
                logging.getLogger(__name__).debug("%s: %s", self.spec.name, cause_of(error))
            self._asked_loading = None
        return self._loading

    def failure(self) -> str | None:
        why = self._end()
        return "ended by itself" if why == "" else why

    def left(self) -> bool:
        return self._end() == ""

    def _end(self) -> str | None:
        """Return why the process failed, an empty text where it ended well, None while it runs."""
        if self._wait is None:
            return None
        done, _ = self._ray.wait([self._wait], timeout=0)
        if not done:
            return None
        try:
            why: str = self._ray.get(self._wait)
        except self._ray.exceptions.RayError as error:
            return cause_of(error)
        return why

    def leave(self, grace_s: float) -> None:
        self._get(self._actor.leave.remote(grace_s), ANSWER_TIMEOUT_S, "answer")

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        self._get(self._actor.set_workers.remote(prefill, decode), ANSWER_TIMEOUT_S, "answer")

    def set_routers(self, routers: list[PeerAddress]) -> None:
        self._get(self._actor.set_routers.remote(routers), ANSWER_TIMEOUT_S, "answer")

    def set_secrets(self, secrets: Sealed) -> None:
        self._get(self._actor.set_secrets.remote(secrets), ANSWER_TIMEOUT_S, "answer")

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
                logging.getLogger(__name__).debug("%s: %s", self.spec.name, cause_of(error))
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
        self._process.kill()

    def stop(self, grace_s: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        try:
            self._ray.get(self._actor.stop.remote(grace_s), timeout=grace_s + 2.0)
        except self._ray.exceptions.RayError as error:
            logging.getLogger(__name__).info("%s: %s", self.spec.name, cause_of(error))
            self.kill()
        self._ray.kill(self._actor)

    def _get(self, reference: Any, timeout_s: float, verb: str) -> Any:
        try:
            return self._ray.get(reference, timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise LaunchError(f"{self.spec.name} did not {verb} in {timeout_s:.0f} s") from error
        except self._ray.exceptions.RayError as error:
            raise LaunchError(f"{self.spec.name}: {cause_of(error)}") from error


def cause_of(error: BaseException) -> str:
    """Return the gist of a Ray error, which prints a page."""
    name = type(error).__name__
    if name in {"ActorDiedError", "ActorUnavailableError", "RayActorError"}:
        return "its process died"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{name}: {lines[-1]}" if lines else name

"""Workers and router as plain subprocesses: for machines without Ray, and for tests that kill things."""

import itertools
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import msgspec

from cluster.processes.child import (
    Ask,
    ChildAnswer,
    ChildLeave,
    ChildStarted,
    ChildStop,
    Condemned,
    Failed,
    IsReady,
    LoadProgress,
    SecretsSet,
    SetRouters,
    SetSecrets,
    SetWorkers,
    ToChild,
    Told,
    WhoIsCondemned,
    decode_report,
    encode_line,
)
from cluster.processes.spec import ChildReady, ChildSpec, LaunchError, Sealed, environment_of
from engine.messages import PeerAddress
from router.core.escalation import Verdict

KILL_MARGIN_S = 2.0
"""A child ends itself one second past its grace; a second later its parent kills it."""
ANSWER_TIMEOUT_S = 10.0
DEATH_S = 1.0
"""How long a process whose pipe was closed may take to be gone, before it is said to run still."""

log = logging.getLogger(__name__)


class ProcessChild:
    """One subprocess, spoken to as `cluster.processes.child` describes."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self._failed = ""
        self._loading: tuple[int, int] | None = None
        self._started: queue.Queue[ChildReady | None] = queue.Queue()
        self._answers: queue.Queue[bool] = queue.Queue()
        self._secrets_set: queue.Queue[bool] = queue.Queue()
        self._numbers = itertools.count()
        self._asked: dict[int, queue.SimpleQueue[Told]] = {}
        self._calling = threading.Condition()
        self._unsent: dict[type[ToChild] | int, bytes] = {}
        self._hears = True
        """Both under `_calling`: the lines that are still to be written, in their order, and whether anybody reads."""
        self._condemned: list[Verdict] | None = None
        """The router's latest answer; None while it cannot be asked: before it is up, and while an answer is due."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cluster.processes.child", spec.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment_of(spec, os.environ)},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=spec.name, daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{spec.name} calls", daemon=True)
        self._reader.start()
        self._writer.start()
        self._send(spec)

    @property
    def pid(self) -> int:
        return self._process.pid

    def started_within(self, timeout_s: float) -> ChildReady | None:
        try:
            ready = self._started.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if ready is None:
            raise LaunchError(f"{self.spec.name}: {self._death()}")
        return ready

    def loading(self) -> tuple[int, int] | None:
        return self._loading

    def failure(self) -> str | None:
        status = self._process.poll()
        if status is None:
            return self._failed or None
        # What it said last is still on its way through the pipe.
        self._reader.join(1.0)
        if self._failed:
            return self._failed
        return told_status(status)

    def _death(self) -> str:
        """Return why it ended, once its pipe was closed: its end may take a moment longer, a core dump many."""
        if not self._failed:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(DEATH_S)
        return self.failure() or "closed its pipe, and still runs"

    def left(self) -> bool:
        return self._process.poll() == 0 and not self._failed

    def leave(self, grace_s: float) -> None:
        self._call(ChildLeave(grace_s))

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        self._call(SetWorkers(prefill, decode))

    def set_routers(self, routers: list[PeerAddress]) -> None:
        self._call(SetRouters(routers))

    def set_secrets(self, secrets: Sealed) -> None:
        # An answer that came too late for the call before is no answer to this one.
        while not self._secrets_set.empty():
            self._secrets_set.get_nowait()
        self._call(SetSecrets(secrets))
        self._answer(self._secrets_set)

    def ready(self) -> bool:
        self._call(IsReady())
        return self._answer(self._answers)

    def _answer(self, answers: "queue.Queue[bool]") -> bool:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                return answers.get(timeout=0.2)
            except queue.Empty:
                reason = self.failure()
            if reason is not None:
                raise LaunchError(f"{self.spec.name}: {reason}")
        raise LaunchError(f"{self.spec.name} did not answer in {ANSWER_TIMEOUT_S:.0f} s")

    def condemned(self) -> list[Verdict] | None:
        known = self._condemned
        if known is None:
            return None
        self._condemned = None
        self._send(WhoIsCondemned())
        return known

    def ask(self, what: str, argument: str) -> bytes:
        number = next(self._numbers)
        told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._asked[number] = told
        try:
            self._call(Ask(number, what, argument))
            answer = told.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            late = f"{self.spec.name} did not answer in {ANSWER_TIMEOUT_S:.0f} s"
            raise LaunchError(self.failure() or late) from None
        finally:
            del self._asked[number]
        if answer.error:
            raise LaunchError(answer.error)
        return bytes(answer.answer)

    def kill(self) -> None:
        self._process.kill()

    def stop(self, grace_s: float) -> None:
        self._send(ChildStop(grace_s))
        try:
            self._process.wait(grace_s + KILL_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        with self._calling:
            self._hears = False
            self._calling.notify()
        self._writer.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                _close(pipe)

    def _call(self, call: ToChild) -> None:
        if not self._send(call):
            raise LaunchError(f"{self.spec.name}: {self._death()}")

    def _send(self, call: ToChild | ChildSpec) -> bool:
        """Have one line written to the child, behind those before it. Never blocks: where the child reads nothing, only
        the latest workers and the latest routers wait for it. False when it is gone, which `failure` explains."""
        kind = type(call) if isinstance(call, SetWorkers | SetRouters) else next(self._numbers)
        with self._calling:
            if not self._hears or self._process.poll() is not None:
                return False
            self._unsent.pop(kind, None)
            self._unsent[kind] = encode_line(call)
            self._calling.notify()
        return True

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        while True:
            with self._calling:
                self._calling.wait_for(lambda: self._unsent or not self._hears)
                if not self._hears:
                    return
                line = self._unsent.pop(next(iter(self._unsent)))
            try:
                while line:
                    line = line[os.write(pipe.fileno(), line) :]
            except BrokenPipeError:
                with self._calling:
                    self._hears = False

    def _read(self) -> None:
        pipe = self._process.stdout
        for line in pipe if pipe is not None else ():
            try:
                report = decode_report(line)
            except msgspec.MsgspecError as error:  # cut short by its death, as a rule
                log.warning("%s says what is no report: %r (%s)", self.spec.name, line[:80], error)
                continue
            if isinstance(report, LoadProgress):
                self._loading = (report.done, report.total)
            elif isinstance(report, ChildStarted):
                self._condemned = []
                self._started.put(report.ready)
            elif isinstance(report, Failed):
                self._failed = report.reason
                self._started.put(None)
            elif isinstance(report, ChildAnswer):
                self._answers.put(report.ready)
            elif isinstance(report, SecretsSet):
                self._secrets_set.put(True)
            elif isinstance(report, Condemned):
                self._condemned = report.verdicts
            elif isinstance(report, Told) and report.number in self._asked:
                self._asked[report.number].put(report)
        self._started.put(None)


class ProcessLauncher:
    """Starts every child as a subprocess of this process."""

    def __init__(self) -> None:
        self._children: list[ProcessChild] = []

    def open(self) -> None:
        """Do nothing: plain processes need nothing started first."""

    def launch(self, spec: ChildSpec) -> ProcessChild:
        try:
            child = ProcessChild(spec)
        except OSError as error:  # no memory, no descriptor, or no process to be had now
            raise LaunchError(f"{spec.name}: cannot be started: {error.strerror or error}") from error
        self._children.append(child)
        return child

    def close(self) -> None:
        left = [child.spec.name for child in self._children if child.failure() is None]
        if left:
            raise LaunchError(f"still running: {', '.join(left)}")


def told_status(status: int) -> str:
    """Say how a process ended, by its exit status; one below zero is a signal's number."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-status}"


def _close(pipe: object) -> None:
    """Close a pipe whose other end may be gone: what was buffered for it no longer matters."""
    try:
        pipe.close()  # type: ignore[attr-defined]
    except BrokenPipeError:
        return

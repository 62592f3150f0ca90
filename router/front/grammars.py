"""Where constraints are tried out before a request is taken: in a process that may die of them.

One process for a router (`engine/constraints/trial.py`), started when the first constraint comes, and again after one
that has ended it. Trials wait for each other, by turns of the tenants, and nothing else waits for them. One that nobody
waits for any more does not begin. What became of a constraint is remembered, also that it was refused.
"""

import asyncio
import logging
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Timer

import msgspec

from engine.constraints.trial_messages import CPU_S, LENGTH, MEMORY_BYTES, ConstraintTrial, TrialVerdict
from engine.types import Constraint, FieldError
from router.front.api import ApiError

log = logging.getLogger(__name__)

MAX_WAITING = 32
"""Trials that may wait; each takes milliseconds, or at the worst a second. Where one more comes, the last of the tenant
that has most there is refused."""
RETRY_AFTER_S = 1.0
MAX_REMEMBERED = 512
REMEMBERED_BYTES = 8 * 1024 * 1024
"""Text of remembered constraints."""
WALL_S = 20.0
"""The longest trial, on a machine that has little time for it."""
START_S = 120.0
TOO_COSTLY = f"takes more than {CPU_S} second of a processor or {MEMORY_BYTES // 10**6} MB to compile"


@dataclass(slots=True, eq=False)
class _Trial:
    """One constraint of one tenant. `callers` wait for its verdict."""

    tenant: str
    constraint: Constraint
    verdict: "asyncio.Future[TrialVerdict]"
    callers: int = 0


class GrammarTrials:
    """Belongs to the router's event loop. One thread of its own talks to the process."""

    # Mutable state: verdicts of the latest constraints and the bytes of their text; each tenant's trials, the oldest
    # first, the tenants in the order of their turns and none without a trial; and the one that runs, which is in its
    # tenant's line until it has ended.

    def __init__(self, model_dir: Path | None) -> None:
        """`model_dir`: the prepared model; None where there is none, and no constraint is taken."""
        self._process = None if model_dir is None else TrialProcess(model_dir)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraint trials")
        self._verdicts: OrderedDict[Constraint, TrialVerdict] = OrderedDict()
        self._held_bytes = 0
        self._lines: dict[str, dict[Constraint, _Trial]] = {}
        self._running: _Trial | None = None

    def __repr__(self) -> str:
        return f"GrammarTrials({len(self._verdicts)} remembered, {self._count()} under way)"

    def close(self) -> None:
        """End the process, and whatever is on trial."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()
        for trial in [one for line in self._lines.values() for one in line.values()]:
            self._drop(trial)
            trial.verdict.cancel()

    async def approved(self, constraint: Constraint, field: str, tenant: str = "") -> Constraint:
        """Return the constraint as workers are told of it. Raises FieldError, naming `field`, for one that cannot be
        kept, and ApiError where too many are on trial or none can be."""
        verdict = self._verdicts.get(constraint)
        if verdict is None:
            trial = self._trial(constraint, field, tenant)
            trial.callers += 1
            try:
                # Whoever leaves does not take it from others that wait for the same.
                verdict = await asyncio.shield(trial.verdict)
            finally:
                trial.callers -= 1
                if not (trial.callers or trial.verdict.done() or trial is self._running):
                    self._drop(trial)
        else:
            self._verdicts.move_to_end(constraint)
        if verdict.constraint is None:
            raise FieldError(field, verdict.error)
        return verdict.constraint

    def _trial(self, constraint: Constraint, field: str, tenant: str) -> _Trial:
        if self._process is None:
            raise FieldError(field, "is not supported with this model")
        if (found := self._lines.get(tenant, {}).get(constraint)) is not None:
            return found
        if self._count() >= MAX_WAITING:
            self._make_room(tenant)
        trial = _Trial(tenant, constraint, asyncio.get_running_loop().create_future())
        self._lines.setdefault(tenant, {})[constraint] = trial
        self._begin(self._process)
        return trial

    def _count(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def _make_room(self, tenant: str) -> None:
        """Refuse the last trial of the tenant that has most; raises ApiError where that is the one to come."""
        too_many = ApiError("UNAVAILABLE", "too many constraints are on trial", retry_after_s=RETRY_AFTER_S)
        most = max(self._lines.values(), key=len)
        if len(most) <= len(self._lines.get(tenant, ())) + 1:
            raise too_many
        last = next(reversed(most.values()))
        self._drop(last)
        last.verdict.set_exception(too_many)

    def _begin(self, process: "TrialProcess") -> None:
        """Begin the next trial, where none runs."""
        if self._running is not None or not self._lines:
            return
        self._running = trial = next(iter(next(iter(self._lines.values())).values()))
        asked = asyncio.wrap_future(self._thread.submit(process.ask, trial.constraint))
        asked.add_done_callback(lambda done: self._ended(process, trial, done))

    def _ended(self, process: "TrialProcess", trial: _Trial, asked: "asyncio.Future[TrialVerdict]") -> None:
        self._running = None
        if trial.verdict.cancelled():  # closed meanwhile
            return
        if (error := asked.exception()) is not None:
            self._drop(trial)
            trial.verdict.set_exception(error)
            trial.verdict.exception()  # for when nobody waits any more
        else:
            self._remember(trial.constraint, asked.result())
            for others in list(self._lines.values()):
                if (same := others.get(trial.constraint)) is not None:
                    self._drop(same)
                    same.verdict.set_result(asked.result())
        if (line := self._lines.pop(trial.tenant, None)) is not None:
            self._lines[trial.tenant] = line  # the turn is all others' before it is its own again
        self._begin(process)

    def _drop(self, trial: _Trial) -> None:
        del self._lines[trial.tenant][trial.constraint]
        if not self._lines[trial.tenant]:
            del self._lines[trial.tenant]

    def _remember(self, constraint: Constraint, verdict: TrialVerdict) -> None:
        self._verdicts[constraint] = verdict
        self._held_bytes += len(constraint.text)
        while len(self._verdicts) > MAX_REMEMBERED or self._held_bytes > REMEMBERED_BYTES:
            oldest, _ = self._verdicts.popitem(last=False)
            self._held_bytes -= len(oldest.text)


class TrialProcess:
    """The process that tries constraints out. `ask` blocks; `close` may be called meanwhile, from another thread."""

    # Mutable state: the process, while there is one, and whether this is closed; both under the lock.

    def __init__(self, model_dir: Path) -> None:
        self._command = [sys.executable, "-m", "engine.constraints.trial", str(model_dir)]
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = Lock()

    def ask(self, constraint: Constraint) -> TrialVerdict:
        """Return what becomes of it; also what has ended the process is refused. Raises ApiError where there can be no
        process."""
        process = self._process if self._process is not None else self._start()
        frame = msgspec.msgpack.encode(ConstraintTrial(constraint))
        try:
            with _killed_after(process, WALL_S):
                _put(process, LENGTH.pack(len(frame)) + frame)
                return msgspec.msgpack.decode(_frame(process), type=TrialVerdict)
        except (EOFError, OSError, msgspec.MsgspecError):
            self._end()
            log.warning("a constraint has ended the process that tried it out: refused")
            return TrialVerdict(None, TOO_COSTLY)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._end()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._is_closed:
                raise ApiError("UNAVAILABLE", "the router is ending")
            pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
            process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=nowhere)
            self._process = process
        try:
            with _killed_after(process, START_S):
                _frame(process)
        except (EOFError, OSError) as error:
            self._end()
            raise ApiError("INTERNAL", "constraints cannot be tried out: their process does not start") from error
        return process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


@contextmanager
def _killed_after(process: "subprocess.Popen[bytes]", seconds: float) -> Iterator[None]:
    timer = Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _put(process: "subprocess.Popen[bytes]", data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()


def _frame(process: "subprocess.Popen[bytes]") -> bytes:
    """Read what comes behind its length. Raises EOFError where that is not all there."""
    return _exactly(process, *LENGTH.unpack(_exactly(process, LENGTH.size)))


def _exactly(process: "subprocess.Popen[bytes]", size: int) -> bytes:
    assert process.stdout is not None
    data = process.stdout.read(size)
    if len(data) < size:
        raise EOFError
    return data

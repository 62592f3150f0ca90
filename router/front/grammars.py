"""Where constraints are tried out before a request is taken: in a process that may die of them.

One process for a router (`engine/constraints/trial.py`), started when the first constraint comes, and again after one
that has ended it. Trials wait for each other, and nothing else waits for them. What became of a constraint is
remembered, also that it was refused.
"""

import asyncio
import logging
import sys
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.constraints.trial_messages import CPU_S, LENGTH, MEMORY_BYTES, Question, Verdict
from engine.types import Constraint, FieldError
from router.front.api import ApiError

log = logging.getLogger(__name__)

MAX_WAITING = 32
"""Trials that may wait; each takes milliseconds, or at the worst a second."""
RETRY_AFTER_S = 1.0
MAX_REMEMBERED = 512
REMEMBERED_BYTES = 8 * 1024 * 1024
"""Text of remembered constraints."""
WALL_S = 20.0
"""The longest trial, on a machine that has little time for it."""
START_S = 120.0
TOO_COSTLY = f"takes more than {CPU_S} second or {MEMORY_BYTES >> 20} MiB to compile"


class GrammarTrials:
    """Belongs to the router's event loop."""

    # Mutable state: the process, verdicts of the latest constraints and the bytes of their text, trials under way.

    def __init__(self, model_dir: Path | None) -> None:
        """`model_dir`: the prepared model; None where there is none, and no constraint is taken."""
        self._model_dir = model_dir
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[Constraint, Verdict] = OrderedDict()
        self._held_bytes = 0
        self._under_way: dict[Constraint, asyncio.Task[Verdict]] = {}

    def __repr__(self) -> str:
        return f"GrammarTrials({len(self._verdicts)} remembered, {len(self._under_way)} under way)"

    def close(self) -> None:
        """End the process, and whatever is on trial."""
        for task in self._under_way.values():
            task.cancel()
        self._end()

    async def approved(self, constraint: Constraint, field: str) -> Constraint:
        """Return the constraint as workers are told of it. Raises FieldError, naming `field`, for one that cannot be
        kept, and ApiError(UNAVAILABLE) where too many are on trial."""
        if self._model_dir is None:
            raise FieldError(field, "is not supported with this model")
        verdict = self._verdicts.get(constraint)
        if verdict is None:
            if constraint not in self._under_way and len(self._under_way) >= MAX_WAITING:
                raise ApiError("UNAVAILABLE", "too many constraints are on trial", retry_after_s=RETRY_AFTER_S)
            task = self._under_way.get(constraint)
            if task is None:
                task = asyncio.create_task(self._try(constraint, self._model_dir), name="constraint on trial")
                self._under_way[constraint] = task
            # Whoever leaves does not take it from others, nor leaves half an answer in the pipe.
            verdict = await asyncio.shield(task)
        else:
            self._verdicts.move_to_end(constraint)
        if verdict.constraint is None:
            raise FieldError(field, verdict.error)
        return verdict.constraint

    async def _try(self, constraint: Constraint, model_dir: Path) -> Verdict:
        try:
            async with self._turn:
                verdict = await self._ask(constraint, model_dir)
            self._remember(constraint, verdict)
            return verdict
        finally:
            del self._under_way[constraint]

    async def _ask(self, constraint: Constraint, model_dir: Path) -> Verdict:
        process = self._process if self._process is not None else await self._start(model_dir)
        assert process.stdin is not None and process.stdout is not None
        frame = msgspec.msgpack.encode(Question(constraint))
        try:
            async with asyncio.timeout(WALL_S):
                process.stdin.write(LENGTH.pack(len(frame)) + frame)
                await process.stdin.drain()
                return msgspec.msgpack.decode(await _frame(process.stdout), type=Verdict)
        except (TimeoutError, EOFError, OSError) as error:
            log.warning("a constraint has ended the process that tried it out (%s): refused", type(error).__name__)
            self._end()
            return Verdict(None, TOO_COSTLY)
        except BaseException:
            self._end()
            raise

    async def _start(self, model_dir: Path) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "engine.constraints.trial", str(model_dir)),
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                await _frame(process.stdout)
        except (TimeoutError, EOFError) as error:
            self._end()
            raise ApiError("INTERNAL", "constraints cannot be tried out: their process does not start") from error
        except BaseException:
            self._end()
            raise
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()

    def _remember(self, constraint: Constraint, verdict: Verdict) -> None:
        self._verdicts[constraint] = verdict
        self._held_bytes += len(constraint.text)
        while len(self._verdicts) > MAX_REMEMBERED or self._held_bytes > REMEMBERED_BYTES:
            oldest, _ = self._verdicts.popitem(last=False)
            self._held_bytes -= len(oldest.text)


async def _frame(read: asyncio.StreamReader) -> bytes:
    """Read what comes behind its length. Raises EOFError where that is not all there."""
    try:
        return await read.readexactly(*LENGTH.unpack(await read.readexactly(LENGTH.size)))
    except asyncio.IncompleteReadError as error:
        raise EOFError from error

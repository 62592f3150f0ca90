"""Runs parts one after the other, each in a process of its own: one that fails, dies, poisons its CUDA context or takes
too long costs nobody else anything.

The processes are forked from a server that has imported torch and has not touched the GPU. Each leads a process group,
which is killed at the end, so that nothing of a part is left behind; workers that a part has started in sessions of
their own end by themselves when it does (`cluster.processes.child`). A part's time is its own budget and whatever those
before it have not used.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.parts import Part

LOG_LINES = 40
"""How many lines of its output a part that failed is quoted with."""
PATIENCE_S = 5.0
"""How long a process that has said all may take to end by itself."""
_MIB = 1 << 20


@dataclass(slots=True)
class PartOutcome:
    """How one part ended. `failure` is empty where it came to its end; `lines` are those that it had by then."""

    limit_s: float
    lines: list[Line] = field(default_factory=list)
    took_s: float = 0.0
    failure: str = ""
    log: list[str] = field(default_factory=list)


def run(
    parts: Mapping[str, Part],
    open_card: Callable[[], Card],
    on_line: Callable[[str, Line], None],
    on_end: Callable[[str, PartOutcome], None],
) -> None:
    """Run all of `parts` in order. `open_card`, a function of a module, is called in each part's process; `on_line`
    hears of lines as they come, `on_end` of a part that has ended."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "triton"])
    deadline_s = time.monotonic()
    for name, part in parts.items():
        began_s = time.monotonic()
        deadline_s += part.budget_s
        outcome = PartOutcome(limit_s=deadline_s - began_s)
        with tempfile.TemporaryDirectory(
            prefix="headrace-gpu-", ignore_cleanup_errors=True
        ) as scratch:
            heard, says = server.Pipe(duplex=False)
            log = Path(scratch) / "log"
            work = server.Process(target=_work, args=(part, open_card, says, log), name=name)
            work.start()
            says.close()
            patience_s = 0.0
            try:
                outcome.failure = _hear(work, heard, outcome, deadline_s, partial(on_line, name))
                patience_s = 0.0 if outcome.failure else PATIENCE_S
            finally:
                # Also after Ctrl-C, which a process that leads its own session does not hear of.
                _end(work, patience_s)
            heard.close()
            if outcome.failure and log.exists():
                outcome.log = _tail(log)
        outcome.took_s = time.monotonic() - began_s
        on_end(name, outcome)


def _hear(
    work: BaseProcess,
    heard: Connection,
    outcome: PartOutcome,
    deadline_s: float,
    on_line: Callable[[Line], None],
) -> str:
    """Take lines until the part has ended; returns why it ended too early, if it did."""
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not heard.poll(left_s):
            return f"it was not over after {outcome.limit_s:.0f} s"
        try:
            said = heard.recv()
        except EOFError:
            work.join(PATIENCE_S)
            return f"its process died: {how_it_ended(work.exitcode)}"
        if said is None or isinstance(said, str):
            return said or ""
        outcome.lines.append(said)
        on_line(said)


def _work(part: Part, open_card: Callable[[], Card], says: Connection, log: Path) -> None:
    """Run the part in its process: send lines, then None, or why it failed. What it prints goes to `log`."""
    os.setsid()
    tempfile.tempdir = str(log.parent)
    # Workers may append to it too.
    with log.open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        for line in part.lines(open_card()):
            says.send(line)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        says.send(f"{type(error).__name__}: {error}")
    else:
        says.send(None)


def _end(work: BaseProcess, patience_s: float) -> None:
    """End the part's process, if it does not end by itself, and all that it has left in its group."""
    work.join(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(work.pid or 0, signal.SIGKILL)
    if work.is_alive():
        work.kill()
    work.join()
    work.close()


def _tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _MIB))
        return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]


def how_it_ended(code: int | None) -> str:
    """Write a process's exit code in words."""
    return signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"

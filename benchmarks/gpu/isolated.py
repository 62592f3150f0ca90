"""Runs tasks one after the other in a process of its own, which is made anew after a task that broke it.

An illegal access poisons a CUDA context for good, and some faults end the process: either must cost one task, not those
behind it. So a task that raises anything but a refusal (`kernels.launch.REFUSED`) is the last of its process.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.card import Card, Line, open_card
from benchmarks.gpu.dry import dry_card
from benchmarks.gpu.stages import how_it_ended

START_S = 60.0
"""How long a process may take to import torch and open the card, beside a task's own limit."""

Measure = Callable[[Card, Any], Line]


class Failure(str):
    """Why a task has no line."""


class Refusal(Failure):
    """The launch was refused: nothing ran, and nothing is broken."""


def each(
    tasks: Sequence[Any], measure: Measure, card: Card, limit_s: float
) -> Iterator[tuple[Any, Line | Failure]]:
    """Yield every task with what `measure`, a function of a module, says of it on `card`, in the order of `tasks`. The
    process, and all it holds, ends with this iterator. `limit_s`: how long a task may take."""
    worker: _Worker | None = None
    try:
        for task in tasks:
            worker = worker or _Worker(measure, card)
            told = worker.ask(task, limit_s)
            if worker.is_over:
                worker.end()
                worker = None
            yield task, told
    finally:
        if worker is not None:
            worker.end()


class _Worker:
    """The process that runs the tasks. `is_over`: it answers nothing more."""

    def __init__(self, measure: Measure, card: Card) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(measure, _opener(card), theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._patience_s = START_S
        self.is_over = False

    def ask(self, task: Any, limit_s: float) -> Line | Failure:
        began_s = time.monotonic()
        with suppress(BrokenPipeError):
            self._pipe.send(task)
        if not self._pipe.poll(limit_s + self._patience_s):
            self.is_over = True
            return Failure(f"it was not over after {time.monotonic() - began_s:.0f} s")
        self._patience_s = 0.0
        try:
            told, self.is_over = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self.is_over = True
            self._process.join(START_S)
            return Failure(f"its process died: {how_it_ended(self._process.exitcode)}")
        assert isinstance(told, (dict, Failure))
        return told

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


def _opener(card: Card) -> Callable[[], Card]:
    return dry_card if card.device.type == "cpu" else _Reopened(card)


class _Reopened:
    """Opens the same card in another process: a timer's buffers are its process's own."""

    def __init__(self, card: Card) -> None:
        self._sizes = card.sizes

    def __call__(self) -> Card:
        return open_card(self._sizes)


def _serve(measure: Measure, reopen: Callable[[], Card], pipe: Connection) -> None:
    card = reopen()
    # Not before a dry run has chosen Triton's interpreter.
    from kernels.launch import REFUSED

    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((measure(card, task), False))
        except REFUSED as error:
            pipe.send((Refusal(_said(error)), False))
        except BaseException as error:
            traceback.print_exc()
            pipe.send((Failure(_said(error)), True))
            # Whatever it would clean up may wait for a context that is broken.
            os._exit(1)


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"

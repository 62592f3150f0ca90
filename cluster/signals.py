"""Ctrl-C and SIGTERM: the first one unwinds the main thread, the later ones change nothing."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """Somebody asked this process to end; `status` is the exit status that says so."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the main thread at the first SIGINT or SIGTERM.

    Later ones are ignored, so that an impatient second Ctrl-C cannot cut the clean-up short and
    leave processes behind; what hangs is killed after its grace anyway.
    """
    raised = False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

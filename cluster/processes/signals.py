"""Ctrl-C and SIGTERM: the first one unwinds the main thread, at a place that can bear it; later ones change nothing.
SIGHUP asks for something else, in a thread of its own.

A signal may arrive inside a library that swallows exceptions, or leaves half-built things behind when one passes
through it (Ray does both). Such calls are made inside `shielded()`: there a signal is only noted, and acted on by the
next `check()` or at the end of the shielded block.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from cluster.processes.spec import LaunchError

log = logging.getLogger(__name__)


class Interrupted(BaseException):
    """Somebody asked this process to end; `status` is the exit status that says so. It is no Exception, so that
    handlers of failures let it pass."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class _Asked:
    """What this process has been asked to do. Changed by the main thread alone: that is where Python runs handlers."""

    def __init__(self) -> None:
        self.number = 0
        self.is_told = False
        self.shields = 0

    def tell(self) -> None:
        if self.number and not self.is_told:
            self.is_told = True
            raise Interrupted(self.number)


_asked = _Asked()


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the main thread, once, after the first SIGINT or SIGTERM.

    Later ones are ignored, so that an impatient second Ctrl-C cannot cut the clean-up short and leave processes behind;
    what hangs is killed after its grace anyway.
    """
    _asked.number, _asked.is_told = 0, False

    def handle(number: int, _: FrameType | None) -> None:
        _asked.number = _asked.number or number
        if not _asked.shields:
            _asked.tell()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def on_hangup(act: Callable[[], None]) -> Iterator[None]:
    """Run `act` for every SIGHUP inside this block, one after the other; what it raises is logged. A block inside this
    one has an `act` of its own."""
    turn = threading.Lock()

    def run() -> None:
        with turn:
            try:
                act()
            except LaunchError as error:
                log.warning("what SIGHUP asked for is not done: %s", error)
            except Exception:
                log.exception("what SIGHUP asked for has failed")

    def handle(number: int, _: FrameType | None) -> None:
        threading.Thread(target=run, name="hangup", daemon=True).start()

    before = signal.signal(signal.SIGHUP, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def shielded() -> Iterator[None]:
    """Hold signals back inside this block until `check()`, or until its end if it ends well."""
    _asked.shields += 1
    try:
        yield
    finally:
        _asked.shields -= 1
    if not _asked.shields:
        _asked.tell()


def check() -> None:
    """Raise Interrupted if that has been asked for and not raised yet. To be called where an interruption does no harm.
    """
    _asked.tell()

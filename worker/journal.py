"""Remembers a worker's latest requests: their flights, and their spans where requests are traced.

A journal reads the events and commands that pass through the shell, and decides nothing. Owner: the engine thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, Generic, TypeVar

from telemetry import tracing
from telemetry.flight import FlightRecorder

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

FORGOTTEN = 4096
"""Trace contexts that are kept at most; more are not open at a time."""


class WorkerJournal(ABC, Generic[K, T]):
    # Mutable state: the recorder, and of what is under way what its spans will need.

    ENDS: ClassVar[frozenset[str]]
    """The name of the last event of a flight once its request is not under way any more."""

    def __init__(self, worker: str) -> None:
        self.recorder = FlightRecorder(worker)
        self._note = self.recorder.note
        self._worker = worker
        self._tracing = tracing.current()
        self._traces: dict[K, T] = {}

    @abstractmethod
    def heard(self, event: object, now: float) -> None: ...

    @abstractmethod
    def said(self, commands: Sequence[object], now: float) -> None: ...

    def engine_failed(self) -> None:
        """The engine has ended: write down what was under way."""
        self.recorder.dump_open(self.ENDS, "the engine has failed under this request")

    def _trace(self, key: K, trace: T) -> None:
        if len(self._traces) >= FORGOTTEN:
            del self._traces[next(iter(self._traces))]
        self._traces[key] = trace

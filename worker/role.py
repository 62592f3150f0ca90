"""The part that makes a worker a prefill or a decode worker: its scheduler, its links to others, and what it
measures."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from engine.kv.tiers.commands import TierEvent
from engine.loop import Ran, Scheduler
from engine.messages import Load
from transfer.handoff.commands import Leave, Posted, ReaderEvent, Sent
from transfer.handoff.source import HandoffSource
from worker.journal import WorkerJournal

E = TypeVar("E")

SharedEvent = ReaderEvent | Posted | Sent | Leave | TierEvent
"""The events that the scheduler of either role hears; `E` are those that only one of them does."""


class Role(Protocol[E]):
    """Made when all parts of the worker are open (`worker.opening`). All calls come from the engine thread."""

    @property
    def growth_tokens(self) -> int | None:
        """Room for an answer that is promised when a request is taken; None: all of it."""

    @property
    def journal(self) -> WorkerJournal[Any, Any]: ...

    @property
    def source(self) -> HandoffSource[Any]: ...

    @property
    def scheduler(self) -> Scheduler[SharedEvent | E, object]: ...

    @property
    def due(self) -> float:
        """When the engine is to look for a step again though nothing has arrived; infinite: nothing says so."""

    def hear(self, item: object, tell: Callable[[E], None]) -> None:
        """Tell the scheduler what an item of the inbox means; each event has been acted on when `tell` returns. Raises
        TypeError for an item that is not this role's."""

    def carry_out(self, commands: Sequence[object]) -> bool:
        """Do what the scheduler asks of this role alone. Return True where the routers should have a report soon."""

    def turned(self, ran: Ran | None, now: float) -> None:
        """Measure a turn of the engine that is over, in which this step ended, if any did."""

    def load(self, load: Load, now: float) -> Load:
        """Tell the metrics what only this role counts. Return the report with what only this role measures."""

    def close(self) -> None:
        """End every stream of this role, behind what was said on it."""

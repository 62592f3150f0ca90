"""The conservation auditor: a worker's ledgers recompute their invariants, while it is idle and under load.

    free + cached + active + reserved + quarantined == total

who owns each block (`engine.kv.ledger`), and whatever else a ledger's `check` knows. One that does not add up means
that some block has two owners, or none: the next answer may be wrong with status OK. So a failure is written to the log
with every ledger's state, and raised: the worker ends at once, and its supervisor counts the death by this cause
(`cluster.processes.deaths`) and starts another. A count of our own would be gone before anybody reads it.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

log = logging.getLogger(__name__)

BLOCK_LEDGERS = ("kv", "cache")
"""Those whose failure means that the wrong KV may have been read."""


SLICE_ITEMS = 1024
"""Blocks, or the like, that are checked between two steps: it takes a millisecond or two."""


class Ledger(Protocol):
    """Anything that can recompute its own invariants; its `repr` shows its state."""

    def check(self) -> None:
        """Raises when an invariant is broken."""


@runtime_checkable
class SlicedLedger(Ledger, Protocol):
    """One that would take long: it can check a part of what it has, and then the next."""

    def check_some(self, limit: int) -> bool:
        """Check about `limit` things more; True when all have had their turn. Raises when an invariant is broken."""


class AuditError(Exception):
    """A ledger does not add up; the message names it and says what it found."""


class Auditor:
    """Checks `ledgers` (by name, the plainest first) in turn, one at a time, at most every `every_s` seconds and never
    for more than `share` of the time: a check that takes long is rarer, for the engine stands still meanwhile. Of one
    that can be checked in slices it looks at `slice_items` things at a time, and at everything where one does not add
    up.

    `clock` measures what a check costs; `audited` hears of it. Owner: the thread that owns the ledgers.
    """

    # Mutable state: whose turn it is, and when it is due.

    def __init__(
        self,
        ledgers: Mapping[str, Ledger],
        clock: Callable[[], float],
        audited: Callable[[float], None],
        every_s: float = 0.4,
        share: float = 0.01,
        slice_items: int = SLICE_ITEMS,
    ) -> None:
        self._ledgers = dict(ledgers)
        self._order = tuple(ledgers)
        self._turn = 0
        self._clock = clock
        self._audited = audited
        self._every_s = every_s
        self._share = share
        self._slice_items = slice_items
        self._due_s = clock()

    def look(self) -> bool:
        """Check the next ledger, or the next slice of one, if it is time; to be called between two steps. True if it
        did. Raises AuditError."""
        began_s = self._clock()
        if began_s < self._due_s:
            return False
        name = self._order[self._turn]
        ledger, is_over = self._ledgers[name], True
        try:
            if isinstance(ledger, SlicedLedger):
                is_over = ledger.check_some(self._slice_items)
            else:
                ledger.check()
        except Exception as error:
            self.audit()  # one that stands before it may be what is broken, and say so better
            if not isinstance(ledger, SlicedLedger):
                raise self._broken(name, error) from error
            # A slice compares what was with what is. What all of the books do not bear out ends no requests.
            log.error("a part of the %s ledger did not add up, and all of it does now: %s", name, error)
        self._turn = (self._turn + is_over) % len(self._order)
        cost_s = self._clock() - began_s
        self._due_s = began_s + cost_s + max(self._every_s if is_over else 0.0, cost_s / self._share)
        self._audited(cost_s)
        return True

    def audit(self, *only: str) -> None:
        """Check every ledger now, or `only` those named, in order. Raises AuditError from what the first broken one
        raised."""
        for name in only or self._order:
            try:
                self._ledgers[name].check()
            except Exception as error:
                raise self._broken(name, error) from error

    def _broken(self, name: str, error: Exception) -> AuditError:
        books = "\n".join(f"  {key}: {value!r}" for key, value in self._ledgers.items())
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        log.critical("the %s ledger does not add up: %s\n%s", name, what, books)
        return AuditError(f"the {name} ledger does not add up: {what}")

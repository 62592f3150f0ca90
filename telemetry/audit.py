"""The conservation auditor: a worker's ledgers recompute their invariants, while it is idle and under load.

    free + cached + active + reserved + quarantined == total

who owns each block (`engine.kv.ledger`), and whatever else a ledger's `check` knows. One that does not add up means
that some block has two owners, or none: the next answer may be wrong with status OK. So a failure is written to the log
with every ledger's state, and raised: the worker ends at once, and its supervisor counts the death by this cause
(`cluster.processes.deaths`) and starts another. A count of our own would be gone before anybody reads it.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

log = logging.getLogger(__name__)

BLOCK_LEDGERS = ("kv", "cache")
"""Those whose failure means that the wrong KV may have been read."""


class Ledger(Protocol):
    """Anything that can recompute its own invariants; its `repr` shows its state."""

    def check(self) -> None:
        """Raises when an invariant is broken."""


class AuditError(Exception):
    """A ledger does not add up; the message names it and says what it found."""


class Auditor:
    """Checks `ledgers` (by name, the plainest first) in turn, one at a time, at most every `every_s` seconds and never
    for more than `share` of the time: a check that takes long is rarer, for the engine stands still meanwhile.

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
    ) -> None:
        self._ledgers = dict(ledgers)
        self._order = tuple(ledgers)
        self._turn = 0
        self._clock = clock
        self._audited = audited
        self._every_s = every_s
        self._share = share
        self._due_s = clock()

    def look(self) -> bool:
        """Check the next ledger if it is time; to be called between two steps. True if it did. Raises AuditError."""
        began_s = self._clock()
        if began_s < self._due_s:
            return False
        try:
            self._ledgers[self._order[self._turn]].check()
        except Exception:
            self.audit()  # one that stands before it may be what is broken, and say so better
            raise
        self._turn = (self._turn + 1) % len(self._order)
        cost_s = self._clock() - began_s
        self._due_s = began_s + cost_s + max(self._every_s, cost_s / self._share)
        self._audited(cost_s)
        return True

    def audit(self, *only: str) -> None:
        """Check every ledger now, or `only` those named, in order. Raises AuditError from what the first broken one
        raised."""
        for name in only or self._order:
            try:
                self._ledgers[name].check()
            except Exception as error:
                books = "\n".join(f"  {key}: {value!r}" for key, value in self._ledgers.items())
                what = f"{type(error).__name__}: {error}".rstrip(": ")
                log.critical("the %s ledger does not add up: %s\n%s", name, what, books)
                raise AuditError(f"the {name} ledger does not add up: {what}") from error

"""The conservation auditor: while a worker is idle, its ledgers recompute their invariants.

    free + cached + active + reserved + quarantined == total

and whatever else a ledger's `check` knows. A ledger that does not add up means that some block has two owners, or none:
the next answer may be wrong with status OK. So a failure is counted, written to the log with every ledger's state, and
raised: the worker ends, and its supervisor starts another.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

log = logging.getLogger(__name__)


class Ledger(Protocol):
    """Anything that can recompute its own invariants; its `repr` shows its state."""

    def check(self) -> None:
        """Raises when an invariant is broken."""


class AuditError(Exception):
    """A ledger does not add up; the message names it and says what it found."""


class Auditor:
    """Checks `ledgers` (by name) at most every `every_s` seconds, and never for more than `share` of the time.

    `clock` measures what an audit costs; `failed` counts a failure. Owner: the thread that owns the ledgers.
    """

    # Mutable state: when the next audit is due.

    def __init__(
        self,
        ledgers: Mapping[str, Ledger],
        clock: Callable[[], float],
        failed: Callable[[], None],
        every_s: float = 1.0,
        share: float = 0.01,
    ) -> None:
        self._ledgers = dict(ledgers)
        self._clock = clock
        self._failed = failed
        self._every_s = every_s
        self._share = share
        self._due_s = clock()

    def idle(self) -> bool:
        """Audit if it is time; to be called while there is nothing to compute. True if it audited. Raises AuditError.
        """
        began_s = self._clock()
        if began_s < self._due_s:
            return False
        self.audit()
        ended_s = self._clock()
        self._due_s = ended_s + max(self._every_s, (ended_s - began_s) / self._share)
        return True

    def audit(self) -> None:
        """Check every ledger now. Raises AuditError from what the first broken one raised."""
        for name, ledger in self._ledgers.items():
            try:
                ledger.check()
            except Exception as error:
                self._failed()
                books = "\n".join(f"  {key}: {value!r}" for key, value in self._ledgers.items())
                what = f"{type(error).__name__}: {error}".rstrip(": ")
                log.critical("the %s ledger does not add up: %s\n%s", name, what, books)
                raise AuditError(f"the {name} ledger does not add up: {what}") from error

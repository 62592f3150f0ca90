"""Keeps new requests away from workers that fail, and tries those again. Pure: time is an argument.

    taken ──CONSECUTIVE failures──> ejected ──backoff over──> probed, by one request at a time
      ^                                ^                         │ fails: twice the backoff
      └── the probe ends well ─────────┼─────────────────────────┤
                                       └─────────────────────────┘

A failure is what the worker itself is to blame for: a request ended with a fault of WORKERS_FAULT, a prompt that it did
not hand over although it is there, an offer that it left unanswered. What a caller's request is refused for, and a
refusal for want of room, never count. A life that is lost is another matter (`router.core.losses`), and the next life
of a worker begins with a clean record.

Nobody is ejected who would make it more than half of a pool (`router.core.registry`); who is, stays so until its probe
ends well, even where the pool shrinks.
"""

from dataclasses import dataclass

from engine.types import Incarnation

WORKERS_FAULT = frozenset({"INTERNAL", "UNAVAILABLE", "UNKNOWN", "DATA_LOSS", "ABORTED", "UNIMPLEMENTED"})
"""Codes of faults that say nothing about the request."""
CONSECUTIVE = 3
"""Failures, with no success between, after which a worker is ejected."""
SHORTEST_S, LONGEST_S = 1.0, 60.0
"""The first backoff, and what it doubles up to."""
CLEAN_S = 300.0
"""After so long without a new ejection the next one is a first one again."""


@dataclass(slots=True)
class _Record:
    """`until_s`: the end of its backoff, None while requests are placed there as anywhere."""

    failures: int = 0
    ejections: int = 0
    until_s: float | None = None
    last_s: float = 0.0
    """When its last backoff began."""


class Ejections:
    """Mutable state: the record of every life that has failed since it last succeeded, or was ejected lately. The
    registry owns it."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, Incarnation], _Record] = {}

    def __repr__(self) -> str:
        ejected = [name for (name, _), record in self._records.items() if record.until_s is not None]
        return f"Ejections({', '.join(ejected) or 'none'})"

    def __bool__(self) -> bool:
        """True while some worker is ejected, or is to be probed."""
        return any(record.until_s is not None for record in self._records.values())

    def is_ejected(self, life: tuple[str, Incarnation]) -> bool:
        """Return True until a probe has ended well."""
        record = self._records.get(life)
        return record is not None and record.until_s is not None

    def takes(self, life: tuple[str, Incarnation], requests: int, now: float) -> bool:
        """Return True if a worker that holds so many requests may be offered one: any, or, when its backoff is over, a
        single one."""
        record = self._records.get(life)
        if record is None or record.until_s is None:
            return True
        return now >= record.until_s and not requests

    def failed(self, life: tuple[str, Incarnation], now: float, *, may_eject: bool) -> float | None:
        """Note a failure; return for how many seconds the worker is ejected, if it is. Without `may_eject` it is not:
        too many of its pool are."""
        record = self._records.setdefault(life, _Record())
        record.failures += 1
        if record.until_s is not None and now < record.until_s:
            return None  # what it was given before
        is_probe = record.until_s is not None
        if not is_probe and (record.failures < CONSECUTIVE or not may_eject):
            return None
        if now - record.last_s > CLEAN_S:
            record.ejections = 0
        backoff_s = min(SHORTEST_S * 2.0**record.ejections, LONGEST_S)
        record.ejections = min(record.ejections + 1, 32)
        record.until_s, record.last_s, record.failures = now + backoff_s, now, 0
        return backoff_s

    def succeeded(self, life: tuple[str, Incarnation], now: float) -> bool:
        """Note a request that ended well; return True if the worker is taken again. One that it had before it was
        ejected, and that ends within the backoff, is no probe."""
        record = self._records.get(life)
        if record is None or (record.until_s is not None and now < record.until_s):
            return False
        was_probed, record.until_s, record.failures = record.until_s is not None, None, 0
        if not record.ejections or now - record.last_s > CLEAN_S:
            del self._records[life]
        return was_probed

    def forget(self, name: str, but: Incarnation | None = None) -> None:
        """Drop the records of a worker, but that of one life."""
        for life in [life for life in self._records if life[0] == name and life[1] != but]:
            del self._records[life]

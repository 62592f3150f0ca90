"""Decides which lives of workers are given up, so that the supervisor ends them. Pure: time is an argument.

A worker is *condemned* when

- another worker keeps blocks for it and cannot reach it (`Load.silent`), and the router has no stream to it either, or
  no report over it for `escalate_s`;
- its stream is open, kept alive by gRPC's own threads, and no report has come over it for `hung_s`: its engine hangs.

A condemned life is lost to the router at once and for ever: it gets no request again, whatever becomes of it. A worker
that only cannot be reached, for `hung_s`, is *missing*: named to the supervisor too, and forgiven if it comes back. One
that this router has never reached, but was told of, is judged alike; an accuser is not believed before it has tried for
`escalate_s`.
Nobody here frees anything, and an innocent that is killed is one more death that requests recover from.
"""

import msgspec

from engine.types import Incarnation
from router.core.registry import Life, Registry

AWAY_S = 1.0
"""The router looks many times a second. If this long has passed since the last time, it was itself that slept."""


class Verdict(msgspec.Struct, frozen=True):
    """A life of a worker that is given up, with the reason."""

    name: str
    incarnation: Incarnation
    why: str


class FailureDetector:
    """Says which lives of workers are over. The router core owns it."""

    # Mutable state: the condemned by life, since when others have been without a stream, and the last look.

    def __init__(self, registry: Registry, escalate_s: float, hung_s: float) -> None:
        self._registry = registry
        self._escalate_s = escalate_s
        self._hung_s = hung_s
        self._condemned: dict[Life, Verdict] = {}
        self._missing_since: dict[Life, float] = {}
        self._last_look_s: float | None = None
        self.verdicts: tuple[Verdict, ...] = ()
        """All condemned and missing lives. It is replaced, never changed: any thread may read it."""

    def __repr__(self) -> str:
        return f"FailureDetector({', '.join(v.name for v in self.verdicts) or 'nobody'})"

    def is_condemned(self, life: Life) -> bool:
        return life in self._condemned

    def accused(self, accuser: str, silent: list[Incarnation], now: float) -> list[Verdict]:
        """Return the lives condemned because `accuser` keeps blocks for them and cannot reach them."""
        if not silent:
            return []  # as in nearly every report, of which there come many where there are many workers
        if self.has_slept(now):
            return []  # what we have not heard meanwhile is our own fault; the next report says it again
        found = []
        for life in self._registry.lives():
            if life[1] not in silent or life in self._condemned:
                continue
            worker = self._registry.get(life[0])
            if worker is not None:
                # 1. The router has a stream to it, but nothing comes over it either.
                quiet_s = now - worker.seen_s
                why = f"{accuser} cannot reach it, and it has not reported for {quiet_s:.1f} s"
                is_over = quiet_s >= self._escalate_s
            else:
                # 2. The router does not reach it either: it did once, or has tried for long enough.
                why = f"{accuser} and the router cannot reach it"
                tried_s = now - self._missing_since.get(life, now)
                is_over = self._registry.has_met(life) or tried_s >= self._escalate_s
            if is_over:
                found.append(self._condemn(life, why))
        return found

    def has_slept(self, now: float) -> bool:
        """Return True if the router itself has slept since its last look."""
        return self._last_look_s is not None and now - self._last_look_s > AWAY_S

    def look(self, now: float) -> list[Verdict]:
        """Return whom the time that has passed condemns."""
        if self.has_slept(now):
            self._registry.forgive(now)
            self._missing_since.clear()
        self._last_look_s = now
        found = [
            self._condemn(worker.life, f"connected, but without a report for {self._hung_s:.1f} s")
            for worker in self._registry
            if now - worker.seen_s >= self._hung_s
        ]
        self._miss(now)
        return found

    def forget(self, name: str) -> None:
        """Drop what was judged of a worker that was taken away."""
        self._condemned = {life: v for life, v in self._condemned.items() if life[0] != name}
        self.verdicts = tuple(self._condemned.values())

    def _miss(self, now: float) -> None:
        """Note who has no stream, and who has had none for too long."""
        self._missing_since = {
            life: self._missing_since.get(life, now)
            for life in self._registry.lives()
            if not self._registry.is_connected(life) and life not in self._condemned
        }
        why = f"the router has not reached it for {self._hung_s:.1f} s"
        missing = [life for life, since_s in self._missing_since.items() if now - since_s >= self._hung_s]
        self.verdicts = (*self._condemned.values(), *(Verdict(*life, why) for life in missing))

    def _condemn(self, life: Life, why: str) -> Verdict:
        verdict = self._condemned[life] = Verdict(*life, why)
        self.verdicts = tuple(self._condemned.values())
        return verdict

"""Whether what should move has stopped, a thread or a stream of bytes, judged by looks every now and then. Pure."""

LOOK_S = 1.0
"""Time between two looks counts for at most this much: a process that was stopped as a whole proves nothing."""


class Watchdog:
    # Mutable state: the last beat seen, for how long it has not changed, and when that was looked at.

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._beat: int | None = None
        self._stuck_s = 0.0
        self._looked_s = 0.0

    def __repr__(self) -> str:
        return f"Watchdog(stuck for {self._stuck_s:.1f} of {self._limit_s:.1f} s)"

    def is_stuck(self, beat: int | None, now: float) -> bool:
        """`beat` changes with whatever gets done, and is None while there is nothing to do."""
        passed_s = min(now - self._looked_s, LOOK_S)
        self._looked_s = now
        if beat is None or beat != self._beat:
            self._beat, self._stuck_s = beat, 0.0
            return False
        self._stuck_s += passed_s
        return self._stuck_s >= self._limit_s

"""Counts the kernels that this process has compiled: before it serves, or while requests wait for it.

Triton compiles a kernel when it is first launched with arguments of some kind: types, compile-time constants, whether
an address is a multiple of 16 bytes and a number is 1. What it finds in its cache on disk is counted too: that is
loaded onto the device, and keeps a step waiting as well.
"""

import logging
import threading

PHASES = ("start", "serving")

log = logging.getLogger(__name__)


class Compilations:
    """Counts by phase. Any thread may use it."""

    # Mutable state, all of it.

    def __init__(self) -> None:
        self._counts = dict.fromkeys(PHASES, 0)
        self._phase = PHASES[0]
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Compilations({self._phase}, {self._counts})"

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def serve(self) -> None:
        """Count as `serving` from now on: requests wait for whatever is compiled."""
        self._phase = PHASES[1]

    def compiled(self, kernel: str) -> None:
        """Count one more, of the kernel of this name."""
        with self._lock:
            self._counts[self._phase] += 1
        if self._phase != PHASES[0]:
            log.warning("%s was compiled while requests waited: the warm-up did not launch it so", kernel)


OWN = Compilations()
"""This process's count: Triton reports to one place."""

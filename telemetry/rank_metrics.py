"""What a worker shows of the processes that compute its model together: one, or the ranks of a tensor-parallel worker.

All of it is read when a page is rendered. `process_` families are of rank 0 alone: the processor time of the others is
only here.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from telemetry.families import Families

WAITED_FOR = ("sums", "orders")
"""What rank 0 waits for: the other ranks' parts of a sum, and their word that they have read what to compute."""


class WaitingRanks(Protocol):
    """Fulfilled by `engine.ranks.group.RankGroup`."""

    @property
    def waited_s(self) -> Mapping[str, float]: ...


class RankMetrics:
    """Families of one worker. `weights`: bytes by the pid of each rank, rank 0 first; `ranks` is None where there is
    but one."""

    def __init__(self, families: Families, weights: Mapping[int, int], ranks: WaitingRanks | None) -> None:
        self._pids = list(weights)
        by_rank = {str(rank): nbytes for rank, nbytes in enumerate(weights.values())}
        families.asked(
            "rank_weights_bytes",
            "Weights of each rank of a worker; a worker of one process is rank 0.",
            "rank",
            lambda: by_rank,
        )
        families.asked("rank_cpu_seconds_total", "Processor time of each rank of a worker.", "rank", self._cpu_s)
        families.asked(
            "rank_wait_seconds_total",
            "Time that rank 0 of a tensor-parallel worker has waited for the other ranks, by what for.",
            "what",
            lambda: dict.fromkeys(WAITED_FOR, 0.0) if ranks is None else ranks.waited_s,
        )

    def _cpu_s(self) -> Mapping[str, float]:
        found = {}
        for rank, pid in enumerate(self._pids):
            with suppress(OSError):  # it has ended, and the worker is about to
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[str(rank)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

"""Counts of a supervisor: its processes' starts, and what they died of, on a page that outlives them.

What a process counts as it dies is gone with its page, long before anybody scrapes it. So the one that survives counts:
every start and every death of a worker or router, once, a death by the cause that its supervisor was told
(`cluster.processes.deaths`).
"""

from collections.abc import Mapping

from telemetry.families import Growth, ProcessMetrics
from telemetry.labels import DEATH_CAUSES, PROCESS_KINDS


class SupervisorMetrics(ProcessMetrics):
    """The families of the process that starts all others, and starts them again."""

    def __init__(self, model: str, worker: str = "supervisor") -> None:
        super().__init__(model=model, pool="supervisor", worker=worker)
        self._deaths = self.families.counter(
            "process_deaths_total", "Processes that died, by what of.", role=PROCESS_KINDS, cause=DEATH_CAUSES
        )
        self._starts = self.families.counter(
            "process_starts_total", "Starts of processes, those in vain included.", peer=(), role=()
        )
        self._growth = Growth()

    def started(self, name: str, kind: str) -> None:
        """Count the start of a process of this name."""
        self._starts[name, kind].inc()

    def deaths(self, totals: Mapping[tuple[str, str], int]) -> None:
        """Take over the totals of deaths since the supervisor started, by kind of process and cause."""
        for (kind, cause), total in totals.items():
            self._deaths[kind, cause].inc(self._growth.of((kind, cause), total))

"""Lists every metric family that a process of ours shows, read off the real registries: what dashboards may ask for."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import Metric

from telemetry.families import ProcessMetrics
from telemetry.gpu_metrics import COMPILED, GpuMetrics
from telemetry.labels import ENGINE_STATES, PROCESS_KINDS, ROLES
from telemetry.metrics import WorkerMetrics
from telemetry.rank_metrics import RankMetrics
from telemetry.router_metrics import RouterMetrics, WorkerView
from telemetry.supervisor_metrics import SupervisorMetrics
from telemetry.swap_metrics import SwapMetrics
from telemetry.tier_metrics import TierMetrics

OWN = ("model", "pool", "worker")
EVERYWHERE = ("supervisor", "router", "prefill", "decode")
"""The values of `pool`."""


@dataclass(slots=True)
class Shown:
    """One family that a process shows. `labels` are its own beside model, pool and worker, with the values known at the
    start."""

    name: str
    kind: str
    text: str
    pools: list[str] = field(default_factory=list)
    labels: dict[str, set[str]] = field(default_factory=dict)

    @property
    def samples(self) -> tuple[str, ...]:
        """Return the names of its series."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{end}" for end in ("bucket", "sum", "count"))
        return (self.name,)


def catalog() -> dict[str, Shown]:
    """Return all families by name, of a supervisor, a router and a worker of each pool."""
    router = RouterMetrics("model", shadows=("random",))
    for role in ROLES:
        router.expected_worker(f"{role}-0", role)
    router.cluster(0, 0, [WorkerView(f"{role}-0", role, "ready", 0) for role in ROLES])
    supervisor = SupervisorMetrics("model")
    for kind in PROCESS_KINDS:
        supervisor.started(f"{kind}-0", kind)
    processes: list[tuple[str, ProcessMetrics]] = [("supervisor", supervisor), ("router", router)]
    for pool in ROLES:
        worker = WorkerMetrics("model", f"{pool}-0", pool)
        memory = dict.fromkeys(
            ("weights_bytes", "workspace_bytes", "kv_bytes", "draft_weights_bytes", "draft_kv_bytes"), 0
        )
        worker.engine(dict.fromkeys(ENGINE_STATES, 0.0).copy)
        worker.opened(block_size=16, blocks=1, dtype="float32", transport="auto", memory=memory)
        GpuMetrics(worker.families, dict, None, dict.fromkeys(COMPILED, 0).copy)
        RankMetrics(worker.families, {os.getpid(): 0}, None)
        TierMetrics(worker.families)
        if pool == "decode":
            SwapMetrics(worker.families, block_bytes=1)
        processes.append((pool, worker))
    found: dict[str, Shown] = {}
    for pool, process in processes:
        process.certificates(lambda: dict.fromkeys(("front", "internal"), 0.0))
        _add(found, pool, process.families.registry.collect())
    return dict(sorted(found.items()))


def _add(found: dict[str, Shown], pool: str, families: Iterable[Metric]) -> None:
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        shown = found.setdefault(name, Shown(name, family.type, family.documentation))
        shown.pools.append(pool)
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label not in (*OWN, "le"):
                    shown.labels.setdefault(label, set()).add(value)

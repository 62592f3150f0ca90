"""The router's report to an operator: its workers as it sees them, its queue, and the figures of the last minute."""

from collections.abc import Sequence

import msgspec

from engine.messages import Load, RankUse
from router.hub import Hub
from router.status.journal import Recent, together

_SAME = ("role", "address", "host", "pid", "metrics_address", "block_size", "blocks", "ranks")
"""Fields that a worker says of itself, and an operator is told unchanged."""


class WorkerOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A connected worker. `age_s`: since its last report, which is `load`."""

    name: str
    role: str
    address: str
    incarnation: str
    host: str
    pid: int
    metrics_address: str
    block_size: int
    blocks: int
    ranks: list[RankUse] = []
    age_s: float
    load: Load | None = None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """`waiting` requests stand in line; `open` ones wait, or are held by some worker. The targets are for the time to
    first token, and for the mean gap between tokens. `silent`: routers that could not be asked, and why; no router says
    that itself."""

    model: str
    ready: bool
    waiting: int
    open: int
    workers: list[WorkerOverview]
    recent: Recent
    slo_ttft_s: float = 0.5
    slo_itl_s: float = 0.05
    silent: dict[str, str] = {}


def merged(told: Sequence[Overview]) -> Overview:
    """Return one report of the reports of several routers, at least one: requests are added up, of each worker the
    latest word is taken, and of quantiles the largest, since those of all requests together do not follow."""
    workers: dict[str, WorkerOverview] = {}
    for worker in sorted((w for one in told for w in one.workers), key=lambda w: (w.name, -w.age_s)):
        workers[worker.name] = worker
    return Overview(
        model=told[0].model,
        ready=all(one.ready for one in told),
        waiting=sum(one.waiting for one in told),
        open=sum(one.open for one in told),
        workers=list(workers.values()),
        recent=together([one.recent for one in told]),
        slo_ttft_s=told[0].slo_ttft_s,
        slo_itl_s=told[0].slo_itl_s,
    )


def overview(hub: Hub, model: str, targets_s: tuple[float, float], now: float) -> Overview:
    """Make the report, on the hub's event loop."""
    workers = [
        WorkerOverview(
            name=worker.name,
            incarnation=f"{worker.info.incarnation:016x}",
            **{name: getattr(worker.info, name) for name in _SAME},
            age_s=now - worker.seen_s,
            # Identities of evicted blocks are for the router alone.
            load=worker.load and msgspec.structs.replace(worker.load, evicted=[], moved={}),
        )
        for worker in sorted(hub.core.registry, key=lambda worker: worker.name)
    ]
    return Overview(
        model=model,
        ready=hub.ready(),
        waiting=hub.core.waiting,
        open=hub.core.open,
        workers=workers,
        recent=hub.journal.recent(now, targets_s),
        slo_ttft_s=targets_s[0],
        slo_itl_s=targets_s[1],
    )

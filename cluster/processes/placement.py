"""Decides which node of a Ray cluster a process goes to, without Ray.

Workers go to the nodes whose label names their pool, each to the one that has fewest of ours. The router goes to the
node on which `headrace up` runs, where its clients look for it, also after it was replaced.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from cluster.processes.spec import Kind
from engine.config import EngineConfig

NODE_ID_LABEL = "ray.io/node-id"
"""Ray gives it to every node itself."""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which Ray the actors run on, when the launcher is `ray`."""

    address: str = "local"
    """`local`: a Ray of our own on this machine, gone at the end; `auto`: the one that this machine is a node of; or
    the HOST:PORT of its head. On the last two, only what was started there is taken away again."""
    pool_label: str = "pool"
    """Name of the nodes' label by which workers are placed: prefill workers go to nodes with `pool=prefill`, decode
    workers to those with `pool=decode`; empty: to any node. A Ray of our own has no labels."""
    gpus_per_worker: float = 1.0
    """GPUs that a worker with `engine.device = "cuda"` asks of a Ray cluster for each of its ranks, of one host, and
    which then shows it no other: 0.5 puts two workers of one rank on one; 0 asks for none and shows all, as it is with
    `cuda:N` and on a Ray of our own."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A live node. `is_leaving`: Ray drains it and places nothing new there. `gpus`: all that it has, of which our
    processes there have asked for `asked_gpus`."""

    id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    is_leaving: bool = False
    gpus: float = 0.0
    asked_gpus: float = 0.0


def gpus(kind: Kind, engine: EngineConfig, config: RayConfig) -> float:
    """Return how many GPUs a process on a Ray cluster asks of its node: one actor asks for those of all its ranks, so
    Ray finds them on one host or nowhere. Raises ValueError for ranks that are to share one."""
    if kind == "router" or engine.device != "cuda":
        return 0.0
    ranks, each = engine.tensor_parallel, config.gpus_per_worker
    if ranks > 1 and each not in (0.0, 1.0):
        raise ValueError(f"ray.gpus_per_worker: {each:g}, but each of {ranks} ranks (engine.tensor_parallel) has a GPU")
    return each * ranks


def selector(
    kind: Kind,
    config: RayConfig,
    nodes: Iterable[ClusterNode],
    ours: Mapping[str, int],
    here: str,
    wanted_gpus: float = 0.0,
) -> dict[str, str]:
    """Return the labels that a process's node must have. `ours`: processes of this kind by node id; `here`: this node's
    id.

    Names one node if any will do now; else only the pool, and Ray waits until a node has room or joins. Raises
    ValueError where the nodes of the pool are there and none has `wanted_gpus`, of several ranks."""
    if kind == "router":
        return {NODE_ID_LABEL: here}
    wanted: dict[str, str] = {config.pool_label: kind} if config.pool_label else {}
    fit = [
        node
        for node in nodes
        if not node.is_leaving and all(node.labels.get(k) == v for k, v in wanted.items())
    ]
    if fit and wanted_gpus > max(1.0, most := max(node.gpus for node in fit)):
        raise ValueError(
            f"the ranks of one {kind} worker (engine.tensor_parallel) need {wanted_gpus:g} GPUs of one host, and no "
            f"node has more than {most:g}: ranks on several hosts are not supported"
        )
    # A node that our own processes have filled would be waited for until they end.
    roomy = [node for node in fit if node.gpus - node.asked_gpus >= wanted_gpus]
    if not roomy:
        return wanted
    best = min(roomy, key=lambda node: (ours.get(node.id, 0), node.id))
    return {**wanted, NODE_ID_LABEL: best.id}

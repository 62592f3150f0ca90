"""`headrace plan --check`: compares the memory that workers really take with the plan.

A prefill and a decode worker of this configuration are started one after the other, in this process, without a router;
what they say of themselves in `WorkerInfo` is held against the plan.
"""

import importlib
import os
from typing import Any

import msgspec

from cluster.config import ClusterConfig, with_model_dir
from cluster.plan.plan import Plan
from cluster.plan.planner import Pool
from cluster.processes.launch import prepare_draft, prepare_model
from cluster.processes.spec import FACTORIES, LaunchError, child_environment
from cluster.secret import drawn
from engine.handshake import Keyring
from engine.messages import WorkerInfo

TOLERANCE = 0.05


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one worker, planned and measured. `deviation` is relative to the worker's."""

    worker: str
    what: str
    planned: int
    found: int
    deviation: float

    @property
    def fits(self) -> bool:
        return abs(self.deviation) <= TOLERANCE


def check_plan(plan: Plan, config: ClusterConfig) -> list[Compared]:
    """Start each worker and compare. Raises LaunchError where one does not start, ModelError for its model."""
    model_dir = prepare_model(config)
    drafts = {"decode": prepare_draft(config, model_dir)}
    threads = max(config.prefill.engine.threads, config.decode.engine.threads)
    # Before torch is imported, if it is not yet.
    os.environ.update(child_environment(threads, os.environ))
    compared: list[Compared] = []
    for pool in plan.pools:
        part: Any = getattr(config, pool.name)
        engine = msgspec.structs.replace(
            with_model_dir(part.engine, model_dir, drafts.get(pool.name, "")), profile_workspace=True
        )
        info = _ask(pool.name, msgspec.structs.replace(part, engine=engine))
        compared += compare(pool, info)
    return compared


def compare(pool: Pool, info: WorkerInfo) -> list[Compared]:
    """Compare the plan's figures for one worker with the worker's own."""
    memory = info.memory
    figures = {
        "weights_bytes": (pool.weights_bytes or 0, memory.weights_bytes),
        "draft_weights_bytes": (pool.draft_weights_bytes, memory.draft_weights_bytes),
        "draft_kv_bytes": (pool.draft_kv_bytes, memory.draft_kv_bytes),
        "workspace_bytes": (pool.workspace_bytes or 0, memory.workspace_bytes),
        "blocks": (pool.blocks, info.blocks),
        "kv_bytes": (pool.kv_bytes, memory.kv_bytes),
    }
    return [
        Compared(
            worker=pool.name,
            what=what,
            planned=planned,
            found=found,
            deviation=planned / found - 1 if found else float(planned != 0),
        )
        for what, (planned, found) in figures.items()
        if planned or found or not what.startswith("draft_")
    ]


def _ask(role: str, config: msgspec.Struct) -> WorkerInfo:
    module, _, name = FACTORIES[role].partition(":")
    factory = getattr(importlib.import_module(module), name)
    worker: Any = factory(f"{role}-0", config, "127.0.0.1", 0, Keyring((drawn(),)))
    try:
        info: WorkerInfo = worker.start()
    except ValueError as error:
        raise LaunchError(f"{role}: {error}") from error
    finally:
        worker.stop(0.0)
    return info

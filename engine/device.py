"""Everything one engine computes with, opened from its config: the model, its KV pool, a runner."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.attention import TorchAttention
from engine.config import EngineConfig, StepLimits
from engine.determinism import deviations
from engine.kv.layout import KVLayout
from engine.kv.manager import KVCacheManager
from engine.kv.paged import PagedKV
from engine.messages import MemoryUse
from engine.model.llama import Llama, load_model
from engine.model.weights import WeightIndex
from engine.runner import ModelRunner, Runner
from engine.text.files import TextFiles
from engine.workspace import measure_workspace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    """One pool and what runs over it. `fingerprint` covers weights and dtype: peers must agree on it."""

    model: str
    layout: KVLayout
    blocks: int
    kv: PagedKV
    runner: Runner
    fingerprint: str
    vocab: int
    context_tokens: int
    stop_ids: frozenset[int]
    memory: MemoryUse = field(default_factory=MemoryUse)

    def manager(self) -> KVCacheManager:
        return KVCacheManager(self.blocks, self.layout.block_size, self.fingerprint)


def open_device(config: EngineConfig, limits: StepLimits | None = None) -> Device:
    """Map the prepared model and allocate the pool. Sets this process's compute threads.

    `limits` are those of the steps to come: what a profiled workspace is measured for. Raises ModelError for a model
    that is not whole, ValueError for a pool too small to hold one block, for a profile without limits, and where
    `deterministic` is on and cannot be kept.
    """
    torch.set_num_threads(config.threads)
    model_dir = Path(config.model_dir)
    model = load_model(model_dir)
    stable = config.deterministic != "off" and _holds(model, config)
    shape = model.config
    layout = KVLayout(
        kv_heads=shape.kv_heads,
        layers=shape.layers,
        block_size=config.block_size,
        head_dim=shape.head_dim,
        dtype=config.dtype,
    )
    weights_bytes = WeightIndex.load(model_dir).size_bytes + model.table_bytes
    workspace_bytes = 0
    if config.profile_workspace or config.pool_bytes == "auto":
        if limits is None:
            raise ValueError("a workspace can only be measured for known step limits")
        workspace_bytes = measure_workspace(model_dir, config.block_size, limits)
    kv_bytes = config.kv_bytes(weights_bytes, workspace_bytes)
    blocks = kv_bytes // layout.block_bytes
    if blocks < 1:
        raise ValueError(
            f"pool_bytes {config.pool_bytes}: {kv_bytes} bytes hold no block of {layout.block_bytes}"
        )
    kv = PagedKV(layout, blocks)
    memory = MemoryUse(weights_bytes, workspace_bytes, kv.nbytes)
    log.info("memory of %s: %s", shape.name, memory)
    return Device(
        model=shape.name,
        layout=layout,
        blocks=blocks,
        kv=kv,
        runner=ModelRunner(model, kv, TorchAttention(shape.heads, stable)),
        fingerprint=f"{shape.fingerprint}/{layout.dtype}",
        vocab=shape.vocab,
        context_tokens=shape.context_tokens,
        stop_ids=frozenset(TextFiles.load(model_dir).settings.stop_ids),
        memory=memory,
    )


def _holds(model: Llama, config: EngineConfig) -> bool:
    found = deviations(model, config.block_size)
    told = ", ".join(found)
    if found and config.deterministic == "on":
        raise ValueError(f"engine.deterministic: {config.dtype} on this machine gives other bits by {told}")
    if found:
        log.warning("answers may differ in near ties on this machine, which gives other bits by %s", told)
    return not found

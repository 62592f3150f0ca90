"""Everything one engine computes with, opened from its config: the model, its KV pool, a runner."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention import TorchAttention
from engine.config import EngineConfig
from engine.kv.layout import KVLayout
from engine.kv.manager import KVCacheManager
from engine.kv.paged import PagedKV
from engine.model.llama import load_model
from engine.runner import ModelRunner, Runner
from engine.text.files import TextFiles

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

    def manager(self) -> KVCacheManager:
        return KVCacheManager(self.blocks, self.layout.block_size, self.fingerprint)


def open_device(config: EngineConfig) -> Device:
    """Map the prepared model and allocate the pool. Sets this process's compute threads.

    Raises ModelError for a model that is not whole, ValueError for a pool too small to hold one block.
    """
    torch.set_num_threads(config.threads)
    model_dir = Path(config.model_dir)
    model = load_model(model_dir)
    if not model.rows_are_independent():
        log.warning("on this machine a row's bits depend on its batch: answers may differ in near ties")
    shape = model.config
    layout = KVLayout(
        kv_heads=shape.kv_heads,
        layers=shape.layers,
        block_size=config.block_size,
        head_dim=shape.head_dim,
        dtype=config.dtype,
    )
    blocks = config.pool_bytes // layout.block_bytes
    if blocks < 1:
        raise ValueError(f"pool_bytes {config.pool_bytes} holds no block of {layout.block_bytes} bytes")
    kv = PagedKV(layout, blocks)
    return Device(
        model=shape.name,
        layout=layout,
        blocks=blocks,
        kv=kv,
        runner=ModelRunner(model, kv, TorchAttention(shape.heads)),
        fingerprint=f"{shape.fingerprint}/{layout.dtype}",
        vocab=shape.vocab,
        context_tokens=shape.context_tokens,
        stop_ids=frozenset(TextFiles.load(model_dir).settings.stop_ids),
    )

"""The seam between a model and the attention kernels: five names, everything passed in."""

from typing import Protocol

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.kv.paged import PagedKV
from kernels.kv_write import plan_kv_write, write_kv
from kernels.paged_attention import AttentionPlan, paged_attention, plan_attention


class AttentionBackend(Protocol):
    def begin(self, batch: ForwardBatch, kv: PagedKV) -> None:
        """Plan a step; called once before its first layer."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, kv: PagedKV
    ) -> Tensor:
        """Write k, v `[rows, kv_heads, head_dim]` into the pool, then attend with q `[rows, heads, head_dim]` (rotary
        embedding already applied to q and k). Returns `[rows, heads * head_dim]`; padding rows are zero."""


class TorchAttention:
    """The CPU kernels over block tables. `stable`: a row's bits depend on its own prefix alone."""

    def __init__(self, heads: int, stable: bool = True) -> None:
        self._heads = heads
        self._stable = stable
        self._plan: AttentionPlan | None = None
        self._rows: Tensor | None = None

    def begin(self, batch: ForwardBatch, kv: PagedKV) -> None:
        self._plan = plan_attention(
            batch.query_counts,
            batch.context_lens,
            batch.block_tables,
            kv.tensor,
            self._heads,
            self._stable,
        )
        self._rows = plan_kv_write(batch.slots, kv.tensor)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, kv: PagedKV
    ) -> Tensor:
        if self._plan is None or self._rows is None:
            raise RuntimeError("attend before begin")
        write_kv(k, v, kv.tensor, layer, self._rows)
        out = torch.empty_like(q)
        out[batch.rows :] = 0
        paged_attention(q, kv.tensor, layer, self._plan, out)
        return out.view(q.shape[0], -1)

"""A rank's heads of a worker's pool, as kernels see them.

A block holds its KV heads one after the other, so a pool of blocks of H heads is also one of H/n times as many blocks
of n heads:

    worker's block b of 3 heads     |     head 0     |     head 1     |     head 2     |
    what a rank of one head sees    |   block 3 b    |  block 3 b + 1 |  block 3 b + 2 |

Rank 0 has the pool, as a worker of one rank has; the others map it, and every rank renumbers the blocks of a step and
writes its own heads' rows. With more ranks than KV heads, those of one head write the same bytes to the same place.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from engine.backends.attention import AttentionBackend, LayerInput, Mixture
from engine.batch import ForwardBatch, GroupTables
from engine.kv.layout import KVLayout
from engine.logprobs import QueuedDraws
from engine.model.config import Activation
from engine.step import Drawn, Row
from engine.storage.paged import KVTensors, PoolFile


class HeadBlocks:
    """The `heads` of a pool of this layout. Raises ValueError where blocks do not divide so."""

    def __init__(self, layout: KVLayout, heads: range) -> None:
        self._each = layout.kv_heads // len(heads)
        self._own = heads.start // len(heads)
        if self._each * len(heads) != layout.kv_heads or self._own * len(heads) != heads.start:
            raise ValueError(f"blocks of {layout.kv_heads} heads do not divide by heads {heads.start} to {heads.stop}")
        self.layout = layout.restricted(heads)

    def view(self, memory: Tensor, file: PoolFile) -> KVTensors:
        """`memory`: uint8 `[blocks, block_bytes]` of the whole pool."""
        return KVTensors(self.layout, memory.view(len(memory) * self._each, self.layout.block_bytes), file)

    def batch(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the step with the numbers that blocks have in the view."""
        first, *windows = [self._group(tables) for tables in batch.groups]
        return replace(batch, slots=first.slots, block_tables=first.block_tables, windows=tuple(windows))

    def _group(self, tables: GroupTables) -> GroupTables:
        size = self.layout.block_size
        blocks, offsets = tables.slots // size, tables.slots % size
        slots = self._numbers(blocks) * size + offsets
        return GroupTables(slots, [self._numbers(table) for table in tables.block_tables])

    def _numbers(self, blocks: Tensor) -> Tensor:
        return blocks * self._each + self._own


class HeadsAttention:
    """An attention backend over a rank's heads; it is given the worker's pool and steps in the worker's numbers."""

    def __init__(self, inner: AttentionBackend, blocks: HeadBlocks, view: KVTensors) -> None:
        self._inner = inner
        self._blocks = blocks
        self._view = view
        self._batch: ForwardBatch | None = None
        self.row_multiple = inner.row_multiple

    def begin(self, batch: ForwardBatch, kv: KVTensors) -> None:
        self._batch = self._blocks.batch(batch)
        self._inner.begin(self._batch, self._view)

    def attend(self, given: LayerInput) -> Tensor:
        if self._batch is None:
            raise RuntimeError("attend before begin")
        return self._inner.attend(given._replace(batch=self._batch, kv=self._view))

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return self._inner.norm(x, delta, weight, eps)

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        return self._inner.gate(gate_up, activation)

    def mix(self, x: Tensor, mixture: Mixture) -> Tensor:
        return self._inner.mix(x, mixture)

    def sample(self, logits: Tensor, draws: list[Row]) -> Tensor | QueuedDraws | Sequence[Drawn]:
        return self._inner.sample(logits, draws)

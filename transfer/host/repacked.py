"""Received blocks of another form, row by row by way of a private buffer.

`Repacked` converts another block size, another range of KV heads, or 8 bits (`convert`). It writes rows into the pool
only after the whole block has come and its digest fits, only the rows that the handoff named, and never into a block
that was cached before (`transfer.handoff.conversion`). Its buffer holds one block, however long the chunk is.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from engine.kv.layout import KVLayout
from engine.storage.paged import pool_views
from kernels.kv_write import quantize
from transfer.digest import block_rows
from transfer.handoff.commands import IncomingBlock
from transfer.handoff.negotiation import held_heads
from transfer.host.landing import Check, InPlace
from transfer.transport import KVMemory


class Repacked(InPlace):
    """Blocks come as `unit` and are stored as `layout`. Raises ValueError if `unit` has heads that `layout` has not."""

    def __init__(
        self, memory: KVMemory, blocks: Sequence[IncomingBlock], check: Check, unit: KVLayout, layout: KVLayout
    ) -> None:
        super().__init__(memory, blocks, check)
        self._unit = unit
        self._layout = layout
        self._wide = msgspec.structs.replace(unit, dtype=layout.dtype)
        self._heads = held_heads(unit, layout)
        self._buffer: memoryview | None = None

    def place(self, at: int) -> memoryview:
        if self._buffer is None:
            self._buffer = np.empty(self._unit.block_bytes, dtype=np.uint8).data
        return self._buffer

    def landed(self, at: int) -> None:
        assert self._buffer is not None
        block = self._blocks[at]
        if not self._check(self._buffer, block):
            self.wrong += 1
        if self.wrong:
            return  # the receive has failed: nothing more needs to be stored
        wide = self._buffer
        if self._unit != self._wide:
            wide = convert(self._buffer, self._unit, self._wide)
        sources = block_rows(wide, self._wide)
        for rows in block.rows:
            targets = block_rows(self._memory.block(rows.target), self._layout)
            for source, target in zip(sources, targets, strict=True):
                mine = target[self._heads, :, :, rows.at : rows.at + rows.count]
                np.copyto(mine, source[:, :, :, rows.first : rows.first + rows.count])


def convert(view: memoryview, form: KVLayout, other: KVLayout) -> memoryview:
    """The bytes of a block in `form`, in fresh memory, as they are in `other`, which has another dtype and else the
    same sizes: by the sender of blocks that travel in 8 bits on the way out, and back by the receiver. On a device:
    `transfer.gpu.narrow`. torch releases the GIL while it works.

    A row (one token's key or value of one head in one layer) of 16 or 32 bits a value becomes int8 or E4M3 codes with
    a float32 scale, in the order that a pool of that type has. What is lost is the rounding: at most 1/254 (int8) or
    1/28 (E4M3) of a row's largest value."""
    source, scales = pool_views(torch.frombuffer(view, dtype=torch.uint8).view(1, -1), form)
    rows = source.float()
    if scales is not None:
        rows *= scales.unsqueeze(-1)
    made = torch.empty(1, other.block_bytes, dtype=torch.uint8)
    target, target_scales = pool_views(made, other)
    if target_scales is None:
        target.copy_(rows)
    else:
        codes, factors = quantize(rows, target.dtype)
        target.view(torch.uint8).copy_(codes.view(torch.uint8))
        target_scales.copy_(factors)
    return made.view(-1).numpy().data

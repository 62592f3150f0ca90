"""KV blocks in a GPU's memory. Their generations are kept by the CPU, where a peer of the same host can map them."""

import numpy as np
import torch

from engine.kv.generations import Generations
from engine.kv.layout import KVLayout
from engine.kv.paged import TORCH_DTYPES
from engine.types import BlockId


class DeviceKV:
    """`blocks` KV blocks of one layout on `device`, such as `cuda:0`. `tensor` is `[blocks, kv_heads, layers, 2,
    block_size, head_dim]`, `memory` the same as uint8 `[blocks, block_bytes]`."""

    def __init__(self, layout: KVLayout, blocks: int, device: str) -> None:
        self.layout = layout
        self.blocks = blocks
        self.block_bytes = layout.block_bytes
        self.device = device
        self._generations = Generations(blocks)
        self.memory = torch.zeros(blocks, self.block_bytes, dtype=torch.uint8, device=device)
        self.tensor = self.memory.view(TORCH_DTYPES[layout.dtype]).view(layout.pool_shape(blocks))

    @property
    def fd(self) -> int:
        """The memfd with the generations and nothing else."""
        return self._generations.fd

    def block(self, block: BlockId) -> memoryview:
        raise TypeError(f"block {block} is on {self.device}: this process has no bytes of it")

    def generation(self, block: BlockId) -> int:
        return int(self._generations.counts[block])

    def advance(self, blocks: list[BlockId]) -> None:
        """Mark blocks as handed out anew; to be called before anything is enqueued that writes to them."""
        if blocks:
            np.add.at(self._generations.counts, np.asarray(blocks), np.uint64(1))

    def close(self) -> None:
        self._generations.close()

"""A pool on a GPU. Its generations stay in host memory, in a memfd that a peer of the same host can map."""

import mmap
import os

import numpy as np
import torch

from engine.kv.layout import KVLayout
from engine.kv.paged import TORCH_DTYPES, header_bytes
from engine.types import BlockId


class DeviceKV:
    """`blocks` KV blocks of one layout on `device`, such as `cuda:0`. `tensor` is `[blocks, kv_heads, layers, 2,
    block_size, head_dim]`, `memory` the same as uint8 `[blocks, block_bytes]`."""

    def __init__(self, layout: KVLayout, blocks: int, device: str) -> None:
        self.layout = layout
        self.blocks = blocks
        self.block_bytes = layout.block_bytes
        self.device = device
        self._fd = os.memfd_create("headrace-generations", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, header_bytes(blocks))
        self._map = mmap.mmap(self._fd, header_bytes(blocks))
        self._generations = np.frombuffer(self._map, dtype=np.uint64, count=blocks)
        self.memory = torch.zeros(blocks, self.block_bytes, dtype=torch.uint8, device=device)
        self.tensor = self.memory.view(TORCH_DTYPES[layout.dtype]).view(layout.pool_shape(blocks))

    @property
    def fd(self) -> int:
        """The memfd with the generations and nothing else."""
        return self._fd

    @property
    def nbytes(self) -> int:
        return self.blocks * self.block_bytes

    def block(self, block: BlockId) -> memoryview:
        raise TypeError(f"block {block} is on {self.device}: this process has no bytes of it")

    def generation(self, block: BlockId) -> int:
        return int(self._generations[block])

    def advance(self, blocks: list[BlockId]) -> None:
        """Mark blocks as handed out anew; to be called before anything is enqueued that writes to them."""
        if blocks:
            np.add.at(self._generations, np.asarray(blocks), np.uint64(1))

    def copy(self, pairs: list[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks (source, target) on the current stream."""
        for source, target in pairs:
            self.memory[target].copy_(self.memory[source])

    def close(self) -> None:
        """Close the descriptor. The memory goes when the last view of it does."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

"""The KV tensors of one worker, and the memory they live in.

On the CPU the pool is a `memfd` (never named shared memory: it would outlive a kill), so that a `shm` peer can map it
read-only through this process's `/proc` entry. The file is one header, then the blocks:

    [ generations: uint64 x blocks, padded to a page | block 0 | block 1 | ... ]

The generation of a block is advanced each time the block is handed out for new content. A reader in another process
checks it before and after its copy.
"""

import fcntl
import mmap
import os

import numpy as np
import torch

from engine.kv.layout import KVLayout
from engine.types import BlockId

PAGE_BYTES = mmap.PAGESIZE
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def header_bytes(blocks: int) -> int:
    return -(-blocks * 8 // PAGE_BYTES) * PAGE_BYTES


class PagedKV:
    """`blocks` KV blocks of one layout. `tensor` is `[blocks, kv_heads, layers, 2, block_size, head_dim]`.

    Who may touch it: the runner writes rows of leased blocks, the transport copies whole leased blocks.
    """

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self.layout = layout
        self.blocks = blocks
        self.block_bytes = layout.block_bytes
        self._fd = os.memfd_create("headrace-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = header_bytes(blocks) + blocks * self.block_bytes
        os.ftruncate(self._fd, size)
        # Readers in other processes rely on its size: reading past a cut end would kill them.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self._fd, size)
        self._generations = np.frombuffer(self._map, dtype=np.uint64, count=blocks)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, offset=header_bytes(blocks))
        self.memory = raw.view(blocks, self.block_bytes)
        self.tensor = raw.view(TORCH_DTYPES[layout.dtype]).view(layout.pool_shape(blocks))
        self._bytes = memoryview(self._map)[header_bytes(blocks) :]

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def nbytes(self) -> int:
        return self.blocks * self.block_bytes

    def block(self, block: BlockId) -> memoryview:
        """A writable flat byte view of one block."""
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def generation(self, block: BlockId) -> int:
        return int(self._generations[block])

    def advance(self, blocks: list[BlockId]) -> None:
        """Mark blocks as handed out anew, once for each time they are named: whoever still reads them under the old
        generation reads a stale block."""
        if blocks:
            np.add.at(self._generations, np.asarray(blocks), np.uint64(1))

    def copy(self, pairs: list[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks (source, target): the copy of copy-on-write."""
        for source, target in pairs:
            self.tensor[target].copy_(self.tensor[source])

    def close(self) -> None:
        """Close the descriptor. The mapping itself goes when the last view of it does."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

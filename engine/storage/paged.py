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
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.kv.layout import KVLayout
from engine.types import BlockId
from kernels.pool import KVPool, eight_bit_views

PAGE_BYTES = mmap.PAGESIZE
TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def header_bytes(blocks: int) -> int:
    return -(-blocks * 8 // PAGE_BYTES) * PAGE_BYTES


class PoolFile:
    """A file of this process's memory for the generations of `blocks` blocks, and for the blocks where they are on the
    CPU. `generations` is uint64 `[blocks]`."""

    def __init__(self, name: str, blocks: int, block_bytes: int = 0) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        size = header_bytes(blocks) + blocks * block_bytes
        os.ftruncate(self.fd, size)
        # Readers in other processes rely on its size: reading past a cut end would kill them.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.map = mmap.mmap(self.fd, size)
        self.generations = np.frombuffer(self.map, dtype=np.uint64, count=blocks)
        self._followed = [self.generations]

    def lead(self, fd: int) -> None:
        """Advance the generations of another rank's file together with these; they have the same blocks. Raises
        ValueError where it is smaller."""
        blocks, found = len(self.generations), os.fstat(fd).st_size
        if found < header_bytes(blocks):
            raise ValueError(f"a file of {found} bytes has no generations of {blocks} blocks")
        self._followed.append(np.frombuffer(mmap.mmap(fd, header_bytes(blocks)), dtype=np.uint64, count=blocks))

    def advance(self, blocks: list[BlockId]) -> None:
        """Advance the generation of each block, once for each time it is named."""
        for generations in self._followed:
            np.add.at(generations, np.asarray(blocks), np.uint64(1))

    def close(self) -> None:
        """Close the descriptor. The mapping itself goes when the last view of it does."""
        self._close()
        self.fd = -1


class PoolPart(NamedTuple):
    """A pool with a part of every block of a worker: uint8 `[blocks, nbytes]`, those from `start` on."""

    start: int
    memory: Tensor


def map_blocks(fd: int, blocks: int, block_bytes: int) -> Tensor:
    """Map the blocks of a pool whose file another rank of this worker has, uint8 `[blocks, block_bytes]`. Raises
    ValueError where it is smaller."""
    start = header_bytes(blocks)
    mapped = mmap.mmap(fd, start + blocks * block_bytes)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=start).view(blocks, block_bytes)


def pool_views(memory: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor | None]:
    """`memory`, uint8 `[blocks, block_bytes]`, as `[blocks, kv_heads, layers, 2, block_size, head_dim]`, and the scales
    `[.., block_size]` of 8-bit rows."""
    blocks, dtype = len(memory), TORCH_DTYPES[layout.dtype]
    if not layout.scale_bytes:
        return memory.view(dtype).view(layout.pool_shape(blocks)), None
    by_head = memory.view(blocks, layout.kv_heads, layout.head_bytes)
    return eight_bit_views(by_head, layout.layers, layout.block_size, layout.head_dim, dtype)


class KVTensors:
    """`blocks` KV blocks of one layout, in memory of any device. `tensor` is `[blocks, kv_heads, layers, 2, block_size,
    head_dim]`, `scales`, for 8-bit rows, float32 `[.., block_size]`: value = tensor * scale of its row. `memory` is the
    same as uint8 `[blocks, block_bytes]`.

    Who may touch it: the runner writes rows of leased blocks, the transport copies whole leased blocks.
    """

    def __init__(self, layout: KVLayout, memory: Tensor, file: PoolFile) -> None:
        self.layout = layout
        self.blocks = len(memory)
        self.block_bytes = layout.block_bytes
        self.memory = memory
        self.tensor, self.scales = pool_views(memory, layout)
        self.file = file
        self.copied: Callable[[list[tuple[BlockId, BlockId]]], None] = lambda pairs: None
        """Called with the copies that are to be made, before they are: other ranks make them in their pools."""

    @cached_property
    def pool(self) -> KVPool:
        """The pool as GPU kernels see it. Raises ValueError for a block size that is no power of two."""
        return KVPool(self.tensor, self.scales)

    @property
    def device(self) -> str:
        """Such as `cpu` or `cuda:0`."""
        return str(self.memory.device)

    @property
    def nbytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def fd(self) -> int:
        """The memfd that backs the pool, or its generations alone; -1 once the pool is closed."""
        return self.file.fd

    def block(self, block: BlockId) -> memoryview:
        """A writable flat byte view of one block. Raises TypeError where the CPU cannot see it."""
        raise TypeError(f"block {block} is on {self.device}: this process has no bytes of it")

    def generation(self, block: BlockId) -> int:
        return int(self.file.generations[block])

    def advance(self, blocks: list[BlockId]) -> None:
        """Mark blocks as handed out anew, once for each time they are named: whoever still reads them under the old
        generation reads a stale block."""
        if blocks:
            self.file.advance(blocks)

    def copy(self, pairs: list[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks (source, target), one after the other: the copy of copy-on-write."""
        if pairs:
            self.copied(pairs)
        for source, target in pairs:
            self.memory[target].copy_(self.memory[source])

    def close(self) -> None:
        """Give back what is not memory. The memory itself goes when the last view of it does."""
        self.file.close()


class PagedKV(KVTensors):
    """A pool in this host's memory, which a peer may map."""

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        file = PoolFile("headrace-kv", blocks, layout.block_bytes)
        raw = torch.frombuffer(file.map, dtype=torch.uint8, offset=header_bytes(blocks))
        super().__init__(layout, raw.view(blocks, layout.block_bytes), file)
        self._bytes = memoryview(file.map)[header_bytes(blocks) :]

    def block(self, block: BlockId) -> memoryview:
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

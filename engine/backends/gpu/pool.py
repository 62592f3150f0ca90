"""KV blocks in a GPU's memory, copied and digested by its kernels. Their generations are kept by the CPU, where a peer
of the same host can map them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.batch import upload
from engine.kv.layout import KVLayout
from engine.storage.paged import KVTensors, PoolFile
from engine.types import BlockId
from kernels.block_copy import as_words, copy_blocks
from kernels.block_shape import BlockShape
from kernels.configs import ConfigKey, config_for

Pair = tuple[BlockId, BlockId]


class DeviceKV(KVTensors):
    """A pool on `device`. Raises ValueError for a layout whose rows are not whole 64-bit words."""

    def __init__(self, layout: KVLayout, blocks: int, device: torch.device | str, arch: int = 90) -> None:
        memory = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        super().__init__(layout, memory, PoolFile("headrace-generations", blocks))
        self._shape = BlockShape(layout.layers, layout.block_size, layout.row_bytes, layout.scale_bytes > 0)
        self._words = as_words(memory.view(blocks, layout.kv_heads, layout.head_bytes))
        key = ConfigKey("copy_blocks", layout.head_dim, 0, layout.block_size, layout.dtype, arch)
        self._config = config_for(key)

    def copy(self, pairs: list[Pair]) -> None:
        """Copy by one launch all that do not depend on each other, before the next work of the current stream."""
        for some in _independent(pairs):
            sources, targets = (self._ids(side) for side in zip(*some, strict=True))
            copy_blocks(self._words, self._words, sources, targets, self._shape, self._config)

    def head_digests(
        self, blocks: Sequence[BlockId], tokens: Sequence[int], heads: range | None = None
    ) -> list[list[int]]:
        """`wp64` of each held KV head (or of the range `heads` of them) of each block with so many valid tokens, as
        unsigned numbers, for `transfer.digest.combine`. Waits for the device."""
        heads = range(self.layout.kv_heads) if heads is None else heads
        words = self._words[:, heads.start : heads.stop]
        ids = self._ids(blocks)
        found = copy_blocks(words, None, ids, ids, self._shape, self._config, tokens=self._ids(tokens))
        assert found is not None
        return [[digest % 2**64 for digest in block] for block in found.tolist()]

    def _ids(self, numbers: Sequence[int]) -> Tensor:
        return upload(torch.tensor(numbers, dtype=torch.int32), self.memory.device)


def _independent(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """`pairs` in order, cut where one reads or writes what one before it in the same piece has written."""
    piece: list[Pair] = []
    sources, targets = set[BlockId](), set[BlockId]()
    for source, target in pairs:
        if source in targets or target in targets or target in sources:
            yield piece
            piece, sources, targets = [], set(), set()
        piece.append((source, target))
        sources.add(source)
        targets.add(target)
    if piece:
        yield piece

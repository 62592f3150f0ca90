"""The one place that knows in which order a KV block's bytes lie. Pure integers: no torch, no memory."""

from functools import cached_property
from typing import Any

import msgspec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A pool tensor is `[blocks, kv_heads, layers, 2, block_size, head_dim]`; 2 = key, value.

    One block is one contiguous piece, and so is any range of its heads. Peers compare layouts when they connect.
    """

    kv_heads: int
    layers: int
    block_size: int
    head_dim: int
    dtype: str = "float32"

    @cached_property
    def row_bytes(self) -> int:
        """One token's key (or value) of one head in one layer."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @cached_property
    def head_bytes(self) -> int:
        """One head's contiguous slice of a block: `[layers, 2, block_size, head_dim]`."""
        return self.layers * 2 * self.block_size * self.row_bytes

    @cached_property
    def block_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def pool_shape(self, blocks: int) -> tuple[int, int, int, int, int, int]:
        return (blocks, self.kv_heads, self.layers, 2, self.block_size, self.head_dim)

    def describe(self) -> dict[str, Any]:
        """As plain data, for `Hello.layout`."""
        return dict(msgspec.to_builtins(self))

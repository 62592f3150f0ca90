"""The one place that knows in which order a KV block's bytes lie. Pure integers: no torch, no memory."""

from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from engine.kv.groups import LayerGroup

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a weight, and of a KV value that is kept in the type it was computed in."""

KV_DTYPES = {**dict.fromkeys(DTYPE_BYTES, 0), "int8": 4, "fp8": 4}
"""The types that a pool may hold, with the bytes of the scale beside each row: 8-bit rows (fp8 is E4M3) have one per
token and head, for keys and values apart."""


class Plane(NamedTuple):
    """Rows `[layers, 2, block_size]` of `row_bytes` each, `offset` bytes into a head's slice."""

    offset: int
    row_bytes: int


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A pool tensor is `[blocks, kv_heads, layers, 2, block_size, head_dim]`; 2 = key, value.

    One block is one contiguous piece, and so is any range of its heads. A head's slice of a block is its rows and then,
    for 8-bit dtypes, their float32 scales `[layers, 2, block_size]`. Peers compare layouts when they connect
    (`transfer.handoff.negotiation`). A pool may hold a range of the model's KV heads: `kv_heads` of `total_heads`, from
    `first_head` on. Raises ValueError for a size below 1, an unknown dtype, an 8-bit head size that leaves scales
    unaligned, and for heads that the model does not have.
    """

    kv_heads: int
    layers: int
    block_size: int
    head_dim: int
    dtype: str = "float32"
    first_head: int = 0
    total_heads: int = 0
    """0 stands for as many as are held here."""
    groups: tuple[LayerGroup, ...] = ()
    """The groups that the model's layers are kept in, each in blocks of its own (docs/layer-groups.md); empty: one.
    `layers` are those of a block, as many as the first group has."""

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"{self.dtype!r} is not one of {', '.join(KV_DTYPES)}")
        if not self.total_heads:
            msgspec.structs.force_setattr(self, "total_heads", self.kv_heads)
        if min(self.kv_heads, self.layers, self.block_size, self.head_dim) < 1:
            raise ValueError(f"every size of a KV layout must be at least 1: {self}")
        if self.scale_bytes and self.head_dim % self.scale_bytes:
            raise ValueError(f"head_dim {self.head_dim} leaves the scales of {self.dtype} unaligned")
        if self.groups and (len(self.groups[0].layers) != self.layers or self.groups[0].window):
            raise ValueError(f"the first of {self.groups} does not fill blocks of {self.layers} layers")
        if any(not 0 < len(group.layers) <= self.layers or group.window < 1 for group in self.groups[1:]):
            raise ValueError(f"{self.groups} do not fit blocks of {self.layers} layers")
        if not 0 <= self.first_head <= self.total_heads - self.kv_heads:
            raise ValueError(f"{self} holds heads that its model does not have")

    @property
    def group_count(self) -> int:
        return len(self.groups) or 1

    @property
    def windows(self) -> tuple[LayerGroup, ...]:
        """The groups but the first."""
        return self.groups[1:]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model, its group and its number in that group's blocks."""
        if not self.groups:
            return tuple((0, layer) for layer in range(self.layers))
        at = {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}
        return tuple(at[layer] for layer in range(len(at)))

    @property
    def heads(self) -> range:
        """The model's KV heads that are held."""
        return range(self.first_head, self.first_head + self.kv_heads)

    @cached_property
    def row_bytes(self) -> int:
        """One token's key (or value) of one head in one layer, without its scale."""
        return self.head_dim * DTYPE_BYTES.get(self.dtype, 1)

    @property
    def scale_bytes(self) -> int:
        """The size of the scale beside each row; 0 where values are stored as they are."""
        return KV_DTYPES[self.dtype]

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The parts of a head's slice: its rows, then their scales if there are any."""
        rows = Plane(0, self.row_bytes)
        if not self.scale_bytes:
            return (rows,)
        return (rows, Plane(self.layers * 2 * self.block_size * self.row_bytes, self.scale_bytes))

    @cached_property
    def head_bytes(self) -> int:
        """One head's contiguous slice of a block."""
        return self.layers * 2 * self.block_size * (self.row_bytes + self.scale_bytes)

    @cached_property
    def block_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    def restricted(self, heads: range) -> "KVLayout":
        """Return the layout of the same blocks with these of the held heads alone. Raises ValueError for none."""
        return msgspec.structs.replace(self, first_head=heads.start, kv_heads=len(heads))

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def pool_shape(self, blocks: int) -> tuple[int, int, int, int, int, int]:
        return (blocks, self.kv_heads, self.layers, 2, self.block_size, self.head_dim)

    def describe(self) -> dict[str, Any]:
        """Return the layout as plain data, for `Hello.layout`."""
        described = dict(msgspec.to_builtins(self))
        if not self.groups:
            del described["groups"]
        return described

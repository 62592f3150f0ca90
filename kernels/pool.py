"""How a GPU kernel sees paged KV: payload, scales, and strides. Knows no layout, no model, no request.

The pool is `[blocks, kv_heads, layers, 2, block_size, head_dim]` in meaning; the order in memory is whatever the
strides say. They reach the kernels as compile-time constants, so address arithmetic folds away; block numbers are
widened to 64 bits before they are multiplied.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FORMATS = {
    torch.float32: "native",
    torch.float16: "native",
    torch.bfloat16: "native",
    torch.int8: "int8",
    torch.float8_e4m3fn: "e4m3",
}
LARGEST = {"int8": 127.0, "e4m3": 448.0}


@dataclass(frozen=True, slots=True)
class KVPool:
    """`payload` `[blocks, kv_heads, layers, 2, block_size, head_dim]`, its last dimension contiguous; for 8-bit
    payloads `scales` float32 `[blocks, kv_heads, layers, 2, block_size]`: value = payload * scale of its row."""

    payload: Tensor
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that the tensors make a pool that the kernels can read. Raises ValueError."""
        payload, scales = self.payload, self.scales
        if payload.dim() != 6 or payload.shape[3] != 2 or payload.stride(-1) != 1:
            raise ValueError(f"no KV pool: {tuple(payload.shape)}, strides {payload.stride()}")
        if payload.dtype not in FORMATS:
            raise ValueError(f"no KV format for {payload.dtype}")
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block size {self.block_size} is not a power of two")
        if (scales is None) != (self.format == "native"):
            raise ValueError(f"{payload.dtype} KV and scales do not go together")
        if scales is not None and (
            scales.shape != payload.shape[:-1] or scales.dtype != torch.float32
        ):
            raise ValueError(f"scales {tuple(scales.shape)} {scales.dtype} do not fit the payload")

    @property
    def format(self) -> str:
        return FORMATS[self.payload.dtype]

    @property
    def kv_heads(self) -> int:
        return self.payload.shape[1]

    @property
    def block_size(self) -> int:
        return self.payload.shape[4]

    @property
    def head_dim(self) -> int:
        return self.payload.shape[5]

    def bytes_or_values(self) -> Tensor:
        """The payload as a kernel argument: E4M3 as its bytes, since not every GPU has such a type."""
        return self.payload.view(torch.uint8) if self.format == "e4m3" else self.payload

    def layer(self, layer: int, *, paired: bool = False) -> tuple[Tensor, Tensor]:
        """Return payload and scales of one layer as kernel arguments, the payload in place of absent scales. `paired`:
        8-bit payloads as int16, two neighbouring codes each.

        Raises IndexError where the pool has no such layer.
        """
        if not 0 <= layer < self.payload.shape[2]:
            raise IndexError(f"layer {layer} of {self.payload.shape[2]}")
        payload = self.bytes_or_values()
        if paired and self.format != "native":
            payload = payload.view(torch.int16)
        payload = payload.select(2, layer)
        return payload, payload if self.scales is None else self.scales.select(2, layer)

    def constants(self) -> dict[str, int | str]:
        """The compile-time constants by which every kernel over this pool finds its rows, in elements."""
        block, head, _, kv, token, _ = self.payload.stride()
        scales = (0, 0, 0, 0, 0) if self.scales is None else self.scales.stride()
        return {
            "STRIDE_BLOCK": block,
            "STRIDE_HEAD": head,
            "STRIDE_KV": kv,
            "STRIDE_TOKEN": token,
            "SCALE_BLOCK": scales[0],
            "SCALE_HEAD": scales[1],
            "SCALE_KV": scales[3],
            "SCALE_TOKEN": scales[4],
            "BLOCK_SIZE": self.block_size,
            "HEAD_DIM": self.head_dim,
            "FORMAT": self.format,
        }


def eight_bit_pool(
    blocks: int,
    kv_heads: int,
    layers: int,
    block_size: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, KVPool]:
    """Allocate memory for a pool of int8 or E4M3 values; returns it and the pool in it.

    The memory is uint8 `[blocks, kv_heads, head_bytes]`: a head's slice of a block is its payload `[layers, 2,
    block_size, head_dim]`, then its float32 scales `[layers, 2, block_size]`, so that a block, and any range of its
    heads, stays one contiguous piece. Raises ValueError where head_dim is not a multiple of 4.
    """
    head_bytes = layers * 2 * block_size * (head_dim + 4)
    memory = torch.zeros(blocks, kv_heads, head_bytes, dtype=torch.uint8, device=device)
    return memory, KVPool(*eight_bit_views(memory, layers, block_size, head_dim, dtype))


def eight_bit_views(
    memory: Tensor, layers: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the payload `[blocks, kv_heads, layers, 2, block_size, head_dim]` and the scales `[..., block_size]` that
    lie in `memory`, uint8 `[blocks, kv_heads, head_bytes]`. Raises ValueError where head_dim is not a multiple of 4."""
    if head_dim % 4:
        raise ValueError(f"head_dim {head_dim} leaves the scales unaligned")
    split = layers * 2 * block_size * head_dim
    payload, scales = memory[:, :, :split].view(dtype), memory[:, :, split:].view(torch.float32)
    # Strides are constants of the kernels: views would give those of one block, or one head, other ones than of many.
    inner = (2 * block_size, block_size, 1)
    return (
        payload.as_strided(
            (*payload.shape[:2], layers, 2, block_size, head_dim),
            (*payload.stride()[:2], *(stride * head_dim for stride in inner), 1),
        ),
        scales.as_strided(
            (*scales.shape[:2], layers, 2, block_size), (*scales.stride()[:2], *inner)
        ),
    )

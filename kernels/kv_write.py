"""Writes new keys and values into paged KV.

Token t of a step goes to `slots[t] = block * block_size + offset`: its key to `pool[block, :, layer, 0, offset]`, its
value to `pool[block, :, layer, 1, offset]`. The pool is `[blocks, kv_heads, layers, 2, block_size, head_dim]`. 8-bit
rows have a scale each, the largest value over the largest code: value = code * scale.
"""

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def plan_kv_write(slots: Tensor, pool: Tensor) -> Tensor:
    """Return flat row numbers `[tokens, kv_heads, 2]` of layer 0, in the pool seen as rows of head_dim, for int64
    `slots`."""
    _, kv_heads, layers, _, block_size, _ = pool.shape
    block, offset = slots // block_size, slots % block_size
    head = torch.arange(kv_heads).view(1, kv_heads, 1)
    kv = torch.arange(2).view(1, 1, 2)
    slab = (block.view(-1, 1, 1) * kv_heads + head) * (layers * 2) + kv
    return slab * block_size + offset.view(-1, 1, 1)


def write_kv(
    k: Tensor, v: Tensor, pool: Tensor, layer: int, rows: Tensor, scales: Tensor | None = None
) -> None:
    """Write the first `tokens` rows of `k`, `v` `[>= tokens, kv_heads, head_dim]`; `rows` come from `plan_kv_write`.
    `scales` `[blocks, kv_heads, layers, 2, block_size]` belong to an 8-bit pool."""
    _, _, layers, _, block_size, head_dim = pool.shape
    tokens = rows.shape[0]
    values = torch.stack((k[:tokens], v[:tokens]), dim=2)
    index = (rows + layer * 2 * block_size).view(-1)
    if scales is None:
        pool.view(-1, head_dim).index_copy_(0, index, values.view(-1, head_dim).to(pool.dtype))
        return
    codes, factors = quantize(values.view(-1, head_dim).float(), pool.dtype)
    per_head = layers * 2 * block_size
    slab, row = index // per_head, index % per_head
    pool.view(torch.uint8).flatten(2, 4).flatten(0, 1)[slab, row] = codes.view(torch.uint8)
    scales.flatten(2, 4).flatten(0, 1)[slab, row] = factors


def quantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize float32 `[..., head_dim]` to int8 or E4M3 codes, with float32 scales `[...]`. A row of zeros has scale
    0."""
    largest = LARGEST[dtype]
    scales = rows.abs().amax(-1) * torch.tensor(1.0 / largest, dtype=torch.float32)
    scaled = rows / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    codes = scaled.round() if dtype == torch.int8 else scaled.clamp(-largest, largest)
    return codes.to(dtype), scales

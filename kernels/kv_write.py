"""Write new keys and values into paged KV.

Token t of a step goes to `slots[t] = block * block_size + offset`: its key to `pool[block, :, layer, 0, offset]`, its
value to `pool[block, :, layer, 1, offset]`. The pool is `[blocks, kv_heads, layers, 2, block_size, head_dim]`.
"""

import torch
from torch import Tensor


def plan_kv_write(slots: Tensor, pool: Tensor) -> Tensor:
    """Flat row numbers `[tokens, kv_heads, 2]` of layer 0 in the pool seen as rows of head_dim, for int64 `slots`."""
    _, kv_heads, layers, _, block_size, _ = pool.shape
    block, offset = slots // block_size, slots % block_size
    head = torch.arange(kv_heads).view(1, kv_heads, 1)
    kv = torch.arange(2).view(1, 1, 2)
    slab = (block.view(-1, 1, 1) * kv_heads + head) * (layers * 2) + kv
    return slab * block_size + offset.view(-1, 1, 1)


def write_kv(k: Tensor, v: Tensor, pool: Tensor, layer: int, rows: Tensor) -> None:
    """`k`, `v` `[>= tokens, kv_heads, head_dim]`: the first `tokens` rows are written, `rows` from `plan_kv_write`."""
    _, _, _, _, block_size, head_dim = pool.shape
    tokens = rows.shape[0]
    values = torch.stack((k[:tokens], v[:tokens]), dim=2)
    index = (rows + layer * 2 * block_size).view(-1)
    pool.view(-1, head_dim).index_copy_(0, index, values.view(-1, head_dim))

"""The specification of every kernel, in plain PyTorch: loops, no cleverness, 64-bit arithmetic where it matters."""

import math

import torch
from torch import Tensor


def paged_attention(
    q: Tensor, pool: Tensor, layer: int, query_counts: list[int], context_lens: list[int], block_tables: list[Tensor]
) -> Tensor:
    """`q` `[rows, heads, head_dim]`; see `kernels.paged_attention`. Returns float64 `[rows, heads, head_dim]`."""
    _, kv_heads, _, _, block_size, head_dim = pool.shape
    heads = q.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    row = 0
    for count, context, table in zip(query_counts, context_lens, block_tables, strict=True):
        for r in range(count):
            visible = context - count + r + 1
            for h in range(heads):
                kv_head = h * kv_heads // heads
                keys, values = (
                    torch.stack(
                        [pool[table[t // block_size], kv_head, layer, kv, t % block_size] for t in range(visible)]
                    ).double()
                    for kv in (0, 1)
                )
                scores = keys @ q[row, h].double() / math.sqrt(head_dim)
                out[row, h] = torch.softmax(scores, 0) @ values
            row += 1
    return out


def write_kv(k: Tensor, v: Tensor, pool: Tensor, layer: int, slots: Tensor) -> None:
    """See `kernels.kv_write`."""
    block_size = pool.shape[4]
    for t, slot in enumerate(slots.tolist()):
        pool[slot // block_size, :, layer, 0, slot % block_size] = k[t]
        pool[slot // block_size, :, layer, 1, slot % block_size] = v[t]


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox 4x32 (Salmon et al. 2011): four 32-bit words that depend on counter and key alone."""
    word = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & word, (p0 >> 32) ^ c3 ^ k1, p0 & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c0, c1, c2, c3

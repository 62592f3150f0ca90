"""The specification of the GPU's attention kernels: dense float64 PyTorch over gathered rows."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.pool import KVPool


def gather_rows(
    pool: KVPool, layer: int, table: Sequence[int], tokens: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values `[kv_heads, tokens, head_dim]` in float64, scales applied."""
    device = pool.payload.device
    at = torch.arange(tokens, device=device)
    block = torch.tensor(list(table), dtype=torch.int64, device=device)[at // pool.block_size]
    rows = pool.payload[block, :, layer, :, at % pool.block_size].double()
    if pool.scales is not None:
        rows = rows * pool.scales[block, :, layer, :, at % pool.block_size].double()[..., None]
    keys, values = rows.permute(2, 1, 0, 3)
    return keys, values


def attend(q: Tensor, keys: Tensor, values: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Attend with `q` `[heads, head_dim]` to tokens `first ..< last`: output `[heads, head_dim]` and natural lse
    `[heads]`."""
    heads, head_dim = q.shape
    group = heads // keys.shape[0]
    k = keys[:, first:last].repeat_interleave(group, 0)
    v = values[:, first:last].repeat_interleave(group, 0)
    scores = torch.einsum("hd,htd->ht", q.double(), k) / math.sqrt(head_dim)
    return torch.einsum("ht,htd->hd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


def decode(
    q: Tensor,
    pool: KVPool,
    layer: int,
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Specifies `kernels.decode_attention`: float64 output like `q` and lse `[batch, heads]`."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    for row, length in enumerate(lengths):
        if length:
            keys, values = gather_rows(pool, layer, tables[row], length)
            first = max(0, length - window) if window else 0
            out[row], lse[row] = attend(q[row], keys, values, first, length)
    return out, lse


def prefill(
    q: Tensor,
    pool: KVPool,
    layer: int,
    query_counts: Sequence[int],
    context_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Specifies `kernels.prefill_attention`: float64 output like `q` and lse `[rows, heads]`; rows of no sequence are
    zero."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    row = 0
    for count, context, table in zip(query_counts, context_lens, tables, strict=True):
        keys, values = gather_rows(pool, layer, table, context)
        for last in range(context - count + 1, context + 1):
            first = max(0, last - window) if window else 0
            out[row], lse[row] = attend(q[row], keys, values, first, last)
            row += 1
    return out, lse

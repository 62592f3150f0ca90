"""Attention over paged KV: decode and chunked prefill in one call.

Sequence i of a step has `count_i` new query rows at the end of a context of `context_i` tokens (the new rows included)
whose keys and values lie in the blocks of its block table. Row r of the sequence attends to the first
`context_i - count_i + r + 1` tokens:

    out[r] = softmax(q[r] K^T / sqrt(head_dim)) V      per query head, K and V shared by a group of query heads

The pool is `[blocks, kv_heads, layers, 2, block_size, head_dim]`. What depends only on the step's shape (which rows to
gather, the causal masks) is planned once per step and reused by every layer. Each sequence is attended to on its own,
at its exact length: its result depends on nothing else in the batch, and stale rows past its end are never read.
Source: PagedAttention (Kwon et al. 2023, section 4); specification in `kernels.reference`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where each sequence's KV lies. Valid for every layer of one step over one pool.

    `gather`: flat row numbers of layer 0 in the pool seen as `[blocks * kv_heads * layers * 2, block_size * head_dim]`,
    sequence after sequence, each ordered `[2, kv_heads, its blocks]`. `spans`: (first query row, query rows, context
    tokens, blocks) per sequence. `masks`: additive, `[group * count, context]`, or None where every row sees all.
    """

    gather: Tensor
    spans: tuple[tuple[int, int, int, int], ...]
    masks: tuple[Tensor | None, ...]


def plan_attention(
    query_counts: list[int], context_lens: list[int], block_tables: list[Tensor], pool: Tensor, heads: int
) -> AttentionPlan:
    """`block_tables[i]` is int64 `[blocks of i]`, at least ceil(context / block_size) long; `heads` query heads."""
    _, kv_heads, layers, _, block_size, _ = pool.shape
    group = heads // kv_heads
    kv = torch.arange(2).view(2, 1, 1)
    head = torch.arange(kv_heads).view(1, kv_heads, 1) * (layers * 2)
    pieces, spans, masks = [], [], []
    start = 0
    for count, context, table in zip(query_counts, context_lens, block_tables, strict=True):
        blocks = -(-context // block_size)
        rows = table[:blocks].view(1, 1, blocks) * (kv_heads * layers * 2) + head + kv
        pieces.append(rows.reshape(-1))
        spans.append((start, count, context, blocks))
        masks.append(_causal_mask(count, context, group, pool.dtype) if count > 1 else None)
        start += count
    return AttentionPlan(torch.cat(pieces), tuple(spans), tuple(masks))


def _causal_mask(count: int, context: int, group: int, dtype: torch.dtype) -> Tensor:
    mask = torch.full((count, context), float("-inf"), dtype=dtype).triu_(context - count + 1)
    return mask.repeat(group, 1)


def paged_attention(q: Tensor, pool: Tensor, layer: int, plan: AttentionPlan, out: Tensor) -> Tensor:
    """`q` `[rows, heads, head_dim]` -> `out` `[rows, heads, head_dim]`, written for the planned rows only."""
    _, kv_heads, layers, _, block_size, head_dim = pool.shape
    if q.shape[1] % kv_heads or q.shape[2] != head_dim or not 0 <= layer < layers:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a pool {tuple(pool.shape)}, layer {layer}")
    group = q.shape[1] // kv_heads
    gathered = pool.view(-1, block_size * head_dim).index_select(0, plan.gather + 2 * layer)
    offset = 0
    for (start, count, context, blocks), mask in zip(plan.spans, plan.masks, strict=True):
        size = 2 * kv_heads * blocks
        kv = gathered[offset : offset + size].view(2, 1, kv_heads, blocks * block_size, head_dim)
        offset += size
        # The group's query heads are packed as extra rows, so that each K/V byte is read once per KV head.
        rows = q[start : start + count].view(count, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        answer = scaled_dot_product_attention(
            rows.reshape(1, kv_heads, group * count, head_dim),
            kv[0, :, :, :context],
            kv[1, :, :, :context],
            attn_mask=mask,
        )
        answer = answer.view(kv_heads, group, count, head_dim).permute(2, 0, 1, 3)
        out[start : start + count] = answer.reshape(count, -1, head_dim)
    return out

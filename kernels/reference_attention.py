"""The specification of the GPU's attention kernels: dense float64 PyTorch over gathered rows."""

from collections.abc import Sequence
from typing import NamedTuple

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


class Scoring(NamedTuple):
    """How scores become weights: `scale` (None: 1 / sqrt(head_dim)), then `softcap` * tanh(score / softcap) unless it
    is 0; `sinks` `[heads]` add one weight without a value to each head's sum. A token sees the last `window` tokens,
    itself included, unless that is 0."""

    window: int = 0
    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None

    def first(self, last: int) -> int:
        """The first token that a query sees whose last one is `last - 1`."""
        return max(0, last - self.window) if self.window else 0


PLAIN = Scoring()


def attend(
    q: Tensor, keys: Tensor, values: Tensor, last: int, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attend with `q` `[heads, head_dim]`, the query of token `last - 1`: output `[heads, head_dim]` and natural lse
    `[heads]`, the sink's weight included."""
    heads, head_dim = q.shape
    group, first = heads // keys.shape[0], scoring.first(last)
    k = keys[:, first:last].repeat_interleave(group, 0)
    v = values[:, first:last].repeat_interleave(group, 0)
    scores = torch.einsum("hd,htd->ht", q.double(), k) * (head_dim**-0.5 if scoring.scale is None else scoring.scale)
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.double()[:, None]], 1)
        v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    return torch.einsum("ht,htd->hd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


def decode(
    q: Tensor,
    pool: KVPool,
    layer: int,
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    scoring: Scoring = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Specifies `kernels.decode_attention`: float64 output like `q` and lse `[batch, heads]`; zero and -inf for a row
    without tokens."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    for row, length in enumerate(lengths):
        if length:
            keys, values = gather_rows(pool, layer, tables[row], length)
            out[row], lse[row] = attend(q[row], keys, values, length, scoring)
    return out, lse


def prefill(
    q: Tensor,
    pool: KVPool,
    layer: int,
    query_counts: Sequence[int],
    context_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    scoring: Scoring = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Specifies `kernels.prefill_attention`: float64 output like `q` and lse `[rows, heads]`; rows of no sequence are
    zero."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    row = 0
    for count, context, table in zip(query_counts, context_lens, tables, strict=True):
        keys, values = gather_rows(pool, layer, table, context)
        for last in range(context - count + 1, context + 1):
            out[row], lse[row] = attend(q[row], keys, values, last, scoring)
            row += 1
    return out, lse

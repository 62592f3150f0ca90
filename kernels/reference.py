"""The specification of every kernel, in plain PyTorch: loops, no cleverness, 64-bit arithmetic where it matters."""

import math

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    query_counts: list[int],
    context_lens: list[int],
    block_tables: list[Tensor],
    *,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Specifies `kernels.paged_attention`: `q` `[rows, heads, head_dim]`. Returns float64 `[rows, heads, head_dim]`.

    The token at position i sees the tokens j with i - window < j <= i (`window` 0: all up to i). A score is q . k *
    scale, then softcap * tanh(score / softcap) where there is a cap. `sinks` `[heads]` is one more score of each head,
    neither scaled nor capped, whose value is zero."""
    _, kv_heads, _, _, block_size, head_dim = pool.shape
    heads = q.shape[1]
    factor = head_dim**-0.5 if scale is None else scale
    out = torch.empty(q.shape, dtype=torch.float64)
    row = 0
    for count, context, table in zip(query_counts, context_lens, block_tables, strict=True):
        for r in range(count):
            position = context - count + r
            visible = range(max(0, position - window + 1) if window else 0, position + 1)
            for h in range(heads):
                kv_head = h * kv_heads // heads
                keys, values = (
                    torch.stack(
                        [pool[table[t // block_size], kv_head, layer, kv, t % block_size] for t in visible]
                    ).double()
                    for kv in (0, 1)
                )
                scores = keys @ q[row, h].double() * factor
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores, values = torch.cat([scores, sinks[h : h + 1].double()]), torch.cat([values, values[:1] * 0])
                out[row, h] = torch.softmax(scores, 0) @ values
            row += 1
    return out


def write_kv(k: Tensor, v: Tensor, pool: Tensor, layer: int, slots: Tensor) -> None:
    """Specifies `kernels.kv_write`."""
    block_size = pool.shape[4]
    for t, slot in enumerate(slots.tolist()):
        pool[slot // block_size, :, layer, 0, slot % block_size] = k[t]
        pool[slot // block_size, :, layer, 1, slot % block_size] = v[t]



def sample(logits: Tensor, uniform: float, *, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """Specifies `kernels.sampling`, on Python floats."""
    values = [x / temperature for x in logits.double().tolist()]
    if 0 < top_k < len(values):
        kth = sorted(values, reverse=True)[top_k - 1]
        values = [x if x >= kth else -math.inf for x in values]
    top = max(values)
    weights = [math.exp(x - top) for x in values]
    total = sum(weights)
    probs = [w / total for w in weights]
    if top_p < 1.0:
        kept, mass = set(), 0.0
        for at in sorted(range(len(probs)), key=lambda i: -probs[i]):
            if mass < top_p:
                kept.add(at)
            mass += probs[at]
        probs = [p if at in kept else 0.0 for at, p in enumerate(probs)]
    if min_p > 0.0:
        floor = min_p * max(probs)
        probs = [p if p >= floor else 0.0 for p in probs]
    goal, mass = uniform * sum(probs), 0.0
    for at, p in enumerate(probs):
        mass += p
        if mass > goal:
            return at
    return max(at for at, p in enumerate(probs) if p)

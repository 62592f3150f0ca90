"""Whether the kernels are right on this card: their error against 64 bits, beside that of a plain 16-bit computation.

The rule is FlashAttention's: a kernel may be wrong by twice what the plain one is. The whole suite, with its odd sizes
and poisoned memory, is `python -m pytest tests/kernels tests/engine/test_triton_step.py tests/engine/test_graphs.py`.
"""

from collections.abc import Iterator, Sequence
from random import Random

import torch
from torch import Tensor

from benchmarks.gpu.card import Card, Line
from kernels import reference_attention
from kernels.configs import ConfigKey, config_for
from kernels.decode_attention import decode_attention
from kernels.decode_buffers import DecodeBuffers
from kernels.decode_plan import geometry_for, plan_decode
from kernels.kv_write import quantize
from kernels.pool import KVPool, eight_bit_pool
from kernels.prefill_attention import plan_prefill, prefill_attention, rows_per_tile

ALLOWED = 2.0
SLACK = 1e-3
CASES = [
    (heads, kv_heads, head_dim, block, dtype)
    for heads, kv_heads, head_dim, block in (
        (32, 8, 128, 64),
        (9, 3, 64, 16),
        (8, 8, 80, 32),
        (16, 1, 96, 1),
        (8, 1, 256, 128),
    )
    for dtype in ("native", "int8", "float8_e4m3fn")
]


def correct(card: Card) -> Iterator[Line]:
    """Raises nothing: a line whose `right` is 0 is a wrong kernel."""
    cases = CASES if card.sizes.unit == 1 else CASES[4:5]
    for case in cases:
        for what in ("decode", "prefill"):
            yield _case(card, what, *case)


def _case(
    card: Card, what: str, heads: int, kv_heads: int, head_dim: int, block: int, dtype: str
) -> Line:
    contexts = [max(1, card.sizes.tokens(n)) for n in (1, 37, 700, 2049)]
    counts = [1] * len(contexts) if what == "decode" else [max(1, n // 2) for n in contexts]
    need = [-(-n // block) for n in contexts]
    order = list(range(sum(need)))
    Random(0).shuffle(order)
    tables = [order[sum(need[:at]) : sum(need[: at + 1])] for at in range(len(need))]
    pool = _pool(card, len(order), kv_heads, block, head_dim, dtype)
    q = card.random(sum(counts), heads, head_dim)
    group = heads // kv_heads
    name = str(pool.payload.dtype).removeprefix("torch.")
    config = config_for(ConfigKey(what, head_dim, group, block, name, card.arch))
    if what == "decode":
        geometry = geometry_for(
            batch=len(contexts), kv_heads=kv_heads, group=group, programs=card.sms,
            tile=config.tile, packed_rows=config.rows,
        )  # fmt: skip
        buffers = DecodeBuffers(
            geometry, batch=len(contexts), heads=heads, head_dim=head_dim,
            table_blocks=max(need), device=card.device,
        )  # fmt: skip
        buffers.load(plan_decode(contexts, geometry), contexts, tables)
        got, _ = decode_attention(q, pool, 0, buffers, config)
        want, _ = reference_attention.decode(q, pool, 0, contexts, tables)
    else:
        planned = plan_prefill(counts, contexts, rows_per_tile(config, group))
        tiles = torch.tensor(planned, dtype=torch.int32).to(card.device)
        width = max(need)
        padded = [table + [0] * (width - len(table)) for table in tables]
        device_tables = torch.tensor(padded, dtype=torch.int32).to(card.device)
        got = prefill_attention(q, pool, 0, tiles, device_tables, config)
        want, _ = reference_attention.prefill(q, pool, 0, counts, contexts, tables)
    error = float((got.double() - want).abs().max())
    plain = float((_plain(q, pool, counts, contexts, tables).double() - want).abs().max())
    return {
        "what": f"{what} {heads}/{kv_heads}/{head_dim}, block {block}, {name}",
        "error": error,
        "plain_error": plain,
        "right": int(error <= ALLOWED * plain + SLACK),
    }


def _pool(
    card: Card, blocks: int, kv_heads: int, block: int, head_dim: int, dtype: str
) -> KVPool:
    payload = card.random(blocks, kv_heads, 1, 2, block, head_dim)
    if dtype == "native":
        return KVPool(payload)
    kind: torch.dtype = getattr(torch, dtype)
    _, pool = eight_bit_pool(blocks, kv_heads, 1, block, head_dim, dtype=kind, device=card.device)
    assert pool.scales is not None
    codes, scales = quantize(payload.float(), kind)
    pool.payload.copy_(codes)
    pool.scales.copy_(scales)
    return pool


def _plain(
    q: Tensor,
    pool: KVPool,
    counts: Sequence[int],
    contexts: Sequence[int],
    tables: Sequence[Sequence[int]],
) -> Tensor:
    """Each step of attention rounded to the queries' 16 bits."""
    out, row = torch.empty_like(q), 0
    group = q.shape[1] // pool.kv_heads
    for count, context, table in zip(counts, contexts, tables, strict=True):
        k, v = (
            side.to(q.dtype).repeat_interleave(group, 0)
            for side in reference_attention.gather_rows(pool, 0, table, context)
        )
        mine = q[row : row + count].transpose(0, 1)
        scores = mine @ k.transpose(1, 2) * q.shape[2] ** -0.5
        hidden = torch.ones(count, context, dtype=torch.bool, device=q.device).triu(
            context - count + 1
        )
        probs = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        out[row : row + count] = (probs @ v).transpose(0, 1)
        row += count
    return out

# mypy: allow-untyped-defs, allow-incomplete-defs
"""Paged prefill attention: ragged chunks of new tokens over a cached prefix, in one launch.

Sequence i has `count_i` query rows, at the end of a context of `context_i` tokens whose keys and values, the new ones
included, already lie in its blocks. Row r sees the first `context_i - count_i + r + 1` tokens:

    out[r] = softmax(q[r] K^T * scale) V

A program takes one tile of rows, all query heads of a KV head packed into it, so that a key is read once per tile and
KV head. Tokens before the tile's first row are seen by every row and swept without a mask; only the diagonal is
masked. Tiles run longest first, so that the last to start are the short ones. Specification:
`kernels.reference_attention.prefill`. Sources: FlashAttention-2 (Dao 2023); chunks over a prefix, SGLang's extend
attention; longest first, Lean Attention (2024) and FlashAttention's varlen scheduler.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tile import exponent_scale, finish, padded_dims, sweep, with_sink
from kernels.configs import KernelConfig
from kernels.launch import check_interpretable
from kernels.pool import KVPool

TILE_FIELDS = 4


def plan_prefill(
    query_counts: Sequence[int], context_lens: Sequence[int], rows_per_tile: int
) -> list[tuple[int, int, int, int]]:
    """Return the launch's tiles, longest first: (sequence, flat row of its first query, queries in the tile, position
    of the first). A tile has at most `rows_per_tile` queries. Raises ValueError for a chunk longer than its context."""
    tiles = []
    start = 0
    for sequence, (count, context) in enumerate(zip(query_counts, context_lens, strict=True)):
        if not 0 < count <= context:
            raise ValueError(f"sequence {sequence}: {count} new tokens of {context}")
        for at in range(0, count, rows_per_tile):
            rows = min(rows_per_tile, count - at)
            tiles.append((sequence, start + at, rows, context - count + at))
        start += count
    return sorted(tiles, key=lambda tile: -(tile[3] + tile[2]))


@triton.jit(do_not_specialize=["table_blocks"])
def prefill_kernel(
    q_ptr,
    payload,
    scales,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    tables_ptr,
    sinks_ptr,
    table_blocks,
    scale,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    STRIDE_KV: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SCALE_HEAD: tl.constexpr,
    SCALE_KV: tl.constexpr,
    SCALE_TOKEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    TILE: tl.constexpr,
    M: tl.constexpr,
):
    tile = tiles_ptr + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    sequence = tl.load(tile)
    first_row = tl.load(tile + 1)
    count = tl.load(tile + 2)
    first_position = tl.load(tile + 3)

    packed = tl.arange(0, M)
    dims = tl.arange(0, DIM_PAD)
    present = packed < count * GROUP
    inside = present[:, None] & (dims < HEAD_DIM)[None, :]
    position = first_position + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    row_at = (first_row + packed // GROUP).to(tl.int64) * HEADS + head
    at = row_at[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)

    table = tables_ptr + sequence.to(tl.int64) * table_blocks
    payload += kv_head * (STRIDE_HEAD // (1 if FORMAT == "native" else 2))
    scales += kv_head * SCALE_HEAD
    acc = tl.zeros([M, DIM_PAD], dtype=tl.float32)
    top = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    begin = 0
    lowest = 0
    diagonal = (first_position + 1) // TILE * TILE
    if WINDOW > 0:
        lowest = tl.maximum(first_position - WINDOW + 1, 0)
        begin = lowest // TILE * TILE
    else:
        acc, top, total = sweep(
            q, payload, scales, table, 0, diagonal, 0, position, scale, acc, top, total,
            STRIDE_BLOCK, STRIDE_KV, STRIDE_TOKEN, SCALE_BLOCK, SCALE_KV, SCALE_TOKEN,
            BLOCK_SIZE, HEAD_DIM, DIM_PAD, FORMAT, 0, TILE, "all", SOFTCAP,
        )  # fmt: skip
        begin = diagonal
    acc, top, total = sweep(
        q, payload, scales, table, begin, first_position + count, lowest, position, scale, acc, top, total,
        STRIDE_BLOCK, STRIDE_KV, STRIDE_TOKEN, SCALE_BLOCK, SCALE_KV, SCALE_TOKEN,
        BLOCK_SIZE, HEAD_DIM, DIM_PAD, FORMAT, WINDOW, TILE, "causal", SOFTCAP,
    )  # fmt: skip
    answer, lse = finish(acc, top, total, scale, SOFTCAP)
    if SINKS:
        answer, lse = with_sink(answer, lse, tl.load(sinks_ptr + head).to(tl.float32))
    tl.store(out_ptr + at, answer.to(out_ptr.dtype.element_ty), mask=inside)
    if WITH_LSE:
        tl.store(lse_ptr + row_at, lse, mask=present)


def prefill_attention(
    q: Tensor,
    pool: KVPool,
    layer: int,
    tiles: Tensor,
    tables: Tensor,
    config: KernelConfig,
    *,
    window: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with `q` `[rows, heads, head_dim]`, contiguous.

    `tiles` int32 `[n, 4]` on q's device, from `plan_prefill` with `rows_per_tile(config, group)`; `tables` int32
    `[sequences, blocks]`. Writes and returns `out`, like q, for the planned rows only, and their natural log-sum-exp
    to `lse` float32 `[rows, heads]` if given. `window`, `scale`, `softcap` and `sinks` as in
    `kernels.decode_attention`. Raises ValueError where shapes do not fit.
    """
    rows, heads, head_dim = q.shape
    if head_dim != pool.head_dim or heads % pool.kv_heads or not q.is_contiguous():
        raise ValueError(
            f"queries {tuple(q.shape)} do not fit {pool.kv_heads} KV heads of {pool.head_dim}"
        )
    if (
        tiles.dtype != torch.int32
        or tables.dtype != torch.int32
        or tiles.shape[1:] != (TILE_FIELDS,)
    ):
        raise ValueError("tiles must be int32 [n, 4] and tables int32 [sequences, blocks]")
    if lse is not None and (lse.shape != (rows, heads) or lse.dtype != torch.float32):
        raise ValueError(f"lse must be float32 [{rows}, {heads}]")
    group = heads // pool.kv_heads
    rows_per_tile(config, group)
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"{len(sinks)} sinks for {heads} heads")
    check_interpretable(q, pool.payload, *([] if sinks is None else [sinks]))
    out = torch.empty_like(q) if out is None else out
    payload, scales = pool.layer(layer, paired=True)
    prefill_kernel[(tiles.shape[0], pool.kv_heads)](
        q,
        payload,
        scales,
        out,
        out if lse is None else lse,
        tiles,
        tables,
        out if sinks is None else sinks,
        tables.shape[1],
        exponent_scale(scale, head_dim, softcap),
        **pool.constants(),
        DIM_PAD=padded_dims(head_dim, pool.format),
        HEADS=heads,
        GROUP=group,
        WINDOW=window,
        SOFTCAP=float(softcap),
        SINKS=sinks is not None,
        WITH_LSE=lse is not None,
        TILE=config.tile,
        M=config.rows,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def rows_per_tile(config: KernelConfig, group: int) -> int:
    """Count the queries that a tile of `config.rows` packed rows holds. Raises ValueError where it holds none."""
    if config.rows < max(16, group):
        raise ValueError(f"a tile of {config.rows} rows cannot hold a group of {group} heads")
    return config.rows // group

# mypy: allow-untyped-defs, allow-incomplete-defs
"""Turns one layer's QKV product into rotated queries and paged keys and values, in one launch.

Per token t at position p, with halves (a, b) of a head's row, after the optional RMS norm of queries and keys:

    (a, b) -> (a cos_p - b sin_p, b cos_p + a sin_p)

Under partial rotation a and b are the halves of the first `rotary_dim` columns, and the others pass; where nothing is
rotated, all pass.

Queries go to a tensor of their own; keys and values to slot `slots[t] = block * block_size + offset` of the pool,
rounded to its type or quantized with one scale per token and head. Specification:
`kernels.reference_rows.rope_kv_write`. Sources: RoFormer (Su et al. 2021) in the half-split form of GPT-NeoX;
query-key norm, Qwen3; the fusion, FlashInfer's `rope_quantize_fp8_append_paged_kv_cache`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import KernelConfig
from kernels.launch import check_interpretable
from kernels.pool import KVPool
from kernels.quantize import quantize_rows


@triton.jit
def _half_rows(ptr, rows, live, first, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Load float32 `[R, HALF_PAD]`: `HALF` elements from `first` of each row."""
    dims = tl.arange(0, HALF_PAD)
    mask = live[:, None] & (dims < HALF)[None, :]
    return tl.load(ptr + rows[:, None] + first + dims[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _normalize(low, high, weight, eps, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    dims = tl.arange(0, HALF_PAD)
    inside = dims < HALF
    square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    factor = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
    low_weight = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    high_weight = tl.load(weight + HALF + dims, mask=inside, other=0.0).to(tl.float32)
    return low * factor * low_weight[None, :], high * factor * high_weight[None, :], factor


@triton.jit
def _turn_some(
    mine,
    first,
    ptr,
    rows,
    angles,
    live,
    cos_ptr,
    sin_ptr,
    weight,
    factor,
    NORM: tl.constexpr,
    TURNED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Rotate `mine`, columns `first ..` of each row, of which those before 2 * TURNED turn against the column TURNED
    away; that one is read, and normed, again."""
    dims = tl.arange(0, HALF_PAD)
    column = first + dims
    turns = (column < 2 * TURNED) & (dims < HALF)
    is_low = column < TURNED
    other = tl.where(is_low, column + TURNED, column - TURNED)
    angle = tl.where(is_low, column, column - TURNED)
    mask = live[:, None] & turns[None, :]
    partner = tl.load(ptr + rows[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        partner = partner * factor * tl.load(weight + other, mask=turns, other=0.0).to(tl.float32)[None, :]
    at = angles[:, None] + angle[None, :]
    cos = tl.load(cos_ptr + at, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return mine * cos + partner * tl.where(is_low[None, :], -sin, sin)


@triton.jit
def _write_row(
    payload,
    scales,
    rows,
    scale_rows,
    live,
    low,
    high,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    FORMAT: tl.constexpr,
):
    dims = tl.arange(0, HALF_PAD)
    mask = live[:, None] & (dims < HALF)[None, :]
    at = payload + rows[:, None] + dims[None, :]
    if FORMAT == "native":
        tl.store(at, low.to(payload.dtype.element_ty), mask=mask)
        tl.store(at + HALF, high.to(payload.dtype.element_ty), mask=mask)
    else:
        low_codes, high_codes, scale = quantize_rows(low, high, FORMAT)
        tl.store(at, low_codes, mask=mask)
        tl.store(at + HALF, high_codes, mask=mask)
        tl.store(scales + scale_rows, scale, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def rope_kv_write_kernel(
    qkv_ptr,
    q_out_ptr,
    payload,
    scales,
    slots_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    tokens,
    eps,
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    NORM: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program takes ROWS tokens of one query head, or of one key head and its value head."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    live = token < tokens
    qkv_rows = token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    low = _half_rows(qkv_ptr + head * HEAD_DIM, qkv_rows, live, 0, HALF, HALF_PAD)
    high = _half_rows(qkv_ptr + head * HEAD_DIM, qkv_rows, live, HALF, HALF, HALF_PAD)
    weight = q_norm_ptr if head < HEADS else k_norm_ptr
    factor = 1.0
    if NORM:
        low, high, factor = _normalize(low, high, weight, eps, HALF, HALF_PAD)
    if TURNED == HALF:
        angles = tl.load(positions_ptr + token, mask=live, other=0).to(tl.int64) * HALF
        cos = _half_rows(cos_ptr, angles, live, 0, HALF, HALF_PAD)
        sin = _half_rows(sin_ptr, angles, live, 0, HALF, HALF_PAD)
        turned_low = low * cos - high * sin
        turned_high = high * cos + low * sin
    elif TURNED > 0:
        angles = tl.load(positions_ptr + token, mask=live, other=0).to(tl.int64) * TURNED
        own = qkv_ptr + head * HEAD_DIM
        turned_low = _turn_some(
            low, 0, own, qkv_rows, angles, live, cos_ptr, sin_ptr, weight, factor, NORM, TURNED, HALF, HALF_PAD
        )
        turned_high = _turn_some(
            high, HALF, own, qkv_rows, angles, live, cos_ptr, sin_ptr, weight, factor, NORM, TURNED, HALF, HALF_PAD
        )
    else:
        turned_low = low
        turned_high = high

    if head < HEADS:
        dims = tl.arange(0, HALF_PAD)
        mask = live[:, None] & (dims < HALF)[None, :]
        out = q_out_ptr + (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out, turned_low.to(q_out_ptr.dtype.element_ty), mask=mask)
        tl.store(out + HALF, turned_high.to(q_out_ptr.dtype.element_ty), mask=mask)
    else:
        kv_head = head - HEADS
        slot = tl.load(slots_ptr + token, mask=live, other=-1)
        kept = live & (slot >= 0)
        slot = tl.where(kept, slot, 0)
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        rows = block * STRIDE_BLOCK + kv_head * STRIDE_HEAD + offset * STRIDE_TOKEN
        scale_rows = block * SCALE_BLOCK + kv_head * SCALE_HEAD + offset * SCALE_TOKEN
        _write_row(
            payload, scales, rows, scale_rows, kept, turned_low, turned_high, HALF, HALF_PAD, FORMAT
        )
        value = qkv_ptr + (head + KV_HEADS) * HEAD_DIM
        low = _half_rows(value, qkv_rows, live, 0, HALF, HALF_PAD)
        high = _half_rows(value, qkv_rows, live, HALF, HALF, HALF_PAD)
        _write_row(
            payload,
            scales,
            rows + STRIDE_KV,
            scale_rows + SCALE_KV,
            kept,
            low,
            high,
            HALF,
            HALF_PAD,
            FORMAT,
        )


def rope_kv_write(
    qkv: Tensor,
    pool: KVPool,
    layer: int,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    config: KernelConfig,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    q_out: Tensor | None = None,
) -> Tensor:
    """Rotate, and write keys and values.

    `qkv` `[tokens, heads + 2 * kv_heads, head_dim]`, contiguous, is only read; `slots` int64 `[tokens]`, negative for
    padding rows, whose keys and values are dropped; `positions` int64 `[tokens]`; `cos`, `sin`
    `[context, rotary_dim / 2]`, or None where nothing is rotated; `q_norm` and `k_norm` `[head_dim]`, both or neither.
    Changes the named slots of `layer`.
    Returns the queries `[tokens, heads, head_dim]` in qkv's type. Raises ValueError where shapes do not fit.
    """
    tokens, rows, head_dim = qkv.shape
    heads = rows - 2 * pool.kv_heads
    if heads <= 0 or head_dim != pool.head_dim or head_dim % 2 or not qkv.is_contiguous():
        raise ValueError(
            f"{tuple(qkv.shape)} is no QKV for {pool.kv_heads} KV heads of {pool.head_dim}"
        )
    if slots.shape != (tokens,) or positions.shape != (tokens,) or slots.dtype != torch.int64:
        raise ValueError(f"slots and positions must be [{tokens}], slots int64")
    if (cos is None) != (sin is None) or (q_norm is None) != (k_norm is None):
        raise ValueError("cos and sin, and the norms of queries and keys, come both or not at all")
    turned = 0
    if cos is not None and sin is not None:
        turned = cos.shape[1]
        if cos.shape != sin.shape or not 0 < turned <= head_dim // 2:
            raise ValueError("rotary tables must be [context, rotary_dim / 2], for at most the head's columns")
    check_interpretable(qkv, pool.payload, *([] if cos is None else [cos]))
    q_out = (
        torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
        if q_out is None
        else q_out
    )
    payload, scales = pool.layer(layer)
    rope_kv_write_kernel[(triton.cdiv(tokens, config.rows), heads + pool.kv_heads)](
        qkv,
        q_out,
        payload,
        scales,
        slots,
        positions,
        qkv if cos is None else cos,
        qkv if sin is None else sin,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        tokens,
        eps,
        **pool.constants(),
        HEADS=heads,
        KV_HEADS=pool.kv_heads,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        NORM=q_norm is not None,
        TURNED=turned,
        ROWS=config.rows,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return q_out

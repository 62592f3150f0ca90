# mypy: allow-untyped-defs, allow-incomplete-defs
"""Paged decode attention: one query row per sequence over a cached context, split over its length, prefixes shared.

    out[r, h] = sum_t softmax_t(q[r, h] . K[t, g] * scale) V[t, g]     g = h // (heads / kv_heads)

over the tokens t < length[r] (the last `window` of them under a sliding window), with a soft cap and sinks as
`kernels.attention_tile` says. A persistent grid of fixed size walks
the work list of `kernels.decode_plan`: every size that varies from step to step is read from device memory, so the
launches can be captured in a CUDA graph. A second launch merges the rows that were split; from compute capability 9.0
on it is a dependent one, which is there, and knows what to merge, when the first one ends:

    out = sum_n w_n out_n / sum_n w_n,   w_n = exp(lse_n - max lse)

A sink joins where a row is whole: in the merge, or in the first launch for a row that was not split.

Specification: `kernels.reference_attention.decode`. Sources: FlashDecoding (Dao et al. 2023) for the split over the
context; `kernels.decode_plan` and `kernels.attention_tile` name those of the plan and of the tile.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention_tile import exponent_scale, finish, padded_dims, sweep, with_sink
from kernels.configs import DEFAULTS, KernelConfig
from kernels.decode_buffers import DecodeBuffers
from kernels.decode_plan import geometry_for
from kernels.launch import check_interpretable, launches_dependents
from kernels.pool import KVPool
from kernels.residency import UNKNOWN, multiprocessor, residency

MERGE = DEFAULTS["merge"]


@triton.jit
def _item(items_ptr, number):
    """Load the fields of one `decode_plan.Item`."""
    item = items_ptr + number * 7
    return (
        tl.load(item),
        tl.load(item + 1),
        tl.load(item + 2),
        tl.load(item + 3),
        tl.load(item + 4),
        tl.load(item + 5),
        tl.load(item + 6),
    )


@triton.jit
def decode_kernel(
    q_ptr,
    payload,
    scales,
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    items_ptr,
    ranges_ptr,
    rows_ptr,
    tables_ptr,
    lengths_ptr,
    slots_ptr,
    sinks_ptr,
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
    TABLE_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROW_WINDOWS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    TILE: tl.constexpr,
    M: tl.constexpr,
):
    """Each program runs its items: M packed rows against the item's tokens, TILE at a time. ROW_WINDOWS: an item may
    have rows whose windows begin at different tokens. DEPENDENT: the merge may be started once all programs are."""
    if DEPENDENT:
        gdc_launch_dependents()
    program = tl.program_id(0)
    packed = tl.arange(0, M)
    dims = tl.arange(0, DIM_PAD)
    # The first item's place is known, and the next one's fields are fetched while this one is computed.
    first, count, kv_head, begin, end, chunk, owner = _item(items_ptr, program)
    following = tl.load(ranges_ptr + program)
    last = tl.load(ranges_ptr + program + 1)
    for number in range(following, last + 1):
        present = packed < count * GROUP
        row = tl.load(rows_ptr + first + packed // GROUP, mask=present, other=0)
        head = kv_head * GROUP + packed % GROUP
        inside = present[:, None] & (dims < HEAD_DIM)[None, :]
        at = (row.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptr + at, mask=inside, other=0.0)
        splits = tl.load(slots_ptr + row * 2, mask=present, other=0)
        slot = tl.load(slots_ptr + row * 2 + 1, mask=present, other=0) + chunk

        # Any of the rows will do, since they share the item's blocks; under a window it is the shortest one, which
        # sees the first of them.
        table = tables_ptr + owner.to(tl.int64) * TABLE_BLOCKS
        lowest = 0
        position = row
        if WINDOW > 0:
            lowest = tl.load(lengths_ptr + owner) - WINDOW
        if ROW_WINDOWS:
            position = tl.load(lengths_ptr + row, mask=present, other=0) - 1
        payload_of_head = payload + kv_head * (STRIDE_HEAD // (1 if FORMAT == "native" else 2))
        scales_of_head = scales + kv_head * SCALE_HEAD
        from_token, to_token = begin, end
        first, count, kv_head, begin, end, chunk, owner = _item(
            items_ptr, tl.minimum(number, last - 1)
        )

        acc = tl.zeros([M, DIM_PAD], dtype=tl.float32)
        top = tl.full([M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([M], dtype=tl.float32)
        acc, top, total = sweep(
            q,
            payload_of_head,
            scales_of_head,
            table,
            from_token,
            to_token,
            lowest,
            position,
            scale,
            acc,
            top,
            total,
            STRIDE_BLOCK,
            STRIDE_KV,
            STRIDE_TOKEN,
            SCALE_BLOCK,
            SCALE_KV,
            SCALE_TOKEN,
            BLOCK_SIZE,
            HEAD_DIM,
            DIM_PAD,
            FORMAT,
            WINDOW,
            TILE,
            "window" if ROW_WINDOWS else "range",
            SOFTCAP,
        )
        answer, lse = finish(acc, top, total, scale, SOFTCAP)
        whole = splits == 1
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=present, other=0.0).to(tl.float32)
            joined_answer, joined_lse = with_sink(answer, lse, sink)
            answer = tl.where(whole[:, None], joined_answer, answer)
            lse = tl.where(whole, joined_lse, lse)
        tl.store(out_ptr + at, answer.to(out_ptr.dtype.element_ty), mask=inside & whole[:, None])
        tl.store(lse_ptr + row * HEADS + head, lse, mask=whole)
        partial_at = slot.to(tl.int64) * HEADS + head
        split = splits > 1
        tl.store(
            partial_ptr + partial_at[:, None] * HEAD_DIM + dims[None, :],
            answer,
            mask=inside & split[:, None],
        )
        tl.store(partial_lse_ptr + partial_at, lse, mask=split)


@triton.jit
def merge_kernel(
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    slots_ptr,
    sinks_ptr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge one row and head per program: the partial results of its chunks, SPLITS at a time. Rows without tokens
    become zero with lse = -inf; rows of one chunk are already written. WINDOWED: a row may see nothing of a chunk.
    DEPENDENT: it runs while `decode_kernel` does, and waits for it here, also where it has nothing to merge: what is
    launched behind it waits for this launch alone."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(slots_ptr + row * 2)
    first = tl.load(slots_ptr + row * 2 + 1).to(tl.int64)
    if DEPENDENT:
        gdc_wait()
    if count == 1:
        return
    dims = tl.arange(0, DIM_PAD)
    inside = dims < HEAD_DIM
    acc = tl.zeros([DIM_PAD], dtype=tl.float32)
    top = tl.full([], float("-inf"), dtype=tl.float32)
    total = tl.zeros([], dtype=tl.float32)
    for start in range(0, count, SPLITS):
        numbers = start + tl.arange(0, SPLITS)
        present = numbers < count
        at = (first + numbers) * HEADS + head
        lse = tl.load(partial_lse_ptr + at, mask=present, other=float("-inf"))
        part = tl.load(
            partial_ptr + at[:, None] * HEAD_DIM + dims[None, :],
            mask=present[:, None] & inside[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        shift = new_top
        if WINDOWED:
            # Nothing of the first chunks, perhaps: -inf minus -inf is NaN.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(lse - shift)
        keep = tl.exp(top - shift)
        acc = acc * keep + tl.sum(part * weights[:, None], 0)
        total = total * keep + tl.sum(weights, 0)
        top = new_top
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        shift = tl.maximum(top, sink)
        keep = tl.exp(top - shift)
        acc = acc * keep
        total = total * keep + tl.exp(sink - shift)
        top = tl.where(count > 0, shift, float("-inf"))
    at = row.to(tl.int64) * HEADS + head
    safe = tl.where(count > 0, total, 1.0)
    tl.store(out_ptr + at * HEAD_DIM + dims, (acc / safe).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + at, top + tl.log(safe))


def decode_attention(
    q: Tensor,
    pool: KVPool,
    layer: int,
    buffers: DecodeBuffers,
    config: KernelConfig,
    *,
    out: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    stack: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend with `q` `[batch, heads, head_dim]` (16- or 32-bit, contiguous) as the loaded plan says, by the buffers'
    `stack` of tables.

    Returns `out`, like q, and the natural log-sum-exp of the scaled scores, float32 `[batch, heads]` (the buffers'
    own). `batch` is at most what the buffers have room for, and no less than the plan's rows. Rows without tokens get
    zero and -inf. `scale` defaults to 1 / sqrt(head_dim); `softcap` 0 is none; `sinks` `[heads]` join each row's sum.
    The window is the geometry's, and so must `config.tile` be. Raises ValueError where shapes do not fit.
    """
    batch, heads, head_dim = q.shape
    geometry = buffers.geometry
    if head_dim != pool.head_dim or heads % pool.kv_heads or pool.kv_heads != geometry.kv_heads:
        raise ValueError(
            f"queries {tuple(q.shape)} do not fit {pool.kv_heads} KV heads of {pool.head_dim}"
        )
    if not buffers.loaded <= batch <= buffers.batch or not q.is_contiguous():
        raise ValueError(
            f"{batch} rows, a plan of {buffers.loaded} in buffers of {buffers.batch}, "
            "or queries not contiguous"
        )
    if geometry.tile != config.tile:
        raise ValueError(f"planned for tiles of {geometry.tile} tokens, not {config.tile}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"{len(sinks)} sinks for {heads} heads")
    check_interpretable(q, pool.payload, *([] if sinks is None else [sinks]))
    out = torch.empty_like(q) if out is None else out
    dim_pad = padded_dims(head_dim, pool.format)
    scoring = _Scores(scale, softcap, sinks)
    given, constants = _arguments(q, pool, layer, buffers, config, out, scoring, stack)
    decode_kernel[(geometry.programs,)](*given, **constants)
    merge_kernel[(batch, heads)](
        out,
        buffers.lse,
        buffers.partial,
        buffers.partial_lse,
        buffers.slots,
        buffers.lse if sinks is None else sinks,
        HEADS=heads,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        SPLITS=MERGE.tile,
        WINDOWED=geometry.window > 0,
        SINKS=sinks is not None,
        DEPENDENT=launches_dependents(),
        num_warps=MERGE.warps,
        num_stages=MERGE.stages,
        launch_pdl=launches_dependents(),
    )
    return out, buffers.lse[:batch]


class _Scores(NamedTuple):
    """What a layer does with scores; see `decode_attention`."""

    scale: float | None
    softcap: float
    sinks: Tensor | None


def packed_rows(group: int, rows: int) -> int:
    """Return the rows of the tile that holds `rows` queries of `group` heads: a power of two, at least the 16 of one
    mma."""
    return max(16, triton.next_power_of_2(group * rows))


def decode_residency(
    heads: int,
    dtype: torch.dtype,
    pool: KVPool,
    config: KernelConfig,
    table_blocks: int,
    *,
    window: int = 0,
    softcap: float = 0.0,
    with_sinks: bool = False,
    stacks: int = 1,
) -> int:
    """Return how many programs of the kernel an SM of the pool's device holds, as it is compiled for these heads and
    this configuration, one at least; nothing is launched. UNKNOWN where nobody can say: off a GPU."""
    device = pool.payload.device
    if device.type != "cuda":
        return UNKNOWN
    sinks = torch.empty(heads, dtype=dtype, device=device) if with_sinks else None
    scores = _Scores(None, softcap, sinks)
    compiled = _compiled(heads, dtype, pool, config, table_blocks, window, scores, stacks)
    return max(1, residency(compiled, multiprocessor(device)) or UNKNOWN)


def _compiled(
    heads: int,
    dtype: torch.dtype,
    pool: KVPool,
    config: KernelConfig,
    table_blocks: int,
    window: int,
    scores: "_Scores",
    stacks: int = 1,
) -> Any:
    """Compile `decode_kernel` as `decode_attention` launches it; returns Triton's `CompiledKernel`."""
    device = pool.payload.device
    geometry = geometry_for(
        batch=1,
        kv_heads=pool.kv_heads,
        group=heads // pool.kv_heads,
        programs=1,
        tile=config.tile,
        packed_rows=config.rows,
        window=window,
    )
    buffers = DecodeBuffers(
        geometry,
        batch=1,
        heads=heads,
        head_dim=pool.head_dim,
        table_blocks=table_blocks,
        stacks=stacks,
        device=device,
    )
    q = torch.empty(1, heads, pool.head_dim, dtype=dtype, device=device)
    given, constants = _arguments(q, pool, 0, buffers, config, torch.empty_like(q), scores)
    return decode_kernel.warmup(*given, grid=(1,), **constants)


def _arguments(
    q: Tensor,
    pool: KVPool,
    layer: int,
    buffers: DecodeBuffers,
    config: KernelConfig,
    out: Tensor,
    scores: "_Scores",
    stack: int = 0,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """What `decode_kernel` is launched with: arguments, and constants with options."""
    _, heads, head_dim = q.shape
    group = heads // pool.kv_heads
    payload, scales = pool.layer(layer, paired=True)
    given = (
        q,
        payload,
        scales,
        out,
        buffers.lse,
        buffers.partial,
        buffers.partial_lse,
        buffers.items,
        buffers.ranges,
        buffers.rows,
        buffers.stack(stack),
        buffers.lengths,
        buffers.slots,
        buffers.lse if scores.sinks is None else scores.sinks,
        exponent_scale(scores.scale, head_dim, scores.softcap),
    )
    return given, {
        **pool.constants(),
        "DIM_PAD": padded_dims(head_dim, pool.format),
        "HEADS": heads,
        "GROUP": group,
        "TABLE_BLOCKS": buffers.tables.shape[1],
        "WINDOW": buffers.geometry.window,
        "ROW_WINDOWS": buffers.geometry.window > 0 and buffers.geometry.rows_per_item > 1,
        "SOFTCAP": float(scores.softcap),
        "SINKS": scores.sinks is not None,
        "DEPENDENT": launches_dependents(),
        "TILE": config.tile,
        "M": packed_rows(group, buffers.geometry.rows_per_item),
        "num_warps": config.warps,
        "num_stages": config.stages,
    }

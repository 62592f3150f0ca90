# mypy: allow-untyped-defs, allow-incomplete-defs
"""Copy KV blocks between pools of different formats: to 8 bits for the wire or a tier, and back.

Each row (one token's key or value of one head in one layer) is read, widened to float32 with its scale, and written in
the target's format with a scale of its own. Strides of both sides are constants, so the order of dimensions may differ
too. What is lost is the rounding to 8 bits, once: a row that was quantized and widened again quantizes to the same
codes. Specification: `kernels.reference_blocks.convert_blocks`. Source: scales per token and head, KIVI (Liu et al.
2024) for the idea of cheap per-row scales, vLLM's INT8 KV cache for the granularity.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import KernelConfig
from kernels.launch import check_interpretable
from kernels.pool import KVPool
from kernels.quantize import quantize_rows, widen_e4m3


@triton.jit
def _widened(ptr, mask, factor, FORMAT: tl.constexpr):
    """Read rows at `ptr` as float32 values; `factor` `[R]` is each row's scale."""
    values = tl.load(ptr, mask=mask, other=0)
    if FORMAT == "native":
        return values.to(tl.float32)
    elif FORMAT == "int8":
        return values.to(tl.float32) * factor[:, None]
    else:
        return widen_e4m3(values).to(tl.float32) * 256.0 * factor[:, None]


# However many they are, and wherever their tensor lies: they are read one at a time.
@triton.jit(do_not_specialize=["source_blocks_ptr", "target_blocks_ptr", "units"])
def convert_blocks_kernel(
    source_ptr,
    source_scales_ptr,
    target_ptr,
    target_scales_ptr,
    source_blocks_ptr,
    target_blocks_ptr,
    units,
    SOURCE: tl.constexpr,
    SOURCE_SCALES: tl.constexpr,
    SOURCE_FORMAT: tl.constexpr,
    TARGET: tl.constexpr,
    TARGET_SCALES: tl.constexpr,
    TARGET_FORMAT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Units are (block, head), taken in turn, ROWS rows at a time. SOURCE, TARGET and the scales' constants are strides
    (block, head, layer, key/value, token)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    ALL: tl.constexpr = LAYERS * 2 * BLOCK_SIZE
    dims = tl.arange(0, HALF_PAD)
    lanes = tl.arange(0, ROWS)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        head = unit % KV_HEADS
        source_block = tl.load(source_blocks_ptr + unit // KV_HEADS).to(tl.int64)
        target_block = tl.load(target_blocks_ptr + unit // KV_HEADS).to(tl.int64)
        for start in range(0, ALL, ROWS):
            row = start + lanes
            live = row < ALL
            token = row % BLOCK_SIZE
            kv = row // BLOCK_SIZE % 2
            layer = row // (2 * BLOCK_SIZE)
            mask = live[:, None] & (dims < HALF)[None, :]
            at = (
                source_block * SOURCE[0]
                + head * SOURCE[1]
                + layer * SOURCE[2]
                + kv * SOURCE[3]
                + token * SOURCE[4]
            )
            factor = tl.zeros([ROWS], dtype=tl.float32)
            if SOURCE_FORMAT != "native":
                scale_at = source_block * SOURCE_SCALES[0] + head * SOURCE_SCALES[1]
                scale_at += (
                    layer * SOURCE_SCALES[2] + kv * SOURCE_SCALES[3] + token * SOURCE_SCALES[4]
                )
                factor = tl.load(source_scales_ptr + scale_at, mask=live, other=0.0)
            ptr = source_ptr + at[:, None] + dims[None, :]
            low = _widened(ptr, mask, factor, SOURCE_FORMAT)
            high = _widened(ptr + HALF, mask, factor, SOURCE_FORMAT)

            to = (
                target_block * TARGET[0]
                + head * TARGET[1]
                + layer * TARGET[2]
                + kv * TARGET[3]
                + token * TARGET[4]
            )
            out = target_ptr + to[:, None] + dims[None, :]
            if TARGET_FORMAT == "native":
                tl.store(out, low.to(target_ptr.dtype.element_ty), mask=mask)
                tl.store(out + HALF, high.to(target_ptr.dtype.element_ty), mask=mask)
            else:
                low_codes, high_codes, scale = quantize_rows(low, high, TARGET_FORMAT)
                tl.store(out, low_codes, mask=mask)
                tl.store(out + HALF, high_codes, mask=mask)
                scale_to = target_block * TARGET_SCALES[0] + head * TARGET_SCALES[1]
                scale_to += (
                    layer * TARGET_SCALES[2] + kv * TARGET_SCALES[3] + token * TARGET_SCALES[4]
                )
                tl.store(target_scales_ptr + scale_to, scale, mask=live)


def convert_blocks(
    source: KVPool,
    target: KVPool,
    source_blocks: Tensor,
    target_blocks: Tensor,
    config: KernelConfig,
    *,
    programs: int = 64,
) -> None:
    """Write `source`'s blocks to `target`'s, in its format. `source_blocks`, `target_blocks`: int32 `[n]`, distinct
    targets. Rows that hold nothing valid are converted too, into nothing valid. Raises ValueError where the pools are
    not of one shape but for blocks and format, or an odd head_dim."""
    if source.payload.shape[1:] != target.payload.shape[1:] or source.head_dim % 2:
        raise ValueError(
            f"{tuple(source.payload.shape)} does not convert to {tuple(target.payload.shape)}"
        )
    if source_blocks.numel() != target_blocks.numel():
        raise ValueError("each source block needs one target")
    check_interpretable(source.payload, target.payload)
    units = source_blocks.numel() * source.kv_heads
    if not units:
        return
    convert_blocks_kernel[(min(programs, units),)](
        source.bytes_or_values(),
        source.bytes_or_values() if source.scales is None else source.scales,
        target.bytes_or_values(),
        target.bytes_or_values() if target.scales is None else target.scales,
        source_blocks,
        target_blocks,
        units,
        SOURCE=source.payload.stride()[:5],
        SOURCE_SCALES=(0,) * 5 if source.scales is None else source.scales.stride(),
        SOURCE_FORMAT=source.format,
        TARGET=target.payload.stride()[:5],
        TARGET_SCALES=(0,) * 5 if target.scales is None else target.scales.stride(),
        TARGET_FORMAT=target.format,
        KV_HEADS=source.kv_heads,
        LAYERS=source.payload.shape[2],
        BLOCK_SIZE=source.block_size,
        HEAD_DIM=source.head_dim,
        HALF_PAD=triton.next_power_of_2(source.head_dim // 2),
        ROWS=config.rows,
        num_warps=config.warps,
        num_stages=config.stages,
    )

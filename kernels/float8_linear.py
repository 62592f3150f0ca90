# mypy: allow-untyped-defs, allow-incomplete-defs
"""The product of `kernels.scaled_linear` in tiles: 8-bit floats (E4M3) times 8-bit floats, in two launches or three.

    round_rows_kernel      s = max |x| / 448 of a row's PART columns; q = E4M3(x / s)
    float8_linear_kernel   sums of q * code over STEP columns, in 32 bits, each times s and W's scale, added up

Columns come in parts, as in `kernels.coded_linear`: of few rows each part has a program, and its `merge_parts` adds up.
It takes matrix units for 8-bit floats: compute capability 8.9 and up. Specification: `kernels.scaled_linear.reference`.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.coded_linear import STEP, RowConfigs, row_configs, sum_in_parts
from kernels.launch import check_interpretable
from kernels.quantize import encode_e4m3


@triton.jit
def round_rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PAD: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = tl.arange(0, PAD)
    at = row * COLUMNS + part * PART + own
    x = tl.load(x_ptr + at, mask=own < PART, other=0.0).to(tl.float32)
    most = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0)
    # Where there is a NaN or an infinity, the scale is no number either.
    scale = tl.div_rn(tl.maximum(most, LEAST), MOST) + (most - most)
    tl.store(scales_ptr + row * (COLUMNS // PART) + part, scale)
    tl.store(codes_ptr + at, encode_e4m3(tl.div_rn(x, scale)), mask=own < PART)


@triton.jit(do_not_specialize=["count"])
def float8_linear_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    count,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """SCALED columns share a scale, LENGTH are a part. With SPLIT, `out` is `[parts, count, WIDTH]`, float32."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = rows < count
    dims = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    wanted = dims < WIDTH
    begin = tl.program_id(2) * LENGTH
    stop = begin + LENGTH if SPLIT else COLUMNS
    total = tl.zeros([TILE, ROWS], tl.float32)
    for first in range(begin, stop, LENGTH):
        part = tl.zeros([TILE, ROWS], tl.float32)
        for start in range(first, min(first + LENGTH, COLUMNS), STEP):
            columns = start + tl.arange(0, STEP)
            inside = (columns < COLUMNS)[None, :]
            x = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :], mask=there[:, None] & inside, other=0.0)
            codes_at = dims[:, None] * COLUMNS + columns[None, :]
            codes = tl.load(codes_ptr + codes_at, mask=wanted[:, None] & inside, other=0.0)
            own = start // SCALED
            x_scales = tl.load(x_scales_ptr + rows * (COLUMNS // SCALED) + own, mask=there, other=0.0)
            scales = tl.load(scales_ptr + own * WIDTH + dims, mask=wanted, other=0.0)
            part += tl.dot(codes, tl.trans(x)) * x_scales[None, :] * scales[:, None]
        total += part
    if BIAS:
        total += tl.load(bias_ptr + dims, mask=wanted, other=0.0).to(tl.float32)[:, None]
    place = (tl.program_id(2).to(tl.int64) * count + rows)[None, :] * WIDTH + dims[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=there[None, :] & wanted[:, None])


@cache
def launch_configs(device: torch.device) -> RowConfigs:
    """Return how products of 8-bit floats are launched on a device."""
    return row_configs("float8_linear", "float8_e4m3fn", device)


def round_rows(x: Tensor, part: int, least: float, most: float) -> tuple[Tensor, Tensor]:
    """Round `x` `[n, columns]`, contiguous, as `scaled_linear.rounded` does: codes; scales `[n, columns / part]`.
    Raises TypeError for bfloat16 in the interpreter."""
    check_interpretable(x)
    count, columns = x.shape
    codes = torch.empty(count, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(count, columns // part, dtype=torch.float32, device=x.device)
    round_rows_kernel[(count, columns // part)](
        x,
        codes.view(torch.uint8),
        scales,
        COLUMNS=columns,
        PART=part,
        PAD=triton.next_power_of_2(part),
        LEAST=least,
        MOST=most,
        num_warps=1 if part <= STEP else 8,
    )
    return codes, scales


def float8_linear(
    rounded: tuple[Tensor, Tensor],
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    configs: RowConfigs,
) -> Tensor:
    """Multiply rounded rows (`round_rows`) with `codes` `[rows, columns]` and `scales` `[parts, rows]`: `[n, rows]` of
    `dtype`. There is at least one row. Raises ValueError for parts that are no multiple of STEP columns."""
    own, own_scales = rounded
    count, (width, columns) = len(own), codes.shape
    if len(scales) > 1 and columns // len(scales) % STEP:
        raise ValueError(f"scales of {columns // len(scales)} columns, where a step takes {STEP}")
    out = torch.empty(count, width, dtype=dtype, device=own.device)
    scaled = {"SCALED": columns // len(scales)}
    sum_in_parts(float8_linear_kernel, (own, own_scales, codes, scales), columns, bias, out, configs.of(count), scaled)
    return out

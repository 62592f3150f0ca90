# mypy: allow-untyped-defs, allow-incomplete-defs
"""`x W^T + b` with a quantized `W` (`kernels.coded_weight`), widened where it is multiplied:

    w = scale * code + offset    in 32 bits, rounded to the type of x
    out = sum of x * w over columns, in 32 bits, first to last

A program has a tile of rows of x and a tile of rows of W, and goes through all columns by itself: no sum is split, so
none is put together in an order that another launch would not have, and nothing is added atomically. Up to 16 rows of x
make a tile of their own height.

Specification: `reference` below.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.coded_weight import CodedWeight
from kernels.configs import ConfigKey, KernelConfig, config_for
from kernels.launch import arch_of, check_interpretable
from kernels.panels import FACTORS, GROUP
from kernels.quantize import widen_e4m3

STEP = 64
"""Bytes of a row of codes in one step, of 4 bits twice as many columns."""
FEW_ROWS = 16


def reference(x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
    """Specify `coded_linear`: float64 `[n, rows]`."""
    product = x.double() @ weight.widen(x.dtype).double().T
    return product if bias is None else product + bias.double()


@triton.jit
def _widened(codes, scales_ptr, offsets_ptr, factors, inside, OFFSETS: tl.constexpr):
    wide = codes.to(tl.float32) * tl.load(scales_ptr + factors, mask=inside, other=0.0)
    if OFFSETS:
        wide += tl.load(offsets_ptr + factors, mask=inside, other=0.0)
    return wide


@triton.jit
def _add(total, x_ptr, rows, columns, there, wide, COLUMNS: tl.constexpr):
    inside = there[:, None] & (columns < COLUMNS)[None, :]
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :], mask=inside, other=0.0)
    return tl.dot(x, wide.to(x.dtype), total, input_precision="ieee")


@triton.jit(do_not_specialize=["count"])
def coded_linear_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    count,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = rows < count
    dims = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    wanted = dims < WIDTH
    LENGTH: tl.constexpr = COLUMNS // 2 if KIND == "q4" else COLUMNS
    total = tl.zeros([ROWS, TILE], tl.float32)
    for start in range(0, LENGTH, STEP):
        at = start + tl.arange(0, STEP)
        inside = (at < LENGTH)[:, None] & wanted[None, :]
        codes = tl.load(codes_ptr + dims[None, :] * LENGTH + at[:, None], mask=inside, other=0)
        # Columns of the low half bytes; those of the high ones, of the same group, are 16 further.
        columns = (at // 16) * 32 + at % 16 if KIND == "q4" else at
        factors = dims[None, :] * (COLUMNS // PART) + (columns // PART)[:, None]
        if KIND == "q4":
            low = _widened(codes & 15, scales_ptr, offsets_ptr, factors, inside, OFFSETS)
            total = _add(total, x_ptr, rows, columns, there, low, COLUMNS)
            high = _widened(codes >> 4, scales_ptr, offsets_ptr, factors, inside, OFFSETS)
            total = _add(total, x_ptr, rows, columns + 16, there, high, COLUMNS)
        elif KIND == "f8":
            values = widen_e4m3(codes).to(tl.float32) * 256.0
            wide = _widened(values, scales_ptr, offsets_ptr, factors, inside, OFFSETS)
            total = _add(total, x_ptr, rows, columns, there, wide, COLUMNS)
        else:
            wide = _widened(codes, scales_ptr, offsets_ptr, factors, inside, OFFSETS)
            total = _add(total, x_ptr, rows, columns, there, wide, COLUMNS)
    if BIAS:
        total += tl.load(bias_ptr + dims, mask=wanted, other=0.0).to(tl.float32)[None, :]
    answer = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * WIDTH + dims[None, :], answer, mask=there[:, None] & wanted[None, :])


@cache
def launch_config(device: torch.device, kind: str) -> KernelConfig:
    """Return how a product with codes of this kind is launched on a device."""
    return config_for(ConfigKey("coded_linear", 0, 0, 0, kind, arch_of(device)))


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None, config: KernelConfig) -> Tensor:
    """Multiply `x` `[n, columns]`, contiguous -> `[n, rows]`, of its type. `config.tile` rows of W and `config.rows` of
    x make a tile. Raises ValueError where shapes do not fit, and TypeError for bfloat16 in the interpreter."""
    width, columns = weight.shape
    if x.dim() != 2 or x.shape[1] != columns or not x.is_contiguous():
        raise ValueError(f"{tuple(x.shape)} does not fit {columns} columns")
    if bias is not None and bias.shape != (width,):
        raise ValueError(f"a bias of {tuple(bias.shape)} does not fit {width} rows")
    check_interpretable(x)
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    if len(x) == 0:
        return out
    rows = min(config.rows, FEW_ROWS) if len(x) <= FEW_ROWS else config.rows
    coded_linear_kernel[(triton.cdiv(len(x), rows), triton.cdiv(width, config.tile))](
        x,
        weight.codes,
        weight.scales,
        weight.offsets,
        bias,
        out,
        len(x),
        WIDTH=width,
        COLUMNS=columns,
        KIND=weight.kind,
        PART=GROUP // FACTORS[weight.kind][0],
        OFFSETS=weight.offsets is not None,
        BIAS=bias is not None,
        ROWS=rows,
        TILE=config.tile,
        STEP=STEP,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out

# mypy: allow-untyped-defs, allow-incomplete-defs
"""`x W^T + b` with a quantized `W` (`kernels.coded_weight`), widened where it is multiplied:

    w = scale * code + offset    in 32 bits, rounded to the type of x
    part = sum of w * x over the columns of a part, in 32 bits, first to last
    out = part 0 + part 1 + ...  in 32 bits, rounded to the type of x

How many parts a weight's columns have follows from its shape alone (`parts_of`). A program takes a tile of rows of W
and one of rows of x through all parts, or, for few rows, through one of them, and `merge_parts_kernel` adds up: the
same sums in the same order. W is always the first of the two factors that a matrix instruction takes, so a card uses
the same one, and a row of x has the same bits, beside any number of others.

Specification: `reference` below.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.coded_weight import CodedWeight
from kernels.configs import ConfigKey, KernelConfig, config_for
from kernels.expert_tiles import load_rows
from kernels.launch import arch_of, check_interpretable
from kernels.panels import FACTORS, GROUP
from kernels.quantize import widen_e4m3

STEP = 128
"""Columns in one step."""
FEW_ROWS = 16
"""Up to so many rows of x have a tile of their own height. In 32 bits all have: taller ones take more shared memory
than most GPUs have."""
SPLIT_ROWS = 64
"""Up to so many rows of x, each part of the columns has a program of its own."""
SOME_ROWS = 128
"""Up to so many rows of x, tiles are no higher than this."""
HEIGHTS = (FEW_ROWS, SPLIT_ROWS, SOME_ROWS)
"""A tile is as high as the first of these that takes all rows of x; of more, and never more than, its configuration's.
"""
PROGRAMS = 400
"""A weight has as many parts as give it so many programs with tiles of 64 rows, three for each multiprocessor of the
largest cards; these hide the time that a step waits for its codes."""
MERGE_TILE = 512
LEAST_COLUMNS = 512
"""Parts are not made smaller."""


@dataclass(frozen=True, slots=True)
class RowConfigs:
    """How a product is launched: with up to SPLIT_ROWS rows of x, and with more."""

    few: KernelConfig
    many: KernelConfig

    def of(self, count: int) -> KernelConfig:
        return self.few if count <= SPLIT_ROWS else self.many


def row_configs(kernel: str, dtype: str, device: torch.device) -> RowConfigs:
    """Return a product's entries of the table: its own, and the one for many rows."""
    arch = arch_of(device)
    few, many = (config_for(ConfigKey(name, 0, 0, 0, dtype, arch)) for name in (kernel, f"{kernel}_many"))
    return RowConfigs(few, many)


def reference(x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
    """Specify `coded_linear`: float64 `[n, rows]`."""
    product = x.double() @ weight.widen(x.dtype).double().T
    return product if bias is None else product + bias.double()


@triton.jit
def load_weights(
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    dims,
    wanted,
    start,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    OFFSETS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Load STEP columns from `start` on of the rows `dims`, widened: float32 `[TILE, STEP]`, 0 for what does not exist.

    A part of PART columns has one scale. Codes are loaded part by part of all rows: in shared memory rows are then so
    close that those which a warp reads at once lie in other banks."""
    PARTS: tl.constexpr = STEP // PART
    BYTES: tl.constexpr = PART // 2 if KIND == "q4" else PART
    part = start // PART + tl.arange(0, PARTS)
    inside = wanted[:, None] & (part < COLUMNS // PART)[None, :]
    at = dims[:, None] * (COLUMNS // PART) + part[None, :]
    own = tl.trans(at * BYTES)[:, :, None] + tl.arange(0, BYTES)[None, None, :]
    codes = tl.load(codes_ptr + own, mask=tl.trans(inside)[:, :, None], other=0)
    if KIND == "q4":
        # Low half bytes are a part's first columns, high ones the others.
        codes = tl.permute(tl.join(codes & 15, codes >> 4), (0, 1, 3, 2)).reshape([PARTS, TILE, PART])
    wide = widen_e4m3(codes).to(tl.float32) * 256.0 if KIND == "f8" else codes.to(tl.float32)
    wide *= tl.trans(tl.load(scales_ptr + at, mask=inside, other=0.0))[:, :, None]
    if OFFSETS:
        wide += tl.trans(tl.load(offsets_ptr + at, mask=inside, other=0.0))[:, :, None]
    return tl.permute(wide, (1, 0, 2)).reshape([TILE, STEP])


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
    LENGTH: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """LENGTH columns are a part. With SPLIT, `out` is `[parts, count, WIDTH]`, float32, and has no bias."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = rows < count
    dims = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    wanted = dims < WIDTH
    begin = tl.program_id(2) * LENGTH
    stop = begin + LENGTH if SPLIT else COLUMNS
    total = tl.zeros([TILE, ROWS], tl.float32)
    for first in range(begin, stop, LENGTH):
        part = tl.zeros([TILE, ROWS], tl.float32)
        for start in range(first, first + LENGTH, STEP):
            x = load_rows(x_ptr, rows, start + tl.arange(0, STEP), there, COLUMNS)
            wide = load_weights(
                codes_ptr, scales_ptr, offsets_ptr, dims, wanted, start, COLUMNS, KIND, PART, OFFSETS, TILE, STEP
            )
            part = tl.dot(wide.to(x.dtype), tl.trans(x), part, input_precision="ieee")
        total += part
    if BIAS:
        total += tl.load(bias_ptr + dims, mask=wanted, other=0.0).to(tl.float32)[:, None]
    place = (tl.program_id(2).to(tl.int64) * count + rows)[None, :] * WIDTH + dims[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=there[None, :] & wanted[:, None])


@triton.jit(do_not_specialize=["count"])
def merge_parts_kernel(
    parts_ptr,
    bias_ptr,
    out_ptr,
    count,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add up `parts` `[PARTS, count, WIDTH]`, one after the other."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = dims < WIDTH
    total = tl.zeros([TILE], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + (part * count + row) * WIDTH + dims, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + dims, total.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def launch_configs(device: torch.device, kind: str) -> RowConfigs:
    """Return how a product with codes of this kind is launched on a device."""
    return row_configs("coded_linear", kind, device)


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None, configs: RowConfigs) -> Tensor:
    """Multiply `x` `[n, columns]`, contiguous -> `[n, rows]`, of its type. `tile` rows of W and, at most, `rows` of x
    make a tile. Raises ValueError where shapes do not fit, and TypeError for bfloat16 in the interpreter."""
    width, columns = weight.shape
    if x.dim() != 2 or x.shape[1] != columns or not x.is_contiguous():
        raise ValueError(f"{tuple(x.shape)} does not fit {columns} columns")
    if bias is not None and bias.shape != (width,):
        raise ValueError(f"a bias of {tuple(bias.shape)} does not fit {width} rows")
    check_interpretable(x)
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    if len(x) == 0:
        return out
    config = configs.of(len(x))
    if x.dtype == torch.float32:
        config = replace(config, rows=min(config.rows, FEW_ROWS))
    operands = (x, weight.codes, weight.scales, weight.offsets)
    own = {"KIND": weight.kind, "PART": GROUP // FACTORS[weight.kind][0], "OFFSETS": weight.offsets is not None}
    sum_in_parts(coded_linear_kernel, operands, columns, bias, out, config, own)
    return out


def sum_in_parts(
    kernel: Any,
    operands: tuple[Tensor | None, ...],
    columns: int,
    bias: Tensor | None,
    out: Tensor,
    config: KernelConfig,
    own: Mapping[str, object],
) -> None:
    """Launch a product whose columns are summed in parts, into `out` `[n, rows]`, of at least one row; for few rows
    each part by itself. `own`: the kernel's constants beside those of all such products; `operands` come first."""
    count, width = out.shape
    rows = min(config.rows, next((height for height in HEIGHTS if count <= height), config.rows))
    parts, length = parts_of(width, columns)
    split = parts > 1 and count <= SPLIT_ROWS
    summed = torch.empty(parts, count, width, dtype=torch.float32, device=out.device) if split else out
    kernel[(triton.cdiv(count, rows), triton.cdiv(width, config.tile), parts if split else 1)](
        *operands,
        None if split else bias,
        summed,
        count,
        WIDTH=width,
        COLUMNS=columns,
        LENGTH=length,
        BIAS=bias is not None and not split,
        SPLIT=split,
        ROWS=rows,
        TILE=config.tile,
        STEP=STEP,
        num_warps=config.warps,
        num_stages=config.stages,
        **own,
    )
    if split:
        merge_parts(summed, bias, out)


def parts_of(width: int, columns: int) -> tuple[int, int]:
    """Return how many parts the columns of a weight `[width, columns]` have, and the columns of each but the last."""
    tiles, parts = triton.cdiv(width, 64), 1
    while tiles * parts < PROGRAMS and columns >= 2 * parts * LEAST_COLUMNS:
        parts *= 2
    length = triton.cdiv(columns, parts * STEP) * STEP if parts > 1 else columns
    return triton.cdiv(columns, length), length


def merge_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Add up `parts` `[parts, n, rows]`, float32, and a bias, into `out` `[n, rows]`."""
    count, rows, width = parts.shape
    merge_parts_kernel[(rows, triton.cdiv(width, MERGE_TILE))](
        parts, bias, out, rows, WIDTH=width, PARTS=count, BIAS=bias is not None, TILE=MERGE_TILE, num_warps=4
    )

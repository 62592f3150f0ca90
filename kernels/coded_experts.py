# mypy: allow-untyped-defs, allow-incomplete-defs
"""A mixture of experts on a GPU whose weights are codes (`kernels.coded_weight`): the two products of
`kernels.grouped_experts`, with each tile of weights widened where it is multiplied, as `kernels.coded_linear` does.

    w = scale * code + offset      in 32 bits, rounded to the type of x
    gate_up, down                  sums over all columns in one order, by one program: nothing is split or atomic

A step reads the codes of the experts that its rows chose, and no others. Plan, combination and specification are those
of `kernels.grouped_experts`; a kind of codes has the same height of tiles in both products, so that one plan serves.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.coded_linear import STEP
from kernels.coded_weight import CodedStack
from kernels.configs import ConfigKey, KernelConfig, config_for
from kernels.expert_tiles import add_bias, gated, load_rows, store_rows
from kernels.experts import ClampedGate
from kernels.launch import arch_of
from kernels.panels import FACTORS, GROUP
from kernels.quantize import widen_e4m3


@triton.jit
def _load_codes(codes_ptr, dims, wanted, at, LENGTH: tl.constexpr):
    inside = (at < LENGTH)[:, None] & wanted[None, :]
    return tl.load(codes_ptr + dims[None, :] * LENGTH + at[:, None], mask=inside, other=0)


@triton.jit
def _widen(
    codes,
    scales_ptr,
    offsets_ptr,
    dims,
    wanted,
    columns,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    inside = (columns < COLUMNS)[:, None] & wanted[None, :]
    factors = dims[None, :] * (COLUMNS // PART) + (columns // PART)[:, None]
    values = widen_e4m3(codes).to(tl.float32) * 256.0 if KIND == "f8" else codes.to(tl.float32)
    wide = values * tl.load(scales_ptr + factors, mask=inside, other=0.0)
    if OFFSETS:
        wide += tl.load(offsets_ptr + factors, mask=inside, other=0.0)
    return wide


@triton.jit
def coded_gate_up_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    pairs_ptr,
    tile_experts_ptr,
    out_ptr,
    alpha,
    limit,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    expert = tl.load(tile_experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there, row = pair >= 0, pair // CHOSEN
    dims = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    wanted = dims < WIDTH
    first = expert * 2 * WIDTH
    LENGTH: tl.constexpr = HIDDEN // 2 if KIND == "q4" else HIDDEN
    gate = tl.zeros([ROWS, TILE], tl.float32)
    up = tl.zeros([ROWS, TILE], tl.float32)
    for start in range(0, LENGTH, STEP):
        at = start + tl.arange(0, STEP)
        # Columns of the low half bytes; those of the high ones, of the same group, are 16 further.
        columns = (at // 16) * 32 + at % 16 if KIND == "q4" else at
        gates = _load_codes(codes_ptr, first + dims, wanted, at, LENGTH)
        ups = _load_codes(codes_ptr, first + WIDTH + dims, wanted, at, LENGTH)
        for high in tl.static_range(2 if KIND == "q4" else 1):
            if KIND == "q4":
                gate_codes = gates >> 4 if high else gates & 15
                up_codes = ups >> 4 if high else ups & 15
            else:
                gate_codes, up_codes = gates, ups
            own = columns + 16 * high
            x = load_rows(x_ptr, row, own, there, HIDDEN)
            wide = _widen(gate_codes, scales_ptr, offsets_ptr, first + dims, wanted, own, HIDDEN, KIND, PART, OFFSETS)
            gate = tl.dot(x, wide.to(x.dtype), gate, input_precision="ieee")
            wide = _widen(
                up_codes, scales_ptr, offsets_ptr, first + WIDTH + dims, wanted, own, HIDDEN, KIND, PART, OFFSETS
            )
            up = tl.dot(x, wide.to(x.dtype), up, input_precision="ieee")
    if BIAS:
        gate = add_bias(gate, bias_ptr, first + dims, wanted)
        up = add_bias(up, bias_ptr, first + WIDTH + dims, wanted)
    store_rows(out_ptr, gated(gate, up, alpha, limit, CLAMP), pair, dims, there, wanted, WIDTH)


@triton.jit
def coded_down_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    pairs_ptr,
    tile_experts_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    expert = tl.load(tile_experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = pair >= 0
    dims = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    wanted = dims < HIDDEN
    first = expert * HIDDEN
    LENGTH: tl.constexpr = WIDTH // 2 if KIND == "q4" else WIDTH
    answer = tl.zeros([ROWS, TILE], tl.float32)
    for start in range(0, LENGTH, STEP):
        at = start + tl.arange(0, STEP)
        columns = (at // 16) * 32 + at % 16 if KIND == "q4" else at
        codes = _load_codes(codes_ptr, first + dims, wanted, at, LENGTH)
        for high in tl.static_range(2 if KIND == "q4" else 1):
            own_codes = (codes >> 4 if high else codes & 15) if KIND == "q4" else codes
            own = columns + 16 * high
            x = load_rows(x_ptr, pair, own, there, WIDTH)
            wide = _widen(own_codes, scales_ptr, offsets_ptr, first + dims, wanted, own, WIDTH, KIND, PART, OFFSETS)
            answer = tl.dot(x, wide.to(x.dtype), answer, input_precision="ieee")
    if BIAS:
        answer = add_bias(answer, bias_ptr, first + dims, wanted)
    store_rows(out_ptr, answer, pair, dims, there, wanted, HIDDEN)


@cache
def launch_config(device: torch.device, product: str, kind: str) -> KernelConfig:
    """Return how a product (gate_up, down) with experts in codes of this kind is launched on a device."""
    return config_for(ConfigKey(f"coded_{product}_experts", 0, 0, 0, kind, arch_of(device)))


def coded_gate_up(
    x: Tensor,
    stack: CodedStack,
    bias: Tensor | None,
    clamp: ClampedGate | None,
    tiled: tuple[Tensor, Tensor],
    out: Tensor,
    config: KernelConfig,
) -> None:
    """Write the gated products of `x` `[rows, hidden]` to `out` `[pairs, width]`. `tiled`: a plan in tiles of
    `config.rows`. Shapes have been checked."""
    pairs, width = out.shape
    coded_gate_up_kernel[(len(tiled[1]), triton.cdiv(width, config.tile))](
        x,
        *_parts(stack),
        bias,
        *tiled,
        out,
        *(clamp or (0.0, 0.0)),
        HIDDEN=x.shape[1],
        WIDTH=width,
        CHOSEN=pairs // len(x),
        BIAS=bias is not None,
        CLAMP=clamp is not None,
        **_options(stack, config),
    )


def coded_down(
    x: Tensor, stack: CodedStack, bias: Tensor | None, tiled: tuple[Tensor, Tensor], out: Tensor, config: KernelConfig
) -> None:
    """Write the products of `x` `[pairs, width]` to `out` `[pairs, hidden]`; see `coded_gate_up`."""
    coded_down_kernel[(len(tiled[1]), triton.cdiv(out.shape[1], config.tile))](
        x,
        *_parts(stack),
        bias,
        *tiled,
        out,
        HIDDEN=out.shape[1],
        WIDTH=x.shape[1],
        BIAS=bias is not None,
        **_options(stack, config),
    )


def _parts(stack: CodedStack) -> tuple[Tensor, Tensor, Tensor | None]:
    return stack.weight.codes, stack.weight.scales, stack.weight.offsets


def _options(stack: CodedStack, config: KernelConfig) -> dict[str, int | str | bool]:
    kind = stack.weight.kind
    return {
        "KIND": kind,
        "PART": GROUP // FACTORS[kind][0],
        "OFFSETS": stack.weight.offsets is not None,
        "ROWS": config.rows,
        "TILE": config.tile,
        "STEP": STEP,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }

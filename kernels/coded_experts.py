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

from kernels.coded_linear import STEP, load_weights
from kernels.coded_weight import CodedStack
from kernels.configs import ConfigKey, KernelConfig, config_for
from kernels.expert_tiles import add_bias, gated, load_rows, store_rows
from kernels.experts import ClampedGate
from kernels.launch import arch_of
from kernels.panels import FACTORS, GROUP


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
    gate = tl.zeros([TILE, ROWS], tl.float32)
    up = tl.zeros([TILE, ROWS], tl.float32)
    for start in range(0, HIDDEN, STEP):
        x = load_rows(x_ptr, row, start + tl.arange(0, STEP), there, HIDDEN)
        wide = load_weights(
            codes_ptr, scales_ptr, offsets_ptr, first + dims, wanted, start, HIDDEN, KIND, PART, OFFSETS, TILE, STEP
        )
        gate = tl.dot(wide.to(x.dtype), tl.trans(x), gate, input_precision="ieee")
        dims_up = first + WIDTH + dims
        wide = load_weights(
            codes_ptr, scales_ptr, offsets_ptr, dims_up, wanted, start, HIDDEN, KIND, PART, OFFSETS, TILE, STEP
        )
        up = tl.dot(wide.to(x.dtype), tl.trans(x), up, input_precision="ieee")
    gate, up = tl.trans(gate), tl.trans(up)
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
    answer = tl.zeros([TILE, ROWS], tl.float32)
    for start in range(0, WIDTH, STEP):
        x = load_rows(x_ptr, pair, start + tl.arange(0, STEP), there, WIDTH)
        wide = load_weights(
            codes_ptr, scales_ptr, offsets_ptr, first + dims, wanted, start, WIDTH, KIND, PART, OFFSETS, TILE, STEP
        )
        answer = tl.dot(wide.to(x.dtype), tl.trans(x), answer, input_precision="ieee")
    answer = tl.trans(answer)
    if BIAS:
        answer = add_bias(answer, bias_ptr, first + dims, wanted)
    store_rows(out_ptr, answer, pair, dims, there, wanted, HIDDEN)


@cache
def launch_config(device: torch.device, product: str, kind: str) -> KernelConfig:
    """Return how a product (gate_up, down) with experts in codes of this kind is launched on a device."""
    return config_for(ConfigKey(f"coded_{product}_experts", 0, 0, 0, kind, arch_of(device)))


def stages_of(config: KernelConfig, dtype: torch.dtype) -> int:
    """Return Triton's `num_stages`, one more than the steps whose tiles are under way. With rows of 32 bits it is one
    fewer: with codes of 8 bits, `coded_gate_up` would else take 1 KiB more than the 99 of sm_86, sm_89 and sm_120."""
    return max(1, config.stages - (dtype == torch.float32))


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
        **_options(stack, x.dtype, config),
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
        **_options(stack, x.dtype, config),
    )


def _parts(stack: CodedStack) -> tuple[Tensor, Tensor, Tensor | None]:
    return stack.weight.codes, stack.weight.scales, stack.weight.offsets


def _options(stack: CodedStack, dtype: torch.dtype, config: KernelConfig) -> dict[str, int | str | bool]:
    kind = stack.weight.kind
    return {
        "KIND": kind,
        "PART": GROUP // FACTORS[kind][0],
        "OFFSETS": stack.weight.offsets is not None,
        "ROWS": config.rows,
        "TILE": config.tile,
        "STEP": STEP,
        "num_warps": config.warps,
        "num_stages": stages_of(config, dtype),
    }

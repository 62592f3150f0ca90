# mypy: allow-untyped-defs, allow-incomplete-defs
"""A mixture of experts on a GPU: the products of all experts in one launch each (`kernels.experts` has the maths).

A pair is a row and one of its experts, numbered row * k + slot. `plan` sorts pairs by expert and fills each expert's
last tile of ROWS with -1, on the device, so that a step is recorded once and replayed whatever its rows choose:

    pairs    [tiles * ROWS + 1]   pairs by expert; -1 where there is none, the last without meaning
    experts  [tiles]              the expert of each tile; -1 past the last

    gate_up_kernel   pairs' rows x [gate | up] of the tile's expert -> gated `[pairs, width]`
    down_kernel      gated x down -> answers `[pairs, hidden]`
    combine_kernel   weights * answers, slot after slot -> `[rows, hidden]`; nothing is added atomically

Every step has tiles of the same height and the same chain over columns, so a row's bits do not depend on who else chose
its experts. Where weights are codes, `kernels.coded_experts` has both products. Specification:
`kernels.reference_experts`. The plan is that of vLLM's and MegaBlocks' (arXiv 2211.15841)
padded groups.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.coded_experts import coded_down, coded_gate_up, launch_config
from kernels.coded_weight import CodedStack
from kernels.configs import ConfigKey, KernelConfig, config_for
from kernels.expert_tiles import add_bias, gated, load_rows, store_rows
from kernels.experts import ClampedGate, ExpertWeights, RoutedRows, Routing
from kernels.launch import check_interpretable
from kernels.panels import PanelStack

COLUMNS = 64
"""Columns that a product takes in one step, of 16 bits; of 32 half as many."""


@triton.jit
def route_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    EXPERTS: tl.constexpr,
    PAD: tl.constexpr,
    CHOSEN: tl.constexpr,
    OVER_CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, PAD)
    logits = tl.load(logits_ptr + row * EXPERTS + numbers, mask=numbers < EXPERTS, other=float("-inf"))
    shares = tl.exp(logits - tl.max(logits, 0))
    # A logit may be -inf, or no number: what may still be chosen is known by its place alone.
    left = numbers < EXPERTS
    slots = tl.full([PAD], CHOSEN, tl.int32)
    for slot in tl.static_range(CHOSEN):
        most = tl.max(tl.where(left, logits, float("-inf")), 0)
        best = tl.min(tl.where(left & (logits == most), numbers, PAD), 0)
        best = tl.where(best < PAD, best, tl.min(tl.where(left, numbers, PAD), 0))
        slots = tl.where(numbers == best, slot, slots)
        left = left & (numbers != best)
    chosen = slots < CHOSEN
    whole = tl.sum(shares, 0)
    of_chosen = tl.sum(tl.where(chosen, shares, 0.0), 0)
    total = of_chosen if OVER_CHOSEN or NORMALISE else whole
    tl.store(experts_ptr + row * CHOSEN + slots, numbers, mask=chosen)
    tl.store(weights_ptr + row * CHOSEN + slots, shares / total, mask=chosen)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(experts_ptr, counts_ptr, pairs, SCANNED: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.zeros([SCANNED], tl.int32)
    for start in range(0, pairs, SCANNED):
        at = start + tl.arange(0, SCANNED)
        found += (tl.load(experts_ptr + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["pairs", "tiles"])
def place_kernel(
    experts_ptr,
    counts_ptr,
    pairs_ptr,
    tile_experts_ptr,
    pairs,
    tiles,
    EXPERTS: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    SCANNED: tl.constexpr,
):
    expert = tl.program_id(0)
    numbers = tl.arange(0, PAD)
    counts = tl.load(counts_ptr + numbers, mask=numbers < EXPERTS, other=0)
    needed = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(numbers < expert, needed, 0), 0)
    end = first + tl.sum(tl.where(numbers == expert, needed, 0), 0)
    count = tl.sum(tl.where(numbers == expert, counts, 0), 0)
    ahead = tl.arange(0, SCANNED)
    for start in range(first, end, SCANNED):
        tl.store(tile_experts_ptr + start + ahead, expert, mask=start + ahead < end)
    if expert == EXPERTS - 1:
        for start in range(end, tiles, SCANNED):
            tl.store(tile_experts_ptr + start + ahead, -1, mask=start + ahead < tiles)
    rest = first * ROWS + count + tl.arange(0, ROWS)
    tl.store(pairs_ptr + rest, -1, mask=rest < end * ROWS)
    seen = first * ROWS
    for start in range(0, pairs, SCANNED):
        at = start + ahead
        mine = (tl.load(experts_ptr + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
        # Other experts' pairs go where nobody looks.
        tl.store(pairs_ptr + tl.where(mine > 0, seen + tl.cumsum(mine, 0) - 1, tiles * ROWS), at)
        seen += tl.sum(mine, 0)


@triton.jit
def gate_up_kernel(
    x_ptr,
    weights_ptr,
    bias_ptr,
    pairs_ptr,
    tile_experts_ptr,
    out_ptr,
    alpha,
    limit,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    expert = tl.load(tile_experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there, row = pair >= 0, pair // CHOSEN
    dims = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = dims < WIDTH
    first = expert * 2 * WIDTH
    gate = tl.zeros([ROWS, TILE], tl.float32)
    up = tl.zeros([ROWS, TILE], tl.float32)
    for start in range(0, HIDDEN, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = load_rows(x_ptr, row, columns, there, HIDDEN)
        gate_tile = load_rows(weights_ptr, first + dims, columns, inside, HIDDEN)
        up_tile = load_rows(weights_ptr, first + WIDTH + dims, columns, inside, HIDDEN)
        gate = tl.dot(x, tl.trans(gate_tile), gate, input_precision="ieee")
        up = tl.dot(x, tl.trans(up_tile), up, input_precision="ieee")
    if BIAS:
        gate = add_bias(gate, bias_ptr, first + dims, inside)
        up = add_bias(up, bias_ptr, first + WIDTH + dims, inside)
    store_rows(out_ptr, gated(gate, up, alpha, limit, CLAMP), pair, dims, there, inside, WIDTH)


@triton.jit
def down_kernel(
    x_ptr,
    weights_ptr,
    bias_ptr,
    pairs_ptr,
    tile_experts_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    expert = tl.load(tile_experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = pair >= 0
    dims = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = dims < HIDDEN
    first = expert * HIDDEN
    answer = tl.zeros([ROWS, TILE], tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = load_rows(x_ptr, pair, columns, there, WIDTH)
        down = load_rows(weights_ptr, first + dims, columns, inside, WIDTH)
        answer = tl.dot(x, tl.trans(down), answer, input_precision="ieee")
    if BIAS:
        answer = add_bias(answer, bias_ptr, first + dims, inside)
    store_rows(out_ptr, answer, pair, dims, there, inside, HIDDEN)


@triton.jit
def combine_kernel(
    answers_ptr, weights_ptr, out_ptr, HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = dims < HIDDEN
    total = tl.zeros([TILE], tl.float32)
    for slot in tl.static_range(CHOSEN):
        pair = row * CHOSEN + slot
        answer = tl.load(answers_ptr + pair * HIDDEN + dims, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * answer
    tl.store(out_ptr + row * HIDDEN + dims, total.to(out_ptr.dtype.element_ty), mask=inside)


class TilePlan(NamedTuple):
    """Pairs by expert, and each tile's expert, on the device; see above. int32."""

    pairs: Tensor
    experts: Tensor


class ExpertConfigs(NamedTuple):
    """How the kernels of a mixture are launched. The products' tiles have the same `rows`."""

    route: KernelConfig
    plan: KernelConfig
    gate_up: KernelConfig
    down: KernelConfig
    combine: KernelConfig


def expert_configs(dtype: str, arch: int) -> ExpertConfigs:
    """Look up how a model's mixtures are launched; `dtype` and `arch` as in `ConfigKey`."""
    names = ("route", "float32"), ("plan", "int32"), ("gate_up", dtype), ("down", dtype), ("combine", dtype)
    return ExpertConfigs(*(config_for(ConfigKey(f"{name}_experts", 0, 0, 0, kind, arch)) for name, kind in names))


def route(logits: Tensor, routing: Routing, config: KernelConfig) -> RoutedRows:
    """Choose each row's experts by `logits` `[rows, experts]`, float32, contiguous. Raises ValueError for what is not,
    and where there are fewer experts than are to be chosen."""
    rows, count = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not 1 <= routing.chosen <= count:
        raise ValueError(f"{routing.chosen} experts cannot be chosen by {logits.dtype} {tuple(logits.shape)}")
    experts = torch.empty(rows, routing.chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, routing.chosen, dtype=torch.float32, device=logits.device)
    if rows:
        route_kernel[(rows,)](
            logits,
            experts,
            weights,
            EXPERTS=count,
            PAD=triton.next_power_of_2(count),
            CHOSEN=routing.chosen,
            OVER_CHOSEN=routing.over_chosen,
            NORMALISE=routing.normalise,
            num_warps=config.warps,
            num_stages=config.stages,
        )
    return RoutedRows(experts, weights)


def tiles_for(pairs: int, experts: int, rows: int) -> int:
    """Return the most tiles of `rows` that so many pairs can take: each expert's last may have one pair only."""
    return min(pairs, pairs // rows + min(experts, pairs))


def plan(chosen: Tensor, experts: int, rows: int, config: KernelConfig) -> TilePlan:
    """Sort the pairs of `chosen` `[rows of the step, k]`, int32, by expert, into tiles of `rows`."""
    pairs, device = chosen.numel(), chosen.device
    tiles = tiles_for(pairs, experts, rows)
    made = TilePlan(
        torch.empty(tiles * rows + 1, dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
    )
    if not pairs:
        return made
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    options = {"SCANNED": config.tile, "num_warps": config.warps, "num_stages": config.stages}
    count_kernel[(experts,)](chosen, counts, pairs, **options)
    place_kernel[(experts,)](
        chosen,
        counts,
        *made,
        pairs,
        tiles,
        EXPERTS=experts,
        PAD=triton.next_power_of_2(experts),
        ROWS=rows,
        **options,
    )
    return made


def mix(x: Tensor, choice: RoutedRows, weights: ExpertWeights, configs: ExpertConfigs) -> Tensor:
    """Send `x` `[rows, hidden]`, contiguous, through the chosen experts; returns the like. Nothing waits for the
    device, and what is launched depends on shapes alone. Raises ValueError where shapes do not fit."""
    gate_up, down = weights.gate_up, weights.down
    if isinstance(gate_up, PanelStack) or isinstance(down, PanelStack):
        raise ValueError("the GPU's experts are plain weights, or codes")
    (rows, hidden), (_, chosen) = x.shape, choice.experts.shape
    (experts, both, _), width = gate_up.shape, gate_up.shape[1] // 2
    fits = gate_up.shape == (experts, both, hidden) and down.shape == (experts, hidden, width) and both == 2 * width
    every = (x, *_tensors(gate_up), *_tensors(down), *choice)
    if not fits or len(choice.experts) != rows or not all(tensor.is_contiguous() for tensor in every):
        raise ValueError(
            f"{tuple(gate_up.shape)} and {tuple(down.shape)} are no experts for {tuple(x.shape)}, or not contiguous"
        )
    of_gate_up, of_down = _launched(gate_up, "gate_up", configs.gate_up), _launched(down, "down", configs.down)
    # A plan has tiles of one height: beside codes, plain weights are multiplied in theirs.
    if isinstance(gate_up, Tensor) and not isinstance(down, Tensor):
        of_gate_up = replace(of_gate_up, rows=of_down.rows)
    elif isinstance(down, Tensor) and not isinstance(gate_up, Tensor):
        of_down = replace(of_down, rows=of_gate_up.rows)
    if of_gate_up.rows != of_down.rows:
        raise ValueError(f"tiles of {of_gate_up.rows} and {of_down.rows} rows for one plan")
    check_interpretable(x, *(item for item in (gate_up, down) if isinstance(item, Tensor)))
    if not rows:
        return torch.empty_like(x)
    tiled = plan(choice.experts, experts, of_gate_up.rows, configs.plan)
    inner = torch.empty(rows * chosen, width, dtype=x.dtype, device=x.device)
    answers = torch.empty(rows * chosen, hidden, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    if isinstance(gate_up, Tensor):
        _gate_up(x, gate_up, weights.gate_up_bias, weights.clamp, tiled, inner, of_gate_up)
    else:
        coded_gate_up(x, gate_up, weights.gate_up_bias, weights.clamp, tiled, inner, of_gate_up)
    if isinstance(down, Tensor):
        _down(inner, down, weights.down_bias, tiled, answers, of_down)
    else:
        coded_down(inner, down, weights.down_bias, tiled, answers, of_down)
    config = configs.combine
    combine_kernel[(rows, triton.cdiv(hidden, config.tile))](
        answers,
        choice.weights,
        out,
        HIDDEN=hidden,
        CHOSEN=chosen,
        TILE=config.tile,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def _tensors(stack: Tensor | CodedStack) -> tuple[Tensor, ...]:
    if isinstance(stack, Tensor):
        return (stack,)
    weight = stack.weight
    return (weight.codes, weight.scales) if weight.offsets is None else (weight.codes, weight.scales, weight.offsets)


def _launched(stack: Tensor | CodedStack, product: str, config: KernelConfig) -> KernelConfig:
    """Return how a product is launched: as it is given for plain weights, by the table for codes."""
    if isinstance(stack, Tensor):
        return config
    return launch_config(stack.weight.codes.device, product, stack.weight.kind)


def _gate_up(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    clamp: ClampedGate | None,
    tiled: TilePlan,
    out: Tensor,
    config: KernelConfig,
) -> None:
    pairs, width = out.shape
    gate_up_kernel[(len(tiled.experts), triton.cdiv(width, config.tile))](
        x,
        weights,
        weights if bias is None else bias,
        *tiled,
        out,
        *(clamp or (0.0, 0.0)),
        HIDDEN=x.shape[1],
        WIDTH=width,
        CHOSEN=pairs // len(x),
        BIAS=bias is not None,
        CLAMP=clamp is not None,
        ROWS=config.rows,
        TILE=config.tile,
        COLUMNS=_columns(x),
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _down(
    x: Tensor, weights: Tensor, bias: Tensor | None, tiled: TilePlan, out: Tensor, config: KernelConfig
) -> None:
    down_kernel[(len(tiled.experts), triton.cdiv(out.shape[1], config.tile))](
        x,
        weights,
        weights if bias is None else bias,
        *tiled,
        out,
        HIDDEN=out.shape[1],
        WIDTH=x.shape[1],
        BIAS=bias is not None,
        ROWS=config.rows,
        TILE=config.tile,
        COLUMNS=_columns(x),
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _columns(x: Tensor) -> int:
    return COLUMNS if x.element_size() == 2 else COLUMNS // 2

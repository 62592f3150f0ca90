"""Measures products with quantized weights, and mixtures of experts, each beside what a model in 16 bits would do.

A product is one of a model of 8 billion parameters, from 4,096 columns to the gate's 14,336 rows; a mixture has 128
experts, of which a row takes 8 (as Qwen3-30B-A3B). `bytes` are what has to be read once: of weights, or of the chosen
experts' weights.
"""

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu.card import Card, Line
from kernels.coded_linear import coded_linear, launch_configs
from kernels.coded_weight import CodedStack, CodedWeight
from kernels.experts import ExpertWeights, RoutedRows, Stack
from kernels.grouped_experts import expert_configs, mix
from kernels.panels import FACTORS, GROUP, Kind, PanelStack
from kernels.scaled_linear import BLOCK, Float8Error, Float8Weight, find_way, scaled_linear

KINDS: tuple[Kind, ...] = ("q4", "q8", "f8")
ROWS = (1, 8, 64, 512)
COLUMNS, WIDTH = 4096, 14336
EXPERTS, CHOSEN, HIDDEN, EXPERT_WIDTH = 128, 8, 2048, 768


def products(card: Card) -> Iterator[Line]:
    """Measure products of every kind of codes, and those of 8-bit floats, for a few and for many rows."""
    width, columns = _groups(card, WIDTH), _groups(card, COLUMNS)
    plain = card.random(width, columns)
    codes = {kind: coded(card, kind, width, columns) for kind in KINDS}
    for rows in _rows(card):
        x = card.random(rows, columns)
        theirs = card.timer.seconds(lambda x=x: linear(x, plain))  # type: ignore[misc]
        yield {
            "what": f"torch, {card.dtype}".replace("torch.", ""),
            "rows": rows,
            "us": theirs * 1e6,
            "bytes": plain.nbytes,
        }
        for kind, weight in codes.items():
            configs = launch_configs(card.device, kind)
            taken = card.timer.seconds(lambda x=x, w=weight, c=configs: coded_linear(x, w, None, c))  # type: ignore[misc]
            yield _line(kind, rows, taken, theirs, weight.nbytes)
    try:
        way = find_way(card.device, card.dtype)
    except Float8Error as error:
        yield {"what": "W8A8", "refused": str(error)}
        return
    for what, parts in (("W8A8, scales of rows", 1), ("W8A8, of blocks", max(1, columns // BLOCK))):
        scales = torch.ones(parts, width, dtype=torch.float32, device=card.device)
        weight8 = Float8Weight(plain.to(torch.float8_e4m3fn), scales, "unit" if parts > 1 and way == "rows" else way)
        for rows in _rows(card):
            x = card.random(rows, columns)
            theirs = card.timer.seconds(lambda x=x: linear(x, plain))  # type: ignore[misc]
            taken = card.timer.seconds(lambda x=x, w=weight8: scaled_linear(x, w))  # type: ignore[misc]
            yield _line(what, rows, taken, theirs, weight8.nbytes)


def experts(card: Card) -> Iterator[Line]:
    """Measure a layer's mixture, in 16 bits and as codes."""
    hidden, width = _groups(card, HIDDEN), _groups(card, EXPERT_WIDTH)
    count = max(CHOSEN, card.sizes.tokens(EXPERTS))
    plain = ExpertWeights(card.random(count, 2 * width, hidden), card.random(count, hidden, width))
    in_16_bits: dict[int, float] = {}
    coded_ones = ((kind, _coded_experts(card, kind, count, hidden, width)) for kind in KINDS)
    for what, weights in (("16 bits", plain), *coded_ones):
        for rows in _rows(card):
            x, choice = card.random(rows, hidden), chosen(card, rows, count)
            taken = card.timer.seconds(mixture(card, x, choice, weights))
            read = int(choice.experts.unique().numel()) * (_nbytes(weights.gate_up) + _nbytes(weights.down)) // count
            yield _line(what, rows, taken, in_16_bits.setdefault(rows, taken), read)


def mixture(card: Card, x: Tensor, choice: RoutedRows, weights: ExpertWeights) -> Callable[[], Tensor]:
    """Return a function that sends `x` through its experts."""
    configs = expert_configs(str(card.dtype).removeprefix("torch."), card.arch)
    return lambda: mix(x, choice, weights, configs)


def chosen(card: Card, rows: int, count: int) -> RoutedRows:
    """Choose each row's experts evenly, as a router that was trained for balance does."""
    draw = Random(rows)
    numbers = [draw.sample(range(count), CHOSEN) for _ in range(rows)]
    weights = torch.full((rows, CHOSEN), 1 / CHOSEN, dtype=torch.float32, device=card.device)
    return RoutedRows(torch.tensor(numbers, dtype=torch.int32).to(card.device), weights)


def coded(card: Card, kind: Kind, rows: int, columns: int) -> CodedWeight:
    """Return a weight of random codes, none of them a NaN."""
    codes = torch.randint(
        0, 120, (rows, columns // 2 if kind == "q4" else columns), dtype=torch.uint8, device=card.device
    )
    parts, factors = FACTORS[kind]
    scales = torch.full((rows, columns // GROUP * parts), 2.0**-8, dtype=torch.float32, device=card.device)
    offsets = torch.zeros_like(scales) if factors == 2 else None
    return CodedWeight(kind, codes if kind in ("q4", "f8") else codes.view(torch.int8), scales, offsets)


def _coded_experts(card: Card, kind: Kind, count: int, hidden: int, width: int) -> ExpertWeights:
    gate_up = CodedStack(count, coded(card, kind, count * 2 * width, hidden))
    return ExpertWeights(gate_up, CodedStack(count, coded(card, kind, count * hidden, width)))


def _rows(card: Card) -> list[int]:
    return sorted({card.sizes.tokens(rows) for rows in ROWS})


def _groups(card: Card, count: int) -> int:
    """Return a length of this card's sizes, in whole groups of columns."""
    return max(1, card.sizes.tokens(count) // GROUP) * GROUP


def _nbytes(stack: Stack) -> int:
    assert not isinstance(stack, PanelStack)  # those are the CPU's
    return stack.nbytes


def _line(what: str, rows: int, taken_s: float, plain_s: float, nbytes: int) -> Line:
    return {
        "what": what,
        "rows": rows,
        "us": taken_s * 1e6,
        "bytes": nbytes,
        "tb_per_s": nbytes / taken_s / 1e12,
        "times_16_bit_speed": plain_s / taken_s,
    }

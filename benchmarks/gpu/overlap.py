"""Measures what copies of KV blocks cost the decode step that they run beside (K6).

**The step**: attention and matrix products of an 8B's layers at E1's batch, recorded as one graph. **The copies**:
pieces of 32 scattered blocks, digested on the way, on a worker's grid and on a stream of their own; each is followed by
a pause (a kernel of one thread), which holds them to a rate.

**The rate** counts bytes read and bytes written, as `copy_rate` does. A migration of 200 GB/s between two cards reads
as much at one of them and writes as much at the other; a copy within one card does both. What the copies take of the
card's bandwidth, a step that is bound by bandwidth must lose: that share is the bound beside the goal.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

import torch

from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.decode import attention_step
from kernels.block_copy import PROGRAMS, as_words, copy_blocks
from kernels.block_shape import BlockShape
from kernels.configs import ConfigKey, config_for
from kernels.pool import KVPool

RATES = (200e9, 400e9)
CONTEXT, BLOCK = 1536, 64
LAYERS = 8
"""Layers that there is memory for; a step goes through them as often as the model has layers."""
INTERMEDIATE = 14336
PIECE_BLOCKS, PIECES = 32, 4
STEPS = 10
TRIES = 6
CLOSE = 0.05
"""How far off the wanted rate a run may be."""
CYCLES = 5_000_000

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class StepAndCopies:
    """Seconds of a step alone, of a step beside copies, and from one piece of copies to the next meanwhile."""

    alone_s: float
    beside_s: float
    period_s: float


class Overlap(Protocol):
    def alone_s(self) -> float:
        """Time a step."""

    def beside(self, pause_s: float) -> tuple[float, float]:
        """Time a step beside copies with such pauses, and from one piece to the next meanwhile."""


def beside(card: Card) -> Iterator[Line]:
    """Return a line for each rate; `gb_per_s` is what was reached."""
    step, step_bytes = decode_step(card)
    copies, piece_bytes = pieces(card)
    kind = DryOverlap if card.device.type == "cpu" else CudaOverlap
    overlap: Overlap = kind(card.device, step, copies)
    for rate in RATES:
        found = held_to(overlap, piece_bytes / rate, card.sizes.rounds)
        yield {
            "id": "K6",
            "what": f"beside {rate / 1e9:.0f} GB/s",
            "alone_us": found.alone_s * 1e6,
            "beside_us": found.beside_s * 1e6,
            "times_alone": found.beside_s / found.alone_s,
            "gb_per_s": piece_bytes / found.period_s / 1e9,
            "step_bytes": step_bytes,
            "programs": PROGRAMS,
        }


def held_to(overlap: Overlap, period_s: float, rounds: int) -> StepAndCopies:
    """Return medians of `rounds`, with a piece every `period_s` or, where copies are slower, as often as they can."""
    pause_s = period_s
    for _ in range(TRIES):
        _, seen_s = overlap.beside(pause_s)
        if abs(seen_s / period_s - 1) <= CLOSE or (pause_s == 0 and seen_s > period_s):
            break
        pause_s = max(0.0, pause_s + period_s - seen_s)
    # In turns, so that a clock that changes changes both.
    found = [(overlap.alone_s(), *overlap.beside(pause_s)) for _ in range(rounds)]
    return StepAndCopies(*(statistics.median(column) for column in zip(*found, strict=True)))


def decode_step(card: Card) -> tuple[Work, int]:
    """Build a step's attention and products; also returns how many bytes it reads. The products' results go nowhere:
    what counts is what is read."""
    size = card.sizes
    layers = min(LAYERS, size.layers)
    batch, length = 2 * size.batch, size.tokens(CONTEXT)
    per_row = -(-length // BLOCK)
    order = list(range(batch * per_row))
    Random(0).shuffle(order)
    tables = [order[at : at + per_row] for at in range(0, len(order), per_row)]
    pool = KVPool(card.random(len(order), size.kv_heads, layers, 2, BLOCK, size.head_dim))
    q = card.random(batch, size.heads, size.head_dim)
    attend = [
        attention_step(card, q, pool, [length] * batch, tables, layer=layer) for layer in range(layers)
    ]
    hidden, inner = size.heads * size.head_dim, size.tokens(INTERMEDIATE)
    key_width = size.kv_heads * size.head_dim
    shapes = [
        (hidden, hidden + 2 * key_width),
        (hidden, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    ]
    weights = [[card.random(*shape).mul_(0.02) for shape in shapes] for _ in range(layers)]
    rows = q.view(batch, hidden)

    def step() -> None:
        for _ in range(size.layers // layers):
            for attention, (into, out, up, down) in zip(attend, weights, strict=True):
                torch.mm(rows, into)
                found = torch.mm(attention().view(batch, hidden), out)
                torch.mm(torch.mm(found, up)[:, :inner], down)

    values = 2 * batch * length * key_width + sum(wide * high for wide, high in shapes)
    return step, values * card.dtype.itemsize * layers * (size.layers // layers)


def pieces(card: Card) -> tuple[list[Work], int]:
    """Build copies of different blocks; also returns how many bytes each of them reads and writes."""
    size = card.sizes
    shape = BlockShape(size.layers, 16, size.head_dim * card.dtype.itemsize)
    each = size.tokens(PIECE_BLOCKS)
    count = each * PIECES
    source = as_words(card.random(count, size.kv_heads, shape.words * 8 // card.dtype.itemsize))
    target = torch.empty_like(source)
    config = config_for(ConfigKey("copy_blocks", size.head_dim, 0, BLOCK, "bfloat16", card.arch))
    tokens = card.ids([16] * each)
    draw = Random(0)
    orders = [draw.sample(range(count), count) for _ in range(2)]
    made: list[Work] = []
    for at in range(0, count, each):
        from_, to = (card.ids(order[at : at + each]) for order in orders)
        made.append(partial(copy_blocks, source, target, from_, to, shape, config, tokens=tokens))
    return made, 2 * source.nbytes // PIECES


class CudaOverlap:
    def __init__(self, device: torch.device, step: Work, copies: Sequence[Work]) -> None:
        self._copies = copies
        self._main = torch.cuda.current_stream(device)
        self._side = torch.cuda.Stream(device)
        self._paced: dict[int, torch.cuda.CUDAGraph] = {}
        self._step = _recorded([step])
        self._alone_s = self.alone_s()
        self._piece_s = self._took_s(_recorded(copies).replay) / len(copies)
        self._cycle_s = self._took_s(lambda: torch.cuda._sleep(CYCLES)) / CYCLES  # type: ignore[no-untyped-call]

    def alone_s(self) -> float:
        return self._took_s(self._steps) / STEPS

    def beside(self, pause_s: float) -> tuple[float, float]:
        graph = self._with_pauses(round(pause_s / self._cycle_s))
        turn_s = len(self._copies) * (self._piece_s + pause_s)
        turns = 2 + math.ceil(2 * STEPS * self._alone_s / turn_s)
        for _ in range(TRIES):
            times_s = self._together(graph, turns)
            if times_s is not None:
                began_s, ended_s, turned_s = times_s
                inside = [at for at in turned_s if began_s <= at <= ended_s]
                if len(inside) < 2:
                    raise RuntimeError(f"steps of {ended_s - began_s:.4f} s are over before two turns of copies")
                pieces = (len(inside) - 1) * len(self._copies)
                return (ended_s - began_s) / STEPS, (inside[-1] - inside[0]) / pieces
            turns *= 2
        raise RuntimeError("the copies were over before the steps")

    def _together(self, graph: torch.cuda.CUDAGraph, turns: int) -> tuple[float, float, list[float]] | None:
        """Return when the steps began and ended, and when each turn of copies ended, all in seconds since one moment;
        None if the copies ended first."""
        zero, began, ended, *turned = (torch.cuda.Event(enable_timing=True) for _ in range(3 + turns))
        torch.cuda.synchronize()
        zero.record(self._main)
        self._side.wait_event(zero)
        with torch.cuda.stream(self._side):
            for event in turned:
                graph.replay()
                event.record(self._side)
        # The first turn is over before the first step begins.
        self._main.wait_event(turned[0])
        began.record(self._main)
        self._steps()
        ended.record(self._main)
        torch.cuda.synchronize()
        began_s, ended_s, *turned_s = (zero.elapsed_time(at) / 1e3 for at in (began, ended, *turned))
        return (began_s, ended_s, turned_s) if ended_s < turned_s[-1] else None

    def _steps(self) -> None:
        for _ in range(STEPS):
            self._step.replay()

    def _with_pauses(self, cycles: int) -> torch.cuda.CUDAGraph:
        if cycles not in self._paced:
            pause: Work = partial(torch.cuda._sleep, cycles)
            works = [work for copy in self._copies for work in ((copy, pause) if cycles else (copy,))]
            self._paced[cycles] = _recorded(works)
        return self._paced[cycles]

    def _took_s(self, work: Work) -> float:
        """Time it after it has been done once, which raises the clock."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


def _recorded(works: Sequence[Work]) -> torch.cuda.CUDAGraph:
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    return graph


class DryOverlap:
    """Runs steps and copies one after the other."""

    def __init__(self, device: torch.device, step: Work, copies: Sequence[Work]) -> None:
        self._step = step
        self._copy = copies[0]

    def alone_s(self) -> float:
        return _clocked_s(self._step)

    def beside(self, pause_s: float) -> tuple[float, float]:
        copied_s = _clocked_s(self._copy)
        return copied_s + self.alone_s(), copied_s


def _clocked_s(work: Work) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s

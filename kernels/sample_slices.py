# mypy: allow-untyped-defs, allow-incomplete-defs
"""What several programs find out about a row of logits before one of them draws (`kernels.sample`).

Each program has a slice of the vocabulary. Three launches, of which the last two leave greedy rows alone:

    tops      the largest logit of each slice, and where it is first
    weigh     the weight of each slice; where a filter is on, how many of its logits lie in each of 256 bins
    gather    where a filter is on: the ids in the bins that may be drawn from, in vocabulary order

A bin is the first 8 bits of the gap to the row's largest logit that tell: three of its exponent and five of its
fraction, from 1/8 to 32. The counts of bins bound what they weigh, since a weight follows from the gap: by them top-k
knows the bin of the k-th logit, and top-p the last bin that may be needed to reach its share. What they leave is exact
and mostly short; where logits are nearly equal, it is the whole vocabulary.

Weights are integers, `exp((logit - top) / temperature)` in units of 1 / ONE: their sums do not depend on how a row is
divided.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import KernelConfig

BINS = 256
FIRST_BIN = 124 << 5
"""The bin of 2^-3, in the numbers of all of a float's exponents and five bits of its fraction."""
SLACK = 1e-6
"""More than by what a gap is rounded, relative to it."""


@triton.jit
def ordered(x):
    """Map float32 to int64 in [0, 2^32) of the same order; both zeros are one number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def weight_of(x, top, temperature):
    """Return the weights of float32 logits, float64, the largest 1."""
    return tl.exp((x.to(tl.float64) - top.to(tl.float64)) / temperature)


@triton.jit
def units(weight, ONE: tl.constexpr):
    """Return float64 weights as integers."""
    return (weight * ONE + 0.5).to(tl.int64)


@triton.jit
def _bin(x, top, BINS: tl.constexpr, FIRST_BIN: tl.constexpr):
    gap = (top - x).to(tl.int32, bitcast=True) >> 18
    return tl.minimum(tl.maximum(gap - FIRST_BIN, 0), BINS - 1)


@triton.jit
def _top(tops_ptr, row, SLICES: tl.constexpr):
    return tl.max(tl.load(tops_ptr + row * SLICES + tl.arange(0, SLICES)), 0)


@triton.jit
def tops_kernel(
    logits_ptr,
    tops_ptr,
    bests_ptr,
    VOCAB: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    logits = logits_ptr + row.to(tl.int64) * VOCAB
    top = tl.full([], float("-inf"), dtype=tl.float32)
    best = tl.full([], VOCAB, dtype=tl.int32)
    for start in range(part * SLICE, part * SLICE + SLICE, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
        highest = tl.max(x, 0)
        first = tl.min(tl.where((x == highest) & (at < VOCAB), at, VOCAB), 0)
        best = tl.where(highest > top, first, best)
        top = tl.maximum(top, highest)
    tl.store(tops_ptr + row * SLICES + part, top)
    tl.store(bests_ptr + row * SLICES + part, best)


# Each row's parameters are read one at a time, wherever a step's tensor of them lies: no reason to compile again.
_FILTERS = ("temperature_ptr", "top_k_ptr", "top_p_ptr")


@triton.jit(do_not_specialize=(*_FILTERS, "min_p_ptr"))
def weigh_kernel(
    logits_ptr,
    tops_ptr,
    masses_ptr,
    counts_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    VOCAB: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    BINS: tl.constexpr,
    FIRST_BIN: tl.constexpr,
    ONE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Without top-k and top-p, what min-p leaves out weighs nothing; with them, it is left out when all else is."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        return
    top_k = tl.load(top_k_ptr + row)
    filtered = ((top_k > 0) & (top_k < VOCAB)) | (tl.load(top_p_ptr + row) < 1.0)
    least = tl.where(filtered, 0.0, tl.load(min_p_ptr + row))
    logits = logits_ptr + row.to(tl.int64) * VOCAB
    top = _top(tops_ptr, row, SLICES)
    mass = tl.zeros([], dtype=tl.int64)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for start in range(part * SLICE, part * SLICE + SLICE, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < VOCAB
        x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
        weight = weight_of(x, top, temperature)
        mass += tl.sum(tl.where(inside & (weight >= least), units(weight, ONE), 0), 0)
        if filtered:
            counts += tl.histogram(_bin(x, top, BINS, FIRST_BIN), BINS, mask=inside)
    tl.store(masses_ptr + row * SLICES + part, mass)
    if filtered:
        tl.store(counts_ptr + (row * SLICES + part) * BINS + tl.arange(0, BINS), counts)


@triton.jit
def _last_bin(counts, total, temperature, top_k, top_p, VOCAB, BINS, FIRST_BIN, SLACK, ONE):
    """Return the last bin that may be drawn from: that of the k-th logit, or the first with which the share of top-p is
    reached for certain. `counts` of all of the row; `total`, what it weighs."""
    numbers = tl.arange(0, BINS)
    if (top_k > 0) & (top_k < VOCAB):
        last = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0)
    else:
        # A bin's logits lie between two gaps, so they weigh between these two; the last one has no other end.
        nearest = ((numbers + FIRST_BIN) << 18).to(tl.float32, bitcast=True).to(tl.float64)
        nearest = tl.where(numbers == 0, 0.0, nearest) * (1.0 - SLACK)
        farthest = ((numbers + FIRST_BIN + 1) << 18).to(tl.float32, bitcast=True).to(tl.float64) * (1.0 + SLACK)
        many = counts.to(tl.float64)
        most = many * (tl.exp(-nearest / temperature) * ONE + 1.0)
        fewest = tl.where(numbers < BINS - 1, many * (tl.exp(-farthest / temperature) * ONE - 1.0), 0.0)
        beyond = tl.sum(most, 0) - tl.cumsum(most, 0)
        certain = tl.maximum(tl.cumsum(tl.maximum(fewest, 0.0), 0), total * (1.0 - 1e-12) - beyond)
        last = tl.sum((certain < top_p * total).to(tl.int32), 0)
    return tl.minimum(last, BINS - 1)


@triton.jit(do_not_specialize=_FILTERS)
def gather_kernel(
    logits_ptr,
    tops_ptr,
    masses_ptr,
    counts_ptr,
    listed_ptr,
    ids_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    VOCAB: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    BINS: tl.constexpr,
    FIRST_BIN: tl.constexpr,
    SLACK: tl.constexpr,
    ONE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """STEP logits at a time: `gather_step`."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    filtered = ((top_k > 0) & (top_k < VOCAB)) | (top_p < 1.0)
    if (temperature == 0.0) | (not filtered):
        return
    parts = tl.arange(0, SLICES)
    numbers = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + (row * SLICES + parts)[:, None] * BINS + numbers[None, :])
    total = tl.sum(tl.load(masses_ptr + row * SLICES + parts), 0).to(tl.float64)
    in_all = tl.sum(counts, 0)
    last = _last_bin(in_all, total, temperature, top_k, top_p, VOCAB, BINS, FIRST_BIN, SLACK, ONE)
    # Where the slice's own begin, behind those of the slices before it.
    in_each = tl.sum(tl.where(numbers[None, :] <= last, counts, 0), 1)
    place = tl.sum(tl.where(parts < part, in_each, 0), 0)
    if part == 0:
        tl.store(listed_ptr + row, tl.sum(in_each, 0))
    if tl.sum(tl.where(parts == part, in_each, 0), 0) == 0:
        return
    logits = logits_ptr + row.to(tl.int64) * VOCAB
    ids = ids_ptr + row.to(tl.int64) * VOCAB
    top = _top(tops_ptr, row, SLICES)
    for start in range(part * SLICE, part * SLICE + SLICE, STEP):
        at = start + tl.arange(0, STEP)
        inside = at < VOCAB
        x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
        kept = (inside & (_bin(x, top, BINS, FIRST_BIN) <= last)).to(tl.int32)
        tl.store(ids + place + tl.cumsum(kept, 0) - 1, at, mask=kept > 0)
        place += tl.sum(kept, 0)


def gather_step(config: KernelConfig) -> int:
    """Return how many logits are looked at together where ids are gathered: one a thread, since where an id goes says
    nothing of where the next one does."""
    return min(config.tile, 32 * config.warps)


class SamplingScratch(NamedTuple):
    """What the launches of one draw tell each other, for up to so many rows; never read by the next one."""

    tops: Tensor  # float32 [rows, slices]
    bests: Tensor  # int32 [rows, slices]
    masses: Tensor  # int64 [rows, slices]
    counts: Tensor  # int32 [rows, slices, BINS]
    listed: Tensor  # int32 [rows]
    ids: Tensor  # int32 [rows, vocab]

    @staticmethod
    def empty(
        rows: int, vocab: int, config: KernelConfig, device: torch.device | str
    ) -> "SamplingScratch":
        """Allocate it: 4 bytes for each logit, and 1 KiB for each of a row's slices."""
        slices = slices_of(vocab, config)

        def of(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=device)

        return SamplingScratch(
            of(torch.float32, slices),
            of(torch.int32, slices),
            of(torch.int64, slices),
            of(torch.int32, slices, BINS),
            of(torch.int32),
            of(torch.int32, vocab),
        )


def slices_of(vocab: int, config: KernelConfig) -> int:
    """Return how many programs share a row: a power of two, `config.rows` unless that is more than its tiles."""
    return min(config.rows, triton.next_power_of_2(triton.cdiv(vocab, config.tile)))


def one_of(vocab: int) -> float:
    """Return the weight of the largest logit, in units: such that a whole vocabulary of it is a 64-bit number."""
    return float(1 << (62 - max(1, (vocab - 1).bit_length())))

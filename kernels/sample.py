# mypy: allow-untyped-defs, allow-incomplete-defs
"""Draws one token per row of logits on the GPU, as `kernels.sampling` does on the CPU, without sorting.

Temperature, top-k, top-p, min-p, then one draw by inverting the cumulative distribution in vocabulary order. The
uniform number is `kernels.sampling.philox_uniform`, to the bit: a function of seed, sample index and position alone.

Four launches: several programs a row find its largest logit, weigh it and gather what filters may leave
(`kernels.sample_slices`); then one program a row filters and draws. Without top-k and top-p it looks at the one slice
in which the number falls; with them, at the ids that were gathered. Nothing comes back to the host, and what is
launched depends on the number of rows alone: it can be recorded.

Top-k and top-p both ask for the greatest threshold T at which what is not below T suffices: k tokens, or a share of the
weight. Floats are mapped to integers of the same order. Top-k's T is found 8 bits at a time, by counting in shared
memory; top-p's 4 bits at a time, each pass weighing sixteen thresholds. At top-p's threshold, of equal logits only so
many are kept, in vocabulary order, as a stable sort would keep.

A weight is a whole number of units, the largest logit's 2^45 for a vocabulary of 128k: a token gets the CPU's share to
within one unit, and one that is less than 1e-14 times as likely as the best is never drawn.

Sources: Philox, Salmon et al. 2011; top-k by radix selection, Alabi et al. 2012; candidates that a coarse count of all
leaves, then an exact search among them, as in Qrita (Park et al. 2026) and Dr. Top-k (Gaihre et al. 2021).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import DEFAULTS, KernelConfig
from kernels.launch import check_interpretable
from kernels.sample_slices import (
    BINS,
    FIRST_BIN,
    SLACK,
    SamplingScratch,
    gather_kernel,
    gather_step,
    one_of,
    ordered,
    slices_of,
    tops_kernel,
    units,
    weigh_kernel,
    weight_of,
)

CHOOSE = DEFAULTS["choose"]
"""One id a thread; half as many where each has sixteen sums, which would not fit registers."""


@triton.jit
def philox_uniform(seed, sample_index, position):
    """Return a float64 in [0, 1) from int64 scalars: ten rounds of Philox 4x32, counter (position, sample index)."""
    mask = 0xFFFFFFFF
    c0 = (position & mask).to(tl.uint64)
    c1 = ((position >> 32) & mask).to(tl.uint64)
    c2 = (sample_index & mask).to(tl.uint64)
    c3 = ((sample_index >> 32) & mask).to(tl.uint64)
    k0 = (seed & mask).to(tl.uint64)
    k1 = ((seed >> 32) & mask).to(tl.uint64)
    for _ in tl.static_range(10):
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0 = (p1 >> 32) ^ c1 ^ k0
        c2 = (p0 >> 32) ^ c3 ^ k1
        c1 = p1 & mask
        c3 = p0 & mask
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    bits = (c0 >> 5) * 67108864 + (c1 >> 6)
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _kth(logits, ids, listed, top_k, TILE: tl.constexpr):
    """Return the `ordered` key of the k-th of the listed logits."""
    digits = tl.arange(0, 256)
    found = tl.zeros([], dtype=tl.int64)
    wanted = top_k.to(tl.int32)
    for level in range(4):
        shift = 24 - 8 * level
        counts = tl.zeros([256], dtype=tl.int32)
        for start in range(0, listed, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < listed
            token = tl.load(ids + at, mask=inside, other=0)
            key = ordered(tl.load(logits + token, mask=inside, other=0.0).to(tl.float32))
            among = inside & ((key >> (shift + 8)) == found)
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=among)
        # Those of this digit and greater ones.
        from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        digit = tl.max(tl.where(from_here >= wanted, digits, 0), 0)
        wanted -= tl.sum(tl.where(digits > digit, counts, 0), 0)
        found = found * 256 + digit
    return found


@triton.jit
def _edge(logits, ids, listed, floor, top, temperature, goal, ONE: tl.constexpr, TILE: tl.constexpr):
    """Return the greatest key T such that the listed logits with keys of at least T, and of at least `floor`, weigh
    `goal` or more; 0 if all together do not."""
    digits = tl.arange(0, 16).to(tl.int64)
    found = tl.zeros([], dtype=tl.int64)
    for level in range(8):
        step = tl.full([], 1, dtype=tl.int64) << (28 - 4 * level)
        marks = (found + digits * step).to(tl.uint32)
        # Summed over threads once, behind the loop: a sum of a tile makes all warps wait for each other.
        masses = tl.zeros([TILE, 16], dtype=tl.int64)
        for start in range(0, listed, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < listed
            token = tl.load(ids + at, mask=inside, other=0)
            x = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
            key = ordered(x)
            weight = tl.where(inside & (key >= floor), units(weight_of(x, top, temperature), ONE), 0)
            masses += tl.where(key.to(tl.uint32)[:, None] >= marks[None, :], weight[:, None], 0)
        mass = tl.sum(masses, 0)
        best = tl.max(tl.where(mass.to(tl.float64) >= goal, digits, 0), 0)
        found += best * step
    return found


# Each row's parameters are read one at a time, wherever a step's tensor of them lies: no reason to compile again.
_PARAMETERS = (
    "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "sample_index_ptr", "position_ptr",
)  # fmt: skip


@triton.jit(do_not_specialize=_PARAMETERS)
def choose_kernel(
    logits_ptr,
    tops_ptr,
    bests_ptr,
    masses_ptr,
    listed_ptr,
    ids_ptr,
    tokens_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    sample_index_ptr,
    position_ptr,
    VOCAB: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    ONE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    parts = tl.arange(0, SLICES)
    tops = tl.load(tops_ptr + row * SLICES + parts)
    top = tl.max(tops, 0)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        bests = tl.load(bests_ptr + row * SLICES + parts)
        best = tl.min(tl.where(tops == top, bests, VOCAB), 0)
        tl.store(tokens_ptr + row, tl.where(best < VOCAB, best, 0).to(tl.int64))
        return

    logits = logits_ptr + row.to(tl.int64) * VOCAB
    ids = ids_ptr + row.to(tl.int64) * VOCAB
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    least = tl.load(min_p_ptr + row)
    uniform = philox_uniform(
        tl.load(seed_ptr + row), tl.load(sample_index_ptr + row), tl.load(position_ptr + row)
    )
    by_k = (top_k > 0) & (top_k < VOCAB)
    chosen = tl.full([], VOCAB, dtype=tl.int32)
    last = tl.zeros([], dtype=tl.int32)
    if by_k | (top_p < 1.0):
        listed = tl.load(listed_ptr + row)
        floor = tl.zeros([], dtype=tl.int64)
        if by_k:
            floor = _kth(logits, ids, listed, top_k, TILE)
        edge = floor
        allowed = tl.full([], VOCAB, dtype=tl.float64)
        if top_p < 1.0:
            total = tl.sum(tl.load(masses_ptr + row * SLICES + parts), 0)
            if by_k:
                totals = tl.zeros([TILE], dtype=tl.int64)
                for start in range(0, listed, TILE):
                    at = start + tl.arange(0, TILE)
                    inside = at < listed
                    token = tl.load(ids + at, mask=inside, other=0)
                    x = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
                    weight = units(weight_of(x, top, temperature), ONE)
                    totals += tl.where(inside & (ordered(x) >= floor), weight, 0)
                total = tl.sum(totals, 0)
            goal = top_p * total.to(tl.float64)
            edge = _edge(logits, ids, listed, floor, top, temperature, goal, ONE, TILE // 2)
            aboves = tl.zeros([TILE], dtype=tl.int64)
            equals = tl.zeros([TILE], dtype=tl.int64)
            for start in range(0, listed, TILE):
                at = start + tl.arange(0, TILE)
                inside = at < listed
                token = tl.load(ids + at, mask=inside, other=0)
                x = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
                weight = tl.where(inside, units(weight_of(x, top, temperature), ONE), 0)
                aboves += tl.where(ordered(x) > edge, weight, 0)
                equals = tl.maximum(equals, tl.where(ordered(x) == edge, weight, 0))
            above, equal = tl.sum(aboves, 0), tl.max(equals, 0)
            # Of equal tokens, number i (from 0) is kept while above + i * equal < top_p * total.
            each = tl.where(equal > 0, equal, 1).to(tl.float64)
            allowed = tl.where(equal > 0, (goal - above.to(tl.float64)) / each, 0.0)
        # Twice the same walk over what is kept: first its weight, then the token at which the number is passed.
        goal_units = tl.full([], -1, dtype=tl.int64)
        hits = tl.full([TILE], VOCAB, dtype=tl.int32)
        lasts = tl.zeros([TILE], dtype=tl.int32)
        for walk in range(2):
            running = tl.zeros([], dtype=tl.int64)
            ties = tl.zeros([], dtype=tl.int32)
            for start in range(0, listed, TILE):
                at = start + tl.arange(0, TILE)
                inside = at < listed
                token = tl.load(ids + at, mask=inside, other=0)
                x = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
                key = ordered(x)
                weight = weight_of(x, top, temperature)
                tied = (inside & (key == edge)).to(tl.int32)
                earlier = ties + tl.cumsum(tied, 0) - tied
                kept = (inside & (key > edge)) | ((tied > 0) & (earlier.to(tl.float64) < allowed))
                mass = tl.where(kept & (weight >= least), units(weight, ONE), 0)
                passed = running + tl.cumsum(mass, 0)
                hit = (mass > 0) & (passed > goal_units) & (walk == 1)
                hits = tl.minimum(hits, tl.where(hit, token, VOCAB))
                lasts = tl.maximum(lasts, tl.where(mass > 0, token, 0))
                running += tl.sum(mass, 0)
                ties += tl.sum(tied, 0)
            goal_units = (uniform * running.to(tl.float64)).to(tl.int64)
        chosen, last = tl.min(hits, 0), tl.max(lasts, 0)
    else:
        masses = tl.load(masses_ptr + row * SLICES + parts)
        until = tl.cumsum(masses, 0)
        goal_units = (uniform * tl.sum(masses, 0).to(tl.float64)).to(tl.int64)
        # Rounding at the far end: the last slice that weighs anything.
        part = tl.min(tl.where(until > goal_units, parts, SLICES), 0)
        part = tl.minimum(part, tl.max(tl.where(masses > 0, parts, 0), 0))
        running = tl.sum(tl.where(parts < part, masses, 0), 0)
        for start in range(part * SLICE, part * SLICE + SLICE, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(logits + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
            weight = weight_of(x, top, temperature)
            mass = tl.where((at < VOCAB) & (weight >= least), units(weight, ONE), 0)
            passed = running + tl.cumsum(mass, 0)
            chosen = tl.minimum(chosen, tl.min(tl.where((mass > 0) & (passed > goal_units), at, VOCAB), 0))
            last = tl.maximum(last, tl.max(tl.where(mass > 0, at, 0), 0))
            running += tl.sum(mass, 0)
    tl.store(tokens_ptr + row, tl.where(chosen < VOCAB, chosen, last).to(tl.int64))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """A step's sampling parameters, one of each per row, on the logits' device. Temperature 0 means greedy; top_k 0,
    top_p 1 and min_p 0 switch filters off."""

    temperature: Tensor  # float64
    top_k: Tensor  # int64
    top_p: Tensor  # float64
    min_p: Tensor  # float64
    seed: Tensor  # int64, the bits of the 64-bit seed
    sample_index: Tensor  # int64
    position: Tensor  # int64: of the token that is drawn

    def check(self, rows: int) -> None:
        """Check lengths and types. Raises ValueError where a tensor has another."""
        floats = self.temperature, self.top_p, self.min_p
        longs = self.top_k, self.seed, self.sample_index, self.position
        pairs = [*((t, torch.float64) for t in floats), *((t, torch.int64) for t in longs)]
        if any(tensor.shape != (rows,) or tensor.dtype != dtype for tensor, dtype in pairs):
            raise ValueError(
                f"sampling parameters are not one of each type for each of {rows} rows"
            )


def sample(
    logits: Tensor,
    params: SamplingRows,
    config: KernelConfig,
    *,
    scratch: SamplingScratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draw tokens, int64 `[rows]`, from `logits` `[rows, vocab]`, contiguous, penalties already applied.

    `config.rows`: how many programs share a row at most, a power of two. `scratch` and `out`: for launches that
    are captured in a graph; `scratch` may be of more rows. Raises ValueError where shapes do not fit.
    """
    rows, vocab = logits.shape
    params.check(rows)
    if not logits.is_contiguous():
        raise ValueError("logits are not contiguous")
    slices = slices_of(vocab, config)
    scratch = scratch or SamplingScratch.empty(rows, vocab, config, logits.device)
    if len(scratch.ids) < rows or scratch.ids.shape[1] != vocab or scratch.tops.shape[1] != slices:
        raise ValueError(f"scratch of {tuple(scratch.ids.shape)} for {tuple(logits.shape)}")
    check_interpretable(logits)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    slice_tokens = triton.cdiv(triton.cdiv(vocab, slices), config.tile) * config.tile
    sizes = {"VOCAB": vocab, "SLICES": slices, "SLICE": slice_tokens, "TILE": config.tile}
    bins = {"BINS": BINS, "FIRST_BIN": FIRST_BIN}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    filters = params.temperature, params.top_k, params.top_p
    grid, one = (rows, slices), one_of(vocab)
    found = scratch.tops, scratch.masses, scratch.counts
    tops_kernel[grid](logits, scratch.tops, scratch.bests, **sizes, **options)
    weigh_kernel[grid](logits, *found, *filters, params.min_p, **sizes, **bins, ONE=one, **options)
    gather_kernel[grid](
        logits,
        *found,
        scratch.listed,
        scratch.ids,
        *filters,
        **sizes,
        **bins,
        SLACK=SLACK,
        ONE=one,
        STEP=gather_step(config),
        **options,
    )
    choose_kernel[(rows,)](
        logits,
        scratch.tops,
        scratch.bests,
        scratch.masses,
        scratch.listed,
        scratch.ids,
        tokens,
        *filters,
        params.min_p,
        params.seed,
        params.sample_index,
        params.position,
        **{**sizes, "TILE": min(CHOOSE.tile, config.tile)},
        ONE=one,
        num_warps=CHOOSE.warps,
        num_stages=CHOOSE.stages,
    )
    return tokens

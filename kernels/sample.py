# mypy: allow-untyped-defs, allow-incomplete-defs
"""Draws one token per row of logits on the GPU, as `kernels.sampling` does on the CPU, without sorting.

Temperature, top-k, top-p, min-p, then one draw by inverting the cumulative distribution in vocabulary order. The
uniform number is `kernels.sampling.philox_uniform`, to the bit: a function of seed, sample index and position alone.
Weights and their sums are 64-bit, so that a row of equal logits gives the CPU's token, but for numbers that fall
within rounding (about 1e-16) of an edge.

Top-k and top-p both ask for the greatest threshold T at which what is not below T suffices: k tokens, or a share of
the mass. Floats are mapped to integers of the same order, and T is found four bits at a time: eight passes that each
weigh sixteen thresholds. At top-p's threshold, of equal logits only so many are kept, in vocabulary order, as a stable
sort would keep.

Sources: Philox, Salmon et al. 2011; top-k by radix selection, Alabi et al. 2012; sort-free filtering by pivots,
FlashInfer's sampling (2025), of which the rejection is left out: it would draw a number of times that depends on the
data.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import KernelConfig
from kernels.launch import check_interpretable


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
def _ordered(x):
    """Map float32 to int64 in [0, 2^32) of the same order; both zeros are one number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _threshold(logits, weights, goal, VOCAB: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr):
    """Find the greatest T such that tokens with `_ordered(logit) >= T` are at least `goal` many (COUNT), or weigh as
    much; 0 if all together do not."""
    digits = tl.arange(0, 16).to(tl.int64)
    found = tl.zeros([], dtype=tl.int64)
    for level in range(8):
        step = tl.full([], 1, dtype=tl.int64) << (28 - 4 * level)
        marks = found + digits * step
        mass = tl.zeros([16], dtype=tl.float64)
        for start in range(0, VOCAB, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < VOCAB
            key = _ordered(tl.load(logits + at, mask=inside, other=0.0).to(tl.float32))
            weight = inside.to(tl.float64)
            if not COUNT:
                weight = tl.load(weights + at, mask=inside, other=0.0)
            mass += tl.sum(tl.where(key[:, None] >= marks[None, :], weight[:, None], 0.0), 0)
        best = tl.max(tl.where(mass >= goal, digits, 0), 0)
        found += best * step
    return found


# Each row's parameters are read one at a time, wherever a step's tensor of them lies: no reason to compile again.
_PARAMETERS = (
    "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "sample_index_ptr", "position_ptr",
)  # fmt: skip


@triton.jit(do_not_specialize=_PARAMETERS)
def sample_kernel(
    logits_ptr,
    weights_ptr,
    tokens_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    sample_index_ptr,
    position_ptr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * VOCAB
    weights = weights_ptr + row.to(tl.int64) * VOCAB
    lanes = tl.arange(0, TILE)

    top = tl.full([], float("-inf"), dtype=tl.float32)
    best = tl.zeros([], dtype=tl.int32)
    for start in range(0, VOCAB, TILE):
        at = start + lanes
        x = tl.load(logits + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
        highest = tl.max(x, 0)
        first = tl.min(tl.where((x == highest) & (at < VOCAB), at, VOCAB), 0)
        best = tl.where(highest > top, first, best)
        top = tl.maximum(top, highest)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        tl.store(tokens_ptr + row, best.to(tl.int64))
        return

    top_k = tl.load(top_k_ptr + row)
    floor = tl.zeros([], dtype=tl.int64)
    if (top_k > 0) & (top_k < VOCAB):
        floor = _threshold(logits, weights, top_k.to(tl.float64), VOCAB, TILE, True)
    total = tl.zeros([], dtype=tl.float64)
    for start in range(0, VOCAB, TILE):
        at = start + lanes
        inside = at < VOCAB
        x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x.to(tl.float64) - top.to(tl.float64)) / temperature)
        weight = tl.where(_ordered(x) >= floor, weight, 0.0)
        tl.store(weights + at, weight, mask=inside)
        total += tl.sum(tl.where(inside, weight, 0.0), 0)
    # The search reads what other threads of this program have just written.
    tl.debug_barrier()

    top_p = tl.load(top_p_ptr + row)
    edge = tl.zeros([], dtype=tl.int64)
    allowed = tl.full([], VOCAB, dtype=tl.float64)
    if top_p < 1.0:
        edge = _threshold(logits, weights, top_p * total, VOCAB, TILE, False)
        above = tl.zeros([], dtype=tl.float64)
        equal = tl.zeros([], dtype=tl.float64)
        for start in range(0, VOCAB, TILE):
            at = start + lanes
            inside = at < VOCAB
            key = _ordered(tl.load(logits + at, mask=inside, other=0.0).to(tl.float32))
            weight = tl.load(weights + at, mask=inside, other=0.0)
            above += tl.sum(tl.where(key > edge, weight, 0.0), 0)
            equal = tl.maximum(equal, tl.max(tl.where(key == edge, weight, 0.0), 0))
        # Of equal tokens, number i (from 0) is kept while above + i * equal < top_p * total.
        allowed = tl.where(
            equal > 0.0, (top_p * total - above) / tl.where(equal > 0.0, equal, 1.0), 0.0
        )

    # Twice the same walk over what is kept: first its weight, then the token at which the goal is passed.
    least = tl.load(min_p_ptr + row)
    goal = tl.full([], -1.0, dtype=tl.float64)
    chosen = tl.full([], VOCAB, dtype=tl.int32)
    last = tl.zeros([], dtype=tl.int32)
    for walk in range(2):
        running = tl.zeros([], dtype=tl.float64)
        ties = tl.zeros([], dtype=tl.int32)
        for start in range(0, VOCAB, TILE):
            at = start + lanes
            inside = at < VOCAB
            key = _ordered(tl.load(logits + at, mask=inside, other=0.0).to(tl.float32))
            weight = tl.load(weights + at, mask=inside, other=0.0)
            tied = (inside & (key == edge)).to(tl.int32)
            earlier = ties + tl.cumsum(tied, 0) - tied
            kept = (key > edge) | ((tied > 0) & (earlier.to(tl.float64) < allowed))
            weight = tl.where(kept & (weight >= least), weight, 0.0)
            passed = running + tl.cumsum(weight, 0)
            hit = (weight > 0.0) & (passed > goal) & (walk == 1)
            chosen = tl.minimum(chosen, tl.min(tl.where(hit, at, VOCAB), 0))
            last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, 0), 0))
            running += tl.sum(weight, 0)
            ties += tl.sum(tied, 0)
        if walk == 0:
            uniform = philox_uniform(
                tl.load(seed_ptr + row),
                tl.load(sample_index_ptr + row),
                tl.load(position_ptr + row),
            )
            goal = uniform * running
    tl.store(tokens_ptr + row, tl.where(chosen < VOCAB, chosen, last).to(tl.int64))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """A step's sampling parameters, one of each per row, on the logits' device. Temperature 0 means greedy; top_k 0,
    top_p 1 and min_p 0 switch filters off."""

    temperature: Tensor  # float64
    top_k: Tensor  # int32
    top_p: Tensor  # float64
    min_p: Tensor  # float64
    seed: Tensor  # int64, the bits of the 64-bit seed
    sample_index: Tensor  # int64
    position: Tensor  # int64: of the token that is drawn

    def check(self, rows: int) -> None:
        """Check lengths and types. Raises ValueError where a tensor has another."""
        floats, longs = (
            (self.temperature, self.top_p, self.min_p),
            (self.seed, self.sample_index, self.position),
        )
        pairs = [
            *((t, torch.float64) for t in floats),
            *((t, torch.int64) for t in longs),
            (self.top_k, torch.int32),
        ]
        if any(tensor.shape != (rows,) or tensor.dtype != dtype for tensor, dtype in pairs):
            raise ValueError(
                f"sampling parameters are not one of each type for each of {rows} rows"
            )


def sample(
    logits: Tensor, params: SamplingRows, config: KernelConfig, *, weights: Tensor | None = None
) -> Tensor:
    """Draw tokens, int64 `[rows]`, from `logits` `[rows, vocab]`, contiguous, penalties already applied.

    `weights`: scratch float64 like logits, for launches that are captured in a graph. Raises ValueError where shapes
    do not fit.
    """
    rows, vocab = logits.shape
    params.check(rows)
    if not logits.is_contiguous():
        raise ValueError("logits are not contiguous")
    if weights is None:
        weights = torch.empty(rows, vocab, dtype=torch.float64, device=logits.device)
    if weights.shape != logits.shape or weights.dtype != torch.float64:
        raise ValueError(
            f"scratch {tuple(weights.shape)} {weights.dtype} for {tuple(logits.shape)}"
        )
    check_interpretable(logits)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    sample_kernel[(rows,)](
        logits,
        weights,
        tokens,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.sample_index,
        params.position,
        VOCAB=vocab,
        TILE=config.tile,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return tokens

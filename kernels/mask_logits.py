# mypy: allow-untyped-defs, allow-incomplete-defs
"""Leaves out of some rows of logits what their masks forbid, a bit for each token, in place:

    logits[place] = mask ? logits[place] : -inf,  or  mask ? plain[place] : -inf  where that would leave nothing

Bit i of 32-bit word w stands for token 32 w + i. The words stay packed until each lane takes its bit: a mask of 128,256
tokens is 16 KiB on its way to the device, not half a megabyte.

Specification: `kernels.reference_rows.mask_logits`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import KernelConfig
from kernels.launch import check_interpretable


@triton.jit
def _kept(row, words, at, inside):
    """Return the values of `row` at the tokens `at`, but those that the mask at `words` forbids."""
    word = tl.load(words + at // 32, mask=inside, other=0)
    value = tl.load(row + at, mask=inside, other=float("-inf"))
    return tl.where(((word >> (at % 32)) & 1) != 0, value, float("-inf"))


@triton.jit
def mask_logits_kernel(
    logits_ptr, plain_ptr, masks_ptr, places_ptr, VOCAB: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr
):
    number = tl.program_id(0)
    place = tl.load(places_ptr + number).to(tl.int64)
    logits = logits_ptr + place * VOCAB
    plain = plain_ptr + place * VOCAB
    words = masks_ptr + number.to(tl.int64) * WORDS
    lanes = tl.arange(0, TILE)

    highest = tl.full([], float("-inf"), dtype=tl.float32)
    for start in range(0, VOCAB, TILE):
        at = start + lanes
        highest = tl.maximum(highest, tl.max(_kept(logits, words, at, at < VOCAB), 0))

    # A lane writes what it alone has read, so that both may lie in one place.
    for start in range(0, VOCAB, TILE):
        at = start + lanes
        inside = at < VOCAB
        kept = _kept(logits, words, at, inside)
        if highest == float("-inf"):
            kept = _kept(plain, words, at, inside)
        tl.store(logits + at, kept, mask=inside)


def mask_logits(logits: Tensor, plain: Tensor, masks: Tensor, places: Tensor, config: KernelConfig) -> None:
    """Apply `masks`, int32 `[masked, words]`, to the rows `places`, int64 `[masked]`, each named once, of `logits`,
    float32 `[rows, vocab]`, contiguous, as is `plain`, which may be the same. Raises ValueError where shapes do not
    fit."""
    rows, vocab = logits.shape
    masked, words = masks.shape
    if plain.shape != logits.shape or plain.dtype != torch.float32 or logits.dtype != torch.float32:
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype}, plain {tuple(plain.shape)} {plain.dtype}")
    if words != (vocab + 31) // 32 or masks.dtype != torch.int32 or places.shape != (masked,) or masked > rows:
        raise ValueError(f"{masked} masks of {words} words for {tuple(places.shape)} of {tuple(logits.shape)}")
    if not (logits.is_contiguous() and plain.is_contiguous() and masks.is_contiguous()):
        raise ValueError("logits or masks are not contiguous")
    check_interpretable(logits)
    mask_logits_kernel[(masked,)](
        logits, plain, masks, places, VOCAB=vocab, WORDS=words, TILE=config.tile,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip

"""Draws tokens from logits: penalties, temperature, top-k, top-p, min-p, and random numbers without state.

The one uniform number of a draw is Philox(counter = (position, sample index), key = seed): a function of the request's
record and the position alone, so a resumed request draws what the uninterrupted one would have drawn.

Order of operations (as in Hugging Face transformers): repetition penalty, presence and frequency penalties,
temperature, top-k, top-p, min-p, then one draw by inverting the cumulative distribution in vocabulary order.
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def philox_uniform(seed: int, sample_index: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits. Source: Salmon et al. 2011, Philox 4x32 with ten rounds."""
    counter = (position & _WORD, position >> 32, sample_index & _WORD, sample_index >> 32)
    high, low, _, _ = philox4x32(counter, (seed & _WORD, seed >> 32 & _WORD))
    return ((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four 32-bit words that depend on counter and key alone."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def penalize(
    logits: Tensor,
    seen: Tensor,
    output: Tensor,
    counts: Tensor,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """Return a penalized copy of `logits` `[vocab]`. `seen`: the distinct int64 ids of prompt and output; `output`:
    those of the output alone, with `counts`. All lie on the logits' device, which is not waited for: how many ids
    there are, is known without it."""
    logits = logits.clone()
    if repetition != 1.0 and seen.numel():
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / repetition, values * repetition)
    if (presence or frequency) and output.numel():
        logits[output] -= presence + frequency * counts.to(logits.dtype)
    return logits


def probabilities(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Return float64 `[vocab]`: the filtered distribution, not normalized again. `temperature` > 0; 0 and 1.0 switch
    filters off. A tie at the k-th logit keeps every tied token."""
    logits = logits.double()
    scaled = (logits - logits.max()) / temperature  # so that a tiny temperature tends to greedy, not to infinity
    if 0 < top_k < scaled.numel():
        kth = torch.topk(scaled, top_k).values[-1]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    probs = torch.softmax(scaled, 0)
    if top_p < 1.0:
        ordered, ids = torch.sort(probs, descending=True, stable=True)
        before = torch.cumsum(ordered, 0) - ordered
        probs[ids[before >= top_p]] = 0.0
    if min_p > 0.0:
        probs[probs < min_p * probs.max()] = 0.0
    return probs


def draw(probs: Tensor, uniform: float) -> int:
    """Return the first token whose cumulative weight exceeds `uniform` of the total."""
    cumulative = torch.cumsum(probs, 0)
    at = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    if at == probs.numel():  # rounding at the far end
        at = int(torch.nonzero(probs)[-1])
    return at

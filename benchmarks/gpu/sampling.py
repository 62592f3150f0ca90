"""Measures drawing a token for each row of a large batch (E2): 64 rows over a vocabulary of 128k, filters on and off.
"""

from collections.abc import Iterator

import torch

from benchmarks.gpu.card import Card, Line
from kernels.configs import ConfigKey, config_for
from kernels.sample import SamplingRows, sample
from kernels.sample_slices import SamplingScratch

VOCAB = 128_256
SPREAD = 4.0
"""Standard deviation of the logits: top-p then keeps some thousands of the tokens, as hot sampling does."""
WAYS = {
    "greedy": (0.0, 0, 1.0),
    "plain": (0.8, 0, 1.0),
    "top-k": (0.8, 50, 1.0),
    "top-p": (0.8, 0, 0.95),
    "top-k and top-p": (0.8, 50, 0.95),
}
"""Temperature, top-k, top-p."""


def sampling(card: Card) -> Iterator[Line]:
    """Measure every way. `bytes` are those of the logits, which have to be read once."""
    rows, vocab = 2 * card.sizes.batch, card.sizes.tokens(VOCAB)
    logits = torch.randn(rows, vocab, dtype=torch.float32, device=card.device).mul_(SPREAD)
    config = config_for(ConfigKey("sample", 0, 0, 0, "float32", card.arch))
    scratch = SamplingScratch.empty(rows, vocab, config, card.device)
    for what, (temperature, top_k, top_p) in WAYS.items():
        params = _params(card, rows, temperature, top_k, top_p)
        taken = card.timer.seconds(
            lambda params=params: sample(logits, params, config, scratch=scratch)  # type: ignore[misc]
        )
        line: Line = {"id": "E2", "what": what, "rows": rows, "vocab": vocab}
        yield {**line, "us": taken * 1e6, "bytes": logits.nbytes}


def _params(card: Card, rows: int, temperature: float, top_k: int, top_p: float) -> SamplingRows:
    def filled(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=card.device)

    return SamplingRows(
        temperature=filled(temperature, torch.float64),
        top_k=filled(top_k, torch.int64),
        top_p=filled(top_p, torch.float64),
        min_p=filled(0.0, torch.float64),
        seed=torch.arange(rows, dtype=torch.int64, device=card.device),
        sample_index=filled(0, torch.int64),
        position=filled(100, torch.int64),
    )

"""From a step's logits to its tokens: one draw per wanted row, as each request's record says."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.step import Candidates, Drawn
from engine.types import RequestRecord
from kernels.sampling import draw, penalize, philox_uniform, probabilities


@dataclass(frozen=True, slots=True)
class Draw:
    """The token after `tokens` (prompt and output so far) of a request. `banned` ids may not be drawn here: the end
    of the text before `min_tokens`."""

    record: RequestRecord
    tokens: Sequence[int]
    banned: tuple[int, ...] = ()
    candidates: int = 0
    """Where not 0: so many of the likeliest tokens are wanted, and none is drawn."""


def sample(logits: Tensor, draws: list[Draw]) -> list[Drawn]:
    """`logits` float32 `[>= draws, vocab]`, row i for draw i. Greedy rows are taken together."""
    best = logits[: len(draws)].argmax(-1).tolist()
    return [
        _likeliest(logits[row], want)
        if want.candidates
        else token
        if _is_plain_greedy(want)
        else _draw_one(logits[row], want)
        for row, (token, want) in enumerate(zip(best, draws, strict=True))
    ]


def _likeliest(logits: Tensor, want: Draw) -> Candidates:
    """Log probabilities are the model's own: what is banned leaves its share to nobody."""
    log_probs = logits.log_softmax(-1)
    if want.banned:
        log_probs[list(want.banned)] = float("-inf")
    top = log_probs.topk(min(want.candidates, log_probs.numel()))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return tuple((token, value) for token, value in pairs if value > float("-inf"))


def _is_plain_greedy(want: Draw) -> bool:
    return want.record.sampling.temperature == 0.0 and not is_adjusted(want)


def _has_penalties(want: Draw) -> bool:
    params = want.record.sampling
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def _draw_one(logits: Tensor, want: Draw) -> int:
    record, params = want.record, want.record.sampling
    logits = adjusted(logits, want)
    if params.temperature == 0.0:
        return int(logits.argmax())
    probs = probabilities(
        logits,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
    return draw(probs, philox_uniform(record.seed, record.sample_index, len(want.tokens)))


def is_adjusted(want: Draw) -> bool:
    """Does `adjusted` change this draw's logits?"""
    return bool(want.banned) or _has_penalties(want)


def adjusted(logits: Tensor, want: Draw) -> Tensor:
    """`logits` `[vocab]` with the draw's penalties and without its banned tokens: a copy where any apply."""
    record, params = want.record, want.record.sampling
    if _has_penalties(want):
        seen = torch.tensor(want.tokens, dtype=torch.int64).to(logits.device)
        logits = penalize(
            logits,
            seen,
            seen[record.prompt_tokens :],
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
    if want.banned:
        logits = logits.clone()
        logits[list(want.banned)] = float("-inf")
    return logits

"""Draws a step's tokens from its logits: one draw per row that wants one, as its request's record says."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch import upload
from engine.step import Candidates, Drawn, Row
from kernels.sampling import draw, penalize, philox_uniform, probabilities


def sample(logits: Tensor, draws: Sequence[Row]) -> list[Drawn]:
    """Draw a token, or list candidates, for each of `draws` from row i of `logits`, float32 `[>= draws, vocab]`. Greedy
    rows are taken together."""
    best = logits[: len(draws)].argmax(-1).tolist()
    return [
        _likeliest(logits[row], want)
        if want.candidates
        else token
        if want.record.sampling.temperature == 0.0 and not is_adjusted(want)
        else _draw_one(logits[row], want)
        for row, (token, want) in enumerate(zip(best, draws, strict=True))
    ]


def _likeliest(logits: Tensor, want: Row) -> Candidates:
    """Log probabilities are the model's own: what is banned leaves its share to nobody."""
    log_probs = logits.log_softmax(-1)
    if want.banned:
        log_probs[list(want.banned)] = float("-inf")
    top = log_probs.topk(min(want.candidates, log_probs.numel()))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return tuple((token, value) for token, value in pairs if value > float("-inf"))


def has_penalties(want: Row) -> bool:
    """True where its draw depends on which tokens the row has, beyond its logits."""
    params = want.record.sampling
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def needs_tokens(want: Row) -> bool:
    """True where nothing can be drawn for it before all of its tokens are known."""
    return want.record.constraint is not None or has_penalties(want)


def _draw_one(logits: Tensor, want: Row) -> int:
    params = want.record.sampling
    logits = constrained(logits, adjusted(logits, want), want)
    if params.temperature == 0.0:
        return int(logits.argmax())
    probs = probabilities(
        logits, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )
    return draw(probs, philox_uniform(*want.draw_key))


def is_adjusted(want: Row) -> bool:
    """True where `adjusted` or `constrained` changes the row's logits."""
    return bool(want.banned or want.allowed) or has_penalties(want)


def adjusted(logits: Tensor, want: Row) -> Tensor:
    """`logits` `[vocab]` with the row's penalties and without its banned tokens: a copy where any apply. Their device
    is not waited for."""
    record, params = want.record, want.record.sampling
    if has_penalties(want):
        tokens = torch.tensor(want.tokens, dtype=torch.int64)
        output, counts = tokens[record.prompt_tokens :].unique(return_counts=True)
        logits = penalize(
            logits,
            *(upload(ids, logits.device) for ids in (tokens.unique(), output, counts)),
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
    if want.banned:
        banned = upload(torch.tensor(want.banned, dtype=torch.int64), logits.device)
        logits = logits.index_fill(0, banned, float("-inf"))
    return logits


def constrained(logits: Tensor, altered: Tensor, want: Row) -> Tensor:
    """`altered` without the tokens that the row's constraint forbids; where that leaves none, the same of `logits`, as
    the model made them: a constraint comes before bans. All `[vocab]`, on the CPU."""
    if not want.allowed:
        return altered
    bits = np.unpackbits(np.frombuffer(want.allowed, np.uint8), count=altered.numel(), bitorder="little")
    forbidden = torch.from_numpy(bits == 0)
    kept = altered.masked_fill(forbidden, float("-inf"))
    return kept if bool((kept > float("-inf")).any()) else logits.masked_fill(forbidden, float("-inf"))

"""Draws a step's tokens from its logits: one draw per row that wants one, as its request's record says.

What is done to a row's logits, in this order: log probabilities are taken from them as they are; what is not allowed is
left out; biases are added; penalties; what would end the answer too early is left out; so is what a constraint forbids;
then temperature, top-k, top-p, min-p, and the draw.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.backends.token_counts import CountedTokens
from engine.batch import upload
from engine.logprobs import step_logprobs
from engine.step import Candidates, Drawn, Row
from kernels.sampling import draw, penalize, philox_uniform, probabilities


def sample(logits: Tensor, draws: Sequence[Row], counted: CountedTokens | None = None) -> list[Drawn]:
    """Draw a token, or list candidates, for each of `draws` from row i of `logits`, float32 `[>= draws, vocab]`. Greedy
    rows are taken together. `counted`: which tokens penalized rows have, from step to step; None: counted anew."""
    if counted is not None:
        counted.begin([want for want in draws if has_penalties(want)])
    best = logits[: len(draws)].argmax(-1).tolist()
    drawn: list[Drawn] = [
        _likeliest(logits[row], want)
        if want.candidates
        else token
        if want.record.sampling.temperature == 0.0 and not is_adjusted(want)
        else _draw_one(logits[row], want, counted)
        for row, (token, want) in enumerate(zip(best, draws, strict=True))
    ]
    if all(want.record.logprobs is None for want in draws):
        return drawn
    tokens = [token if isinstance(token, int) else 0 for token in drawn]
    asked = step_logprobs(logits, draws, torch.tensor(tokens, dtype=torch.int64))
    assert asked is not None
    return asked.joined(drawn)


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


def _draw_one(logits: Tensor, want: Row, counted: CountedTokens | None) -> int:
    if not want.allowed:
        return _drawn(adjusted(logits, want, counted), want)
    ids = allowed_ids(want.allowed)
    if ids.size == 1:
        return int(ids[0])
    return int(ids[_drawn(constrained(logits, adjusted(logits, want, counted), ids), want)])


def _drawn(logits: Tensor, want: Row) -> int:
    params = want.record.sampling
    if params.temperature == 0.0:
        return int(logits.argmax())
    probs = probabilities(
        logits, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )
    return draw(probs, philox_uniform(*want.draw_key))


def is_adjusted(want: Row) -> bool:
    """True where it is not drawn from the row's logits as they are."""
    record = want.record
    is_limited = want.banned or want.allowed or record.logit_bias or record.allowed_token_ids
    return bool(is_limited) or has_penalties(want)


def adjusted(logits: Tensor, want: Row, counted: CountedTokens | None = None) -> Tensor:
    """`logits` `[vocab]` of the tokens that are allowed, with the row's biases and penalties, and without its banned
    tokens: a copy where any apply. Their device is not waited for. `counted`: as `sample` says."""
    record, params = want.record, want.record.sampling
    if record.allowed_token_ids:
        allowed = upload(torch.tensor(record.allowed_token_ids, dtype=torch.int64), logits.device)
        kept = torch.full_like(logits, float("-inf"))
        logits = kept.index_copy(0, allowed, logits.index_select(0, allowed))
    if record.logit_bias:
        ids, amounts = zip(*record.logit_bias, strict=True)
        biased = upload(torch.tensor(ids, dtype=torch.int64), logits.device)
        logits = logits.index_add(0, biased, upload(torch.tensor(amounts, dtype=logits.dtype), logits.device))
    if has_penalties(want):
        asked = _counted_anew(want) if counted is None else _known(counted, want)
        logits = penalize(
            logits,
            *(upload(ids, logits.device) for ids in asked),
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
    if want.banned:
        banned = upload(torch.tensor(want.banned, dtype=torch.int64), logits.device)
        logits = logits.index_fill(0, banned, float("-inf"))
    return logits


def _counted_anew(want: Row) -> tuple[Tensor, Tensor, Tensor]:
    """Return a row's distinct tokens, and those of its output with their counts: int64, on the CPU."""
    tokens = torch.tensor(want.tokens, dtype=torch.int64)
    return tokens.unique(), *tokens[want.record.prompt_tokens :].unique(return_counts=True)


def _known(counted: CountedTokens, want: Row) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same, in another order, without reading all of its tokens."""
    counts = counted.of(want)
    ids, times = torch.from_numpy(counts.ids), torch.from_numpy(counts.counts)
    return ids, ids[times > 0], times[times > 0]


def allowed_ids(mask: bytes) -> np.ndarray:
    """Return the tokens that a mask allows, ascending."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").view(bool))


def constrained(logits: Tensor, altered: Tensor, ids: np.ndarray) -> Tensor:
    """Return `altered` of the tokens that a constraint allows, and of no others: most masks leave few, and what is
    done to them next costs as much as they are. Where nothing may be drawn of these, the same of `logits`, as the model
    made them: a constraint comes before bans. Both `[vocab]`, on the CPU; the result `[len(ids)]`."""
    kept = altered.numpy().take(ids)
    return torch.from_numpy(kept if kept.max() > float("-inf") else logits.numpy().take(ids))

"""Log probabilities of what a step draws: the model's own, before penalties, biases, temperature and filters.

On a GPU they are queued behind the draws and read with them, so that a row that wants them is planned ahead as any
other. Nothing here is done in a step where nobody asks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import ROW_MULTIPLE, upload
from engine.step import Drawn, Row
from engine.types import TokenLogprobs

SCORED_AT_ONCE = 64
"""Tokens of prompts whose logits are in memory at a time."""
LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class StepLogprobs(NamedTuple):
    """The log probability `own[i]` of the token of draw number `draws[i]`, and, likeliest first, those of `ids[i]`,
    of which `wanted[i]` are asked for."""

    draws: list[int]
    wanted: list[int]
    own: Tensor  # float32 [asked]
    values: Tensor  # float32 [asked, most wanted]
    ids: Tensor  # int64 [asked, most wanted]

    def to_host(self) -> "StepLogprobs":
        """The same in the CPU's memory, once the device has done what was queued until now. Does not wait."""
        return self._replace(own=_pinned(self.own), values=_pinned(self.values), ids=_pinned(self.ids))

    def joined(self, drawn: Sequence[Drawn]) -> list[Drawn]:
        """Return the draws, with the log probabilities of those that ask for them."""
        whole = list(drawn)
        own, values, ids = self.own.tolist(), self.values.tolist(), self.ids.tolist()
        for at, draw in enumerate(self.draws):
            token = whole[draw]
            assert isinstance(token, int)
            whole[draw] = _told(token, own[at], ids[at], values[at], self.wanted[at])
        return whole


class QueuedDraws(NamedTuple):
    """What a device draws, int64 `[draws]`, and the log probabilities that are asked for."""

    tokens: Tensor
    logprobs: StepLogprobs


class PromptScores(NamedTuple):
    """What a step says of the tokens of prompts: for each part of one, which prompt tokens, and how many alternatives
    are asked for; then the values of all of them, one part after the other."""

    parts: list[tuple[list[int], int]]
    own: Tensor  # float32 [tokens]
    values: Tensor  # float32 [tokens, most wanted]
    ids: Tensor  # int64 [tokens, most wanted]

    def to_host(self) -> "PromptScores":
        """The same in the CPU's memory, once the device has done what was queued until now. Does not wait."""
        return self._replace(own=_pinned(self.own), values=_pinned(self.values), ids=_pinned(self.ids))

    def told(self) -> list[list[TokenLogprobs]]:
        """Return the log probabilities of each part's tokens."""
        own, values, ids = self.own.tolist(), self.values.tolist(), self.ids.tolist()
        said, at = list[list[TokenLogprobs]](), 0
        for tokens, wanted in self.parts:
            said.append([_told(token, own[i], ids[i], values[i], wanted) for i, token in enumerate(tokens, at)])
            at += len(tokens)
        return said


def prompt_scores(logits: Callable[[Tensor], Tensor], hidden: Tensor, rows: Sequence[Row]) -> PromptScores:
    """Return what the scored of `rows`, laid out one after the other in `hidden`, ask: at least one is scored.
    `logits` makes float32 logits `[rows, vocab]` of rows of `hidden`; it is given few at a time, since those of a whole
    prompt may be larger than the model. Does not wait for the device."""
    parts: list[tuple[list[int], int]] = []
    places: list[int] = []
    first = 0
    for row in rows:
        if row.scored:
            after = row.start + 1
            parts.append((list(row.tokens[after : after + row.scored]), row.record.prompt_logprobs or 0))
            places += range(first, first + row.scored)
        first += row.end - row.start
    tokens = [token for part, _ in parts for token in part]
    most = max(wanted for _, wanted in parts)
    pieces = []
    for at in range(0, len(places), SCORED_AT_ONCE):
        some, behind = places[at : at + SCORED_AT_ONCE], tokens[at : at + SCORED_AT_ONCE]
        padded = some + some[-1:] * (-len(some) % ROW_MULTIPLE)
        made = logits(hidden[upload(torch.tensor(padded, dtype=torch.int64), hidden.device)])[: len(some)]
        ids = upload(torch.tensor(behind, dtype=torch.int64), hidden.device)
        pieces.append(_log_probs(made, ids, most))
    own, values, ids = (torch.cat(kind) for kind in zip(*pieces, strict=True))
    return PromptScores(parts, own, values, ids)


def step_logprobs(logits: Tensor, draws: Sequence[Row], tokens: Tensor) -> StepLogprobs | None:
    """Return what the rows ask of their `tokens`, int64 `[draws]`, drawn from the rows of `logits`, float32
    `[>= draws, vocab]`; None if none asks. Does not wait for the device of both."""
    asking = [at for at, want in enumerate(draws) if want.record.logprobs is not None]
    if not asking:
        return None
    wanted = [draws[at].record.logprobs or 0 for at in asking]
    rows = upload(torch.tensor(asking, dtype=torch.int64), logits.device)
    return StepLogprobs(asking, wanted, *_log_probs(logits[rows], tokens[rows], max(wanted)))


def _log_probs(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log probabilities of `tokens`, int64 `[rows]`, and of the `most` likeliest, with their ids."""
    total = logits.logsumexp(-1, keepdim=True)
    # A token out of range, which is nobody's, must not end the device's context.
    own = logits.gather(1, tokens[:, None].clamp(0, logits.shape[1] - 1)) - total
    top = logits.topk(min(most, logits.shape[1]))
    return own[:, 0].clamp(min=LEAST), (top.values - total).clamp(min=LEAST), top.indices


def _told(token: int, own: float, ids: list[int], values: list[float], wanted: int) -> TokenLogprobs:
    return TokenLogprobs(token, own, tuple(zip(ids[:wanted], values[:wanted], strict=True)))


def _pinned(there: Tensor) -> Tensor:
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
    return here.copy_(there, non_blocking=True)

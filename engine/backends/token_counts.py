"""Which tokens each request has, and how often they are in its output: what penalties ask, kept from step to step.

To count a request's tokens anew costs as much as it has; a step adds one. Whoever is not asked about in a step is
forgotten, so that what is kept is of the rows that run.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.step import Row
from engine.types import RequestId


class TokenCounts:
    """The distinct tokens of one sequence, in the order in which they came, with their counts in its output: a token of
    the prompt alone has 0. Mutable state: all of it; it only grows."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._known: list[int] = []
        self._places: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("q")

    def catch_up(self, tokens: Sequence[int]) -> bool:
        """Count what `tokens` has beyond those that are counted. False, and nothing is counted, where these are not its
        beginning: another attempt at the request, or drafts that were not drawn."""
        done = len(self._known)
        if list(tokens[:done]) != self._known:
            return False
        for at in range(done, len(tokens)):
            token = tokens[at]
            place = self._places.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += at >= self._prompt_tokens
        self._known += tokens[done:]
        return True

    @property
    def ids(self) -> np.ndarray:
        """int64 `[distinct tokens]`, a copy."""
        return np.array(self._ids, dtype=np.int64)

    @property
    def counts(self) -> np.ndarray:
        """int64 `[distinct tokens]`, a copy."""
        return np.array(self._counts, dtype=np.int64)


class Penalties(NamedTuple):
    """What becomes of the logits `[rows, vocab]` of a step, one entry for each distinct token of a penalized row."""

    places: np.ndarray
    """int64: the row times the vocabulary, plus the token."""
    repetition: np.ndarray
    """float32: what a positive logit is divided by, and a negative one multiplied by."""
    less: np.ndarray
    """float32: what is then taken off."""


class CountedTokens:
    """The counts of the requests that the latest step asked about. Owner: one thread."""

    # Mutable state.

    def __init__(self) -> None:
        self._known: dict[RequestId, TokenCounts] = {}

    def penalties(self, draws: Sequence[tuple[int, Row]], vocab: int) -> Penalties:
        """Return what the penalties of these draws do, each with its row of the logits."""
        asked: dict[RequestId, TokenCounts] = {}
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for at, row in draws:
            counted = self._counted(row)
            asked[row.request] = counted
            params = row.record.sampling
            counts = counted.counts
            presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
            less = presence + frequency * counts.astype(np.float32)
            repetition = np.full(len(counts), params.repetition_penalty, dtype=np.float32)
            parts.append((counted.ids + at * vocab, repetition, np.where(counts > 0, less, np.float32(0))))
        self._known = asked
        return Penalties(*(np.concatenate(kind) for kind in zip(*parts, strict=True)))

    def _counted(self, row: Row) -> TokenCounts:
        counted = self._known.get(row.request)
        if counted is None or not counted.catch_up(row.tokens):
            counted = TokenCounts(row.record.prompt_tokens)
            counted.catch_up(row.tokens)
        return counted

"""Which tokens each request has, and how often they are in its output: what penalties ask, kept from step to step.

To count a request's tokens anew costs as much as it has; a step adds one. Whoever is not asked about in a step is
forgotten, so that what is kept is of the rows that run.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.step import History, Row, TokenView
from engine.types import RequestId


class TokenCounts:
    """The distinct tokens of one sequence, in the order in which they came, with their counts in its output: a token of
    the prompt alone has 0. Mutable state: all of it."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._history = History()
        self._behind: list[tuple[int, bool]] = []
        """What was counted behind the tokens that are sure; True: it came for the first time."""
        self._places: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("q")

    def catch_up(self, tokens: Sequence[int]) -> bool:
        """Count what `tokens` has beyond those that are counted, and no more what was not drawn in the end. False, and
        nothing is counted, where these may have another beginning: another attempt at the request."""
        if not self._places:
            self._start(TokenView.of(tokens))
        sure = self._history.known(tokens)
        if sure < self._history.sure:
            return False
        new = tokens[sure:]
        same = 0
        while same < min(len(new), len(self._behind)) and new[same] == self._behind[same][0]:
            same += 1
        while len(self._behind) > same:
            self._uncount(sure + len(self._behind) - 1)
        for at in range(same, len(new)):
            self._count(new[at], sure + at)
        self._history.see(tokens)
        del self._behind[: self._history.sure - sure]
        return True

    def _start(self, tokens: TokenView) -> None:
        """Count those that are sure: the same, all at once."""
        known = tokens[: tokens.sure]
        output = Counter(known[self._prompt_tokens :])
        self._places = {token: place for place, token in enumerate(dict.fromkeys(known))}
        self._ids.extend(self._places)
        self._counts.extend([output[token] for token in self._places])
        self._history.see(TokenView(tokens.own, tokens.sure))

    def _count(self, token: int, at: int) -> None:
        place = self._places.setdefault(token, len(self._ids))
        is_new = place == len(self._ids)
        if is_new:
            self._ids.append(token)
            self._counts.append(0)
        self._counts[place] += at >= self._prompt_tokens
        self._behind.append((token, is_new))

    def _uncount(self, at: int) -> None:
        """Undo what was counted last, at `at`. Where that was new, nothing newer is left."""
        token, is_new = self._behind.pop()
        self._counts[self._places[token]] -= at >= self._prompt_tokens
        if is_new:
            del self._places[token], self._ids[-1], self._counts[-1]

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

    def begin(self, draws: Sequence[Row]) -> None:
        """Forget the requests that have none of a step's draws with penalties."""
        names = {row.request for row in draws}
        self._known = {name: counted for name, counted in self._known.items() if name in names}

    def of(self, row: Row) -> TokenCounts:
        """Return the counts of a row's tokens; they are so until another row of its request is asked about."""
        counted = self._known.get(row.request)
        if counted is None or not counted.catch_up(row.tokens):
            counted = self._known[row.request] = TokenCounts(row.record.prompt_tokens)
            counted.catch_up(row.tokens)
        return counted

    def penalties(self, draws: Sequence[tuple[int, Row]], vocab: int) -> Penalties:
        """Return what the penalties of these draws do, all that a step has, each with its row of the logits."""
        self.begin([row for _, row in draws])
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for at, row in draws:
            counted = self.of(row)
            params = row.record.sampling
            counts = counted.counts
            presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
            less = presence + frequency * counts.astype(np.float32)
            repetition = np.full(len(counts), params.repetition_penalty, dtype=np.float32)
            parts.append((counted.ids + at * vocab, repetition, np.where(counts > 0, less, np.float32(0))))
        return Penalties(*(np.concatenate(kind) for kind in zip(*parts, strict=True)))

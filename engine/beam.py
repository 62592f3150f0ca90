"""Beam search: the answers with the greatest sum of log probabilities, as far as a search of a fixed width finds them.

Every step looks at the best continuations of all live hypotheses together. Of the first `width` of them, those that end
are answers, scored by log probability / length ** length_penalty; the best `width` that do not end live on. The search
is over when no live hypothesis can become better than the worst of `width` answers, as `EarlyStopping` puts it.
Names, order and stopping rules are those of `generate(num_beams=...)` in transformers 5, token for token. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from engine.step import Candidates
from engine.types import Beam, BeamParams, EarlyStopping, FinishReason


@dataclass(slots=True)
class Hypothesis:
    """`ids` is its output so far."""

    ids: list[int]
    log_prob: float


@dataclass(slots=True, frozen=True)
class BeamStep:
    """The next live hypothesis is the one before with the index `parent`, and `token` behind it."""

    parent: int
    token: int


class BeamSearch:
    """Mutable state, all of it: the live hypotheses, best first; the answers, best first; whether it is over."""

    def __init__(self, params: BeamParams, max_tokens: int, ends: frozenset[int]) -> None:
        self.live = [Hypothesis([], 0.0)]
        self.answers: list[Beam] = []
        self.is_over = False
        self._params = params
        self._max_tokens = max_tokens
        self._ends = ends

    @property
    def candidates(self) -> int:
        """The number of continuations of each hypothesis that must be known: enough for `width` that do not end."""
        return max(2, 1 + len(self._ends)) * self._params.width

    def advance(self, drawn: Sequence[Candidates]) -> list[BeamStep]:
        """`drawn[i]` are the best continuations of `live[i]`, best first. Returns where the next live hypotheses come
        from; nothing when the search is over."""
        length, width = len(self.live[0].ids) + 1, self._params.width
        order = count()
        ranked = sorted(
            (-self.live[parent].log_prob - log_prob, next(order), parent, token)
            for parent, candidates in enumerate(drawn)
            for token, log_prob in candidates
        )
        best = [(parent, token, -cost) for cost, _, parent, token in ranked[: self.candidates]]
        is_last = length == self._max_tokens
        for parent, token, log_prob in best[:width]:
            if token in self._ends or is_last:
                self._answer([*self.live[parent].ids, token], log_prob / self._scale(length))
        lives = [(p, t, s) for p, t, s in best if t not in self._ends][:width]
        if is_last or not lives or not self._is_worth_going_on(lives[0][2], length):
            self.is_over = True
            return []
        self.live = [Hypothesis([*self.live[p].ids, t], score) for p, t, score in lives]
        return [BeamStep(parent, token) for parent, token, _ in lives]

    def _answer(self, ids: list[int], score: float) -> None:
        reason = FinishReason.STOP if ids[-1] in self._ends else FinishReason.LENGTH
        self.answers.append(Beam(ids, score, reason))
        self.answers.sort(key=lambda answer: -answer.score)
        del self.answers[self._params.width :]

    def _scale(self, length: int) -> float:
        return float(length**self._params.length_penalty)

    def _is_worth_going_on(self, log_prob: float, length: int) -> bool:
        """`log_prob` is the best live hypothesis's, of `length` tokens."""
        if len(self.answers) < self._params.width:
            return True
        if self._params.early_stopping is EarlyStopping.FULL:
            return False
        is_patient = self._params.early_stopping is EarlyStopping.NEVER
        if is_patient and self._params.length_penalty > 0.0:
            length = self._max_tokens
        return log_prob / self._scale(length) > self.answers[-1].score

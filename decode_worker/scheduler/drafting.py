"""Which requests have drafts in a step, and how many: as long as they are worth what they cost. Pure.

A draft adds a token to its row. It saves a step's row where it is what the model draws, and so are those before it.
What a step of so many tokens lasts is measured as steps end, and what a request's drafts come to, as they are drawn:

    worth it    (rows + drafts that will be drawn) / seconds of a step of rows + drafts tokens
                is more than rows / seconds of a step of rows tokens

So drafts end where a step of many rows would last as much longer as it computes more, and for a request whose text does
not repeat itself. Which are proposed never changes an answer, only how many steps it takes: so the choice may rest on
times. Now and then it is made the other way, or else what was measured once would be believed for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decode_worker.scheduler.request import Request
from engine.drafts import Drafter, NewDrafter
from engine.plan import mean

TRUST = 2.0
"""The drafts that a new request is credited with, at the worker's mean."""
FADING = 0.95
"""What a request's drafts count for after its next ones."""
OTHER_WAY = 61
"""One choice of so many is the other one."""
OUTLIER = 3.0
"""A step that lasts more than so many times the mean has waited for something else."""


@dataclass(slots=True)
class _Guessed:
    """What became of a request's drafts."""

    drafter: Drafter
    right: float = 0.0
    tried: float = 0.0
    """Drafts that were drawn, and all whose place was reached; both fade."""
    drafted: int = 0
    drawn: int = 0
    steps: int = 0
    """Its steps, since it has run here."""


@dataclass(slots=True)
class DraftOutcome:
    """A request that has ended, or left: drafts proposed and drawn, and steps with a row of it."""

    drafted: int
    drawn: int
    steps: int

    @property
    def tokens_per_step(self) -> float:
        return (self.steps + self.drawn) / self.steps


class StepCosts:
    """The seconds of a step without prompts, by the tokens that it computes. Mutable state: the running means."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def measured(self, tokens: int, seconds: float) -> None:
        known = self._seconds.get(tokens, 0.0)
        self._seconds[tokens] = mean(known, min(seconds, OUTLIER * known) if known else seconds)

    @property
    def is_measured(self) -> bool:
        return bool(self._seconds)

    def of(self, tokens: int) -> float:
        """Return what is known of so many tokens, or of the most below them: what was never tried is tried. 0.0:
        nothing is known."""
        known = self._seconds.get(tokens)
        if known is None:
            known = self._seconds[max(below)] if (below := [n for n in self._seconds if n < tokens]) else 0.0
        return known

    def worth(self, rows: int, gains: Sequence[float]) -> int:
        """Return how many drafts a step of `rows` should have, where the i-th adds `gains[i]` tokens, the most first.
        All of them as long as no step was measured; none where none without drafts was."""
        base = self._seconds.get(rows, 0.0)
        if not base:
            return 0 if self._seconds else len(gains)
        expected, count, best = float(rows), 0, rows / base
        for drafts, gain in enumerate(gains, 1):
            expected += gain
            rate = expected / self.of(rows + drafts)
            if rate > best:
                count, best = drafts, rate
        return count


@dataclass(eq=False)
class Drafting:
    """Mutable state: what became of each running request's drafts, and what steps last. Owner: the batch."""

    new: NewDrafter | None
    """None: there are no drafts."""
    most: int
    """Drafts of one row."""
    costs: StepCosts = field(default_factory=StepCosts)
    drafted_tokens: int = 0
    drawn_tokens: int = 0
    """Counted until the shell has taken them, and so are the `outcomes`."""
    outcomes: list[DraftOutcome] = field(default_factory=list)
    _of: dict[Request, _Guessed] = field(default_factory=dict)
    _right: float = 0.5 * TRUST
    _tried: float = TRUST
    _choices: int = 0

    def awaits(self, requests: Sequence[Request], rows: int) -> bool:
        """Return True if the next step of `rows` had better wait until the tokens of `requests` are known, of which
        drafts can be made then."""
        if self.new is None or not requests:
            return False
        gains = sorted((gain for r in requests for gain in self._gains(r, self.most)), reverse=True)
        return self._choose(rows, gains) > 0

    def propose(self, requests: Sequence[tuple[Request, int]], rows: int, room: int) -> dict[Request, list[int]]:
        """Return the drafts of a step of `rows`: for each of `requests` up to as many as stand beside it, and `room` in
        all."""
        if self.new is None or not requests or room <= 0:
            return {}
        proposed: dict[Request, list[int]] = {}
        ranked: list[tuple[float, Request]] = []
        for request, most in requests:
            drafts = self._guessed(request).drafter.propose(request.tokens, min(most, self.most))
            proposed[request] = drafts
            ranked += [(gain, request) for gain in self._gains(request, len(drafts))]
        if not ranked:
            return {}
        ranked.sort(key=lambda pair: pair[0], reverse=True)
        ranked = ranked[:room]
        chosen = [request for _, request in ranked[: self._choose(rows, [gain for gain, _ in ranked])]]
        return {request: drafts[: chosen.count(request)] for request, drafts in proposed.items() if request in chosen}

    def _choose(self, rows: int, gains: Sequence[float]) -> int:
        count = self.costs.worth(rows, gains)
        self._choices += 1
        if self._choices % OTHER_WAY:
            return count
        return 0 if count else len(gains)

    def _guessed(self, request: Request) -> _Guessed:
        if request not in self._of:
            assert self.new is not None
            self._of[request] = _Guessed(self.new(request.record))
        return self._of[request]

    def _gains(self, request: Request, drafts: int) -> list[float]:
        """Return what each of its drafts is likely to add: it counts only where those before it were right."""
        guessed = self._guessed(request)
        share = (guessed.right + TRUST * self._right / self._tried) / (guessed.tried + TRUST)
        return [share**at for at in range(1, drafts + 1)]

    def stepped(self, request: Request, drafted: int, drawn: int) -> None:
        """Take in what became of the drafts of its row, of which there may be none."""
        if self.new is None:
            return
        guessed = self._guessed(request)
        guessed.steps += 1
        if not drafted:
            return
        tried = min(drawn + 1, drafted)
        guessed.right, guessed.tried = FADING * guessed.right + drawn, FADING * guessed.tried + tried
        self._right, self._tried = FADING * self._right + drawn, FADING * self._tried + tried
        guessed.drafted += drafted
        guessed.drawn += drawn
        self.drafted_tokens += drafted
        self.drawn_tokens += drawn

    def forget(self, request: Request) -> None:
        """It runs here no more."""
        guessed = self._of.pop(request, None)
        if guessed is not None and guessed.steps:
            self.outcomes.append(DraftOutcome(guessed.drafted, guessed.drawn, guessed.steps))

    def take_outcomes(self) -> list[DraftOutcome]:
        taken, self.outcomes = self.outcomes, []
        return taken

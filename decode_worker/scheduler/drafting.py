"""Which requests have drafts in a step, and how many: as long as they are worth what they cost. Pure.

A draft adds a token to its row. It saves a step's row where it is what the model draws, and so are those before it.
What a step of so many tokens lasts is measured as steps end, and what a request's drafts come to, as they are drawn:

    worth it    (rows + drafts that will be drawn) / seconds of a step of rows + drafts tokens, and of proposing them
                is more than rows / seconds of a step of rows tokens

So drafts end where a step of many rows would last as much longer as it computes more, and for a request whose text does
not repeat itself. Which are proposed never changes an answer, only how many steps it takes: so the choice may rest on
times. Now and then it is made the other way, or else what was measured once would be believed for ever.

Two cases:

    1 proposing costs nothing (`ngram`, `suffix`): all are asked, and the best of what they propose is chosen.
    2 it takes time (`model`): what is chosen is asked for, and nothing else. A request of which the drafter has much
      to read first is asked for only where its answer can be long enough to bring that in. Where drafts, or reading
      for them, are not worth it, or what they take is not known yet, one is tried, as long as all that was tried has
      taken less than `TRIAL_SHARE` of all time.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from decode_worker.scheduler.request import Request
from engine.drafts import Drafter, DraftWanted, Proposed
from engine.plan import mean

TRUST = 2.0
"""The drafts that a new request is credited with, at the worker's mean."""
FADING = 0.95
"""What a request's drafts count for after its next ones."""
OTHER_WAY = 61
"""One choice of so many is the other one."""
OUTLIER = 3.0
"""A step that lasts more than so many times the mean has waited for something else."""
TRIAL_SHARE = 0.02
"""The part of all time that a drafter which takes some may have for drafts that are not thought to be worth it."""


@dataclass(slots=True)
class _Guessed:
    """What became of a request's drafts."""

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


class _Draft(NamedTuple):
    """A draft that a step may have."""

    gain: float
    """The tokens that it is likely to add."""
    depth: int
    """1: the first of its row."""
    request: Request


class _Means:
    """Running means of seconds by size. Mutable state, all of it: `sizes`, in their order, and the mean of each."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._means: dict[int, float] = {}

    def note(self, size: int, seconds: float) -> None:
        known = self._means.get(size, 0.0)
        if size not in self._means:
            insort(self.sizes, size)
        self._means[size] = mean(known, min(seconds, OUTLIER * known) if known else seconds)

    def just(self, size: int) -> float | None:
        """Return the mean of that size; None where it was not measured."""
        return self._means.get(size)

    def of(self, size: int) -> float:
        """Return the mean of a size, or of the largest below it; 0.0: there is none."""
        at = bisect_right(self.sizes, size)
        return self._means[self.sizes[at - 1]] if at else 0.0


class StepCosts:
    """The seconds of a step without prompts, by the tokens that it computes; where a drafter takes time, of each depth
    of drafts, by the rows that have one, and of a token that it reads. Mutable state: the running means."""

    def __init__(self) -> None:
        self._seconds = _Means()
        self._depth_s = _Means()
        self._read_s = 0.0

    def measured(self, tokens: int, seconds: float) -> None:
        """Note how long a step took, without what its drafts took before."""
        self._seconds.note(tokens, seconds)

    def proposed(self, told: Proposed) -> None:
        """Note how long a drafter took."""
        if told.read_tokens:
            self._read_s = mean(self._read_s, told.read_s / told.read_tokens)
        for rows, seconds in told.forwards:
            self._depth_s.note(rows, seconds)

    @property
    def is_measured(self) -> bool:
        return bool(self._seconds.sizes)

    def knows(self, rows: int) -> bool:
        """Return True if a step of so many rows without drafts was measured, or none was measured at all."""
        return not self._seconds.sizes or self._seconds.just(rows) is not None

    def of(self, tokens: int) -> float:
        """Return what is known of so many tokens, or of the most below them: what was never tried is tried. 0.0:
        nothing is known."""
        return self._seconds.of(tokens)

    def reading_s(self, tokens: int) -> float:
        """Return how long a drafter will read so many tokens; 0.0: nothing is known."""
        return tokens * self._read_s

    def worth(self, rows: int, gains: Sequence[float], depths: Sequence[int] = ()) -> int:
        """Return how many drafts a step of `rows` should have, where the i-th adds `gains[i]` tokens, the most first.
        All of them as long as no step was measured; none where none without drafts was, or the drafter's time is not
        known."""
        return self.weighed(rows, gains, depths)[0]

    def weighed(self, rows: int, gains: Sequence[float], depths: Sequence[int] = ()) -> tuple[int, float]:
        """Return the same, and the seconds that they save for each token that the step draws. `depths`, where drafts
        take time: the i-th is the so many-th of its row."""
        base = self._seconds.just(rows)
        if not base:
            return (0, 0.0) if self._seconds.sizes else (len(gains), float("inf"))
        if depths and not self._depth_s.sizes:
            return 0, 0.0
        expected, drafting_s, count, best = float(rows), 0.0, 0, rows / base
        asked = Counter[int]()
        for drafts, gain in enumerate(gains, 1):
            expected += gain
            if depths:
                depth = depths[drafts - 1]
                before = self._depth_s.of(asked[depth]) if asked[depth] else 0.0
                asked[depth] += 1
                drafting_s += self._depth_s.of(asked[depth]) - before
            rate = expected / (self.of(rows + drafts) + drafting_s)
            if rate > best:
                count, best = drafts, rate
        return count, base / rows - 1.0 / best


@dataclass(eq=False)
class Drafting:
    """Mutable state: what became of each running request's drafts, what steps last, and what trials have taken. Owner:
    the batch."""

    drafter: Drafter | None
    """None: there are no drafts."""
    most: int
    """Drafts of one row."""
    costs: StepCosts = field(default_factory=StepCosts)
    drafted_tokens: int = 0
    drawn_tokens: int = 0
    """Counted until the shell has taken them, and so are the `outcomes`."""
    read_tokens: int = 0
    """Those that a drafter which takes time has read to catch up, and its seconds: counted in the same way."""
    drafting_s: float = 0.0
    outcomes: list[DraftOutcome] = field(default_factory=list)
    _of: dict[Request, _Guessed] = field(default_factory=dict)
    _right: float = 0.5 * TRUST
    _tried: float = TRUST
    _choices: int = 0
    _proposing_s: float = 0.0
    """What the drafter took for the step that is planned."""
    _is_trial: bool = False
    _all_s: float = 0.0
    _trials_s: float = 0.0

    def awaits(self, requests: Sequence[Request], rows: int, room: int) -> bool:
        """Return True if the next step of `rows`, which has room for so many drafts, had better wait until the tokens
        of `requests` are known, of which drafts can be made then."""
        if self.drafter is None or not requests:
            return False
        able = [(request, self.most) for request in requests]
        if not self.drafter.takes_time:
            return self._choose(rows, self._ranked(able)[:room]) > 0
        return bool(self._wanted(self.drafter, able, rows, room)[0])

    def propose(self, requests: Sequence[tuple[Request, int]], rows: int, room: int) -> dict[Request, list[int]]:
        """Return the drafts of a step of `rows`: for each of `requests` up to as many as stand beside it, and `room` in
        all."""
        if self.drafter is None or not requests or room <= 0:
            return {}
        able = [(request, min(most, self.most)) for request, most in requests]
        if self.drafter.takes_time:
            wanted, self._is_trial = self._wanted(self.drafter, able, rows, room)
            return self._asked_for(wanted)
        told = self.drafter.propose([_asked(*one) for one in able])
        drafts = {request: some for (request, _), some in zip(able, told.drafts, strict=True)}
        ranked = self._ranked([(request, len(some)) for request, some in drafts.items()])[:room]
        if not ranked:
            return {}
        counts = Counter([draft.request for draft in ranked[: self._choose(rows, ranked)]])
        return {request: drafts[request][:count] for request, count in counts.items()}

    def _wanted(
        self, drafter: Drafter, able: Sequence[tuple[Request, int]], rows: int, room: int
    ) -> tuple[dict[Request, int], bool]:
        """Return for which requests drafts are worth the time, and how many; True: or one that is tried."""
        unread = {request: drafter.unread(_asked(request, most)) for request, most in able}
        able = [one for one in able if unread[one[0]] is not None]
        if not able:
            return {}, False
        ranked = self._ranked(able)[:room]
        count, saved_s = self._weighed(rows, ranked)
        chosen = self._or_other_way(count, len(ranked))
        if count and not chosen:
            return {}, False
        wanted: Counter[Request] = Counter()
        for draft in ranked[:chosen]:
            request = draft.request
            left = request.record.max_tokens - request.output_tokens
            if self.costs.reading_s(unread[request] or 0) <= left * saved_s:
                wanted[request] += 1
        if not wanted and self._may_try(rows):
            return {min(able, key=lambda one: unread[one[0]] or 0)[0]: 1}, True
        return wanted, not self.costs.is_measured

    def _asked_for(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        assert self.drafter is not None
        if not wanted:
            return {}
        told = self.drafter.propose([_asked(*one) for one in wanted.items()])
        self.costs.proposed(told)
        self._proposing_s = told.seconds
        self.read_tokens += told.read_tokens
        self.drafting_s += told.seconds
        return {request: drafts for request, drafts in zip(wanted, told.drafts, strict=True) if drafts}

    def lasted(self, rows: int, drafts: int, seconds: float, is_mixed: bool) -> float:
        """Note how long the step took that ended last; `is_mixed`: it computed other tokens too. Return its time
        without what its drafts took before."""
        own_s = max(0.0, seconds - self._proposing_s)
        if not is_mixed:
            self.costs.measured(rows + drafts, own_s)
        self._all_s += seconds
        if self._is_trial:
            longer_s = max(0.0, own_s - self.costs.of(rows)) if drafts else 0.0
            self._trials_s += self._proposing_s + longer_s
        self._proposing_s, self._is_trial = 0.0, False
        return own_s

    def _may_try(self, rows: int) -> bool:
        """Return True if a draft may be tried that is not thought to be worth it. Never before a step without."""
        return self.costs.knows(rows) and self._trials_s <= TRIAL_SHARE * self._all_s

    def _choose(self, rows: int, ranked: Sequence[_Draft]) -> int:
        return self._or_other_way(self._weighed(rows, ranked)[0], len(ranked))

    def _or_other_way(self, count: int, most: int) -> int:
        """Return how many drafts a step has, of up to `most`, of which `count` are worth it."""
        self._choices += 1
        if self._choices % OTHER_WAY:
            return count
        assert self.drafter is not None
        return 0 if count or self.drafter.takes_time else most

    def _weighed(self, rows: int, ranked: Sequence[_Draft]) -> tuple[int, float]:
        assert self.drafter is not None
        depths = [draft.depth for draft in ranked] if self.drafter.takes_time else []
        return self.costs.weighed(rows, [draft.gain for draft in ranked], depths)

    def _ranked(self, able: Sequence[tuple[Request, int]]) -> list[_Draft]:
        """Return all drafts that there may be, what adds the most first; those of a row in their order."""
        ranked = [
            _Draft(gain, depth, request)
            for request, most in able
            for depth, gain in enumerate(self._gains(request, most), 1)
        ]
        return sorted(ranked, key=lambda draft: draft.gain, reverse=True)

    def _guessed(self, request: Request) -> _Guessed:
        if request not in self._of:
            self._of[request] = _Guessed()
        return self._of[request]

    def _gains(self, request: Request, drafts: int) -> list[float]:
        """Return what each of its drafts is likely to add: it counts only where those before it were right."""
        guessed = self._guessed(request)
        share = (guessed.right + TRUST * self._right / self._tried) / (guessed.tried + TRUST)
        return [share**at for at in range(1, drafts + 1)]

    def stepped(self, request: Request, drafted: int, drawn: int) -> None:
        """Take in what became of the drafts of its row, of which there may be none."""
        if self.drafter is None:
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
        if self.drafter is not None:
            self.drafter.forget(request.record.request)
        guessed = self._of.pop(request, None)
        if guessed is not None and guessed.steps:
            self.outcomes.append(DraftOutcome(guessed.drafted, guessed.drawn, guessed.steps))

    def take_outcomes(self) -> list[DraftOutcome]:
        taken, self.outcomes = self.outcomes, []
        return taken


def _asked(request: Request, most: int) -> DraftWanted:
    return DraftWanted(request.record, request.tokens, most)

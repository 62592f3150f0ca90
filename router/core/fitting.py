"""The coefficients of a placement's price, fitted online for each worker: what was predicted, and what happened. Pure.

Workers measure themselves and report it (`engine.messages.Load`); what a request then meets there differs. Fitted are:

    delay      time until a prompt was computed, over what was predicted of it: a factor for each prefill worker, in
               which a prompt counts by the tokens that were computed of it
    exposure   the wait for blocks that computing did not hide, over blocks · s per block: a factor for each decode
               worker, of blocks from its own host and of those from other hosts apart
    step       a line through the reports of all decode workers: what a step takes without rows, and what each row adds;
               and a factor for each worker
    answer     tokens of an answer, of all requests

Prefill workers of a pool are priced as equals until one's speed differs from their median by more than ALIKE, or its
delay is so much longer. What a prompt token takes depends on how full steps are, and what prompts are late by, on who
came beside them: of equals the one that is asked less seems slower, and would be asked less still.

Why prompts count by their work: a worker does not take them in the order in which they came. Those with little to
compute go before others, and end long before they were predicted to; those that they overtake end late, and later. Each
by itself, a line that grows would seem to become quicker, and be sent more. By work the order does not matter, as far
as no prompt is capped: what some wait less, others wait longer (Kleinrock's conservation law). While a line grows,
those that wait longest have not ended yet. So none is taken to be quicker than its pool by it: who is sent less than
others is put right by what ends next, and who is sent more is not.

No request moves a factor by more than FACTOR_STEP, no report the line's slope by more than ROW_STEP, no factor leaves
[1 / MOST, MOST], and no prompt counts for more than MOST usual ones before it, a worker's first by what is usual
elsewhere in its pool: one odd request changes little, and a hundred of them what they should. A worker of which nothing
is known has the median of its pool. Everything is a function of the records that came, in their order.
"""

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from engine.messages import Load, RequestStats

NEWEST, NEWEST_REPORT = 1 / 32, 1 / 256
"""Share of the newest observation in a running mean: of a request, and of a report about steps."""
FACTOR_STEP, ROW_STEP = 1.1, 1.02
MOST = 8.0
ALIKE = 1.25
"""Workers that differ by no more than this factor are priced as equals: steps of few tokens take about so much longer
for each, and the delay of 32 requests is off by about as much."""
FEWEST_REPORTS = 16
"""A step's slope is read off so many reports at least; and where their rows differ (`_LEAST_VARIANCE`, in rows²)."""
_LEAST_VARIANCE = 1.0
ROWS_AT_LEAST = 512.0
"""A row adds at least this part of a step, so that rows count where a step has hidden them so far."""
ASSUMED_ROWS = 64.0
"""Until any worker's slope is known, a row adds this part of a step."""
ASSUMED_ANSWER_TOKENS, MOST_ANSWER_TOKENS = 64.0, 512.0
_LEAST_PREDICTED_S = 1e-6


def bounded(known: float, wanted: float, step: float) -> float:
    """Return `wanted`, or as near to it as `known` may come at once; `known` above zero."""
    return min(max(wanted, known / step), known * step)


class PredictionFactor:
    """How many times longer something takes than predicted. Mutable state: both sums, fading, `usual_weight`, the mean
    of what was observed, 0.0 without any, and the factor."""

    __slots__ = ("_observed", "_predicted", "is_known", "usual_weight", "value")

    def __init__(self) -> None:
        self._observed = self._predicted = self.usual_weight = 0.0
        self.is_known = False
        self.value = 1.0

    def observed(self, predicted_s: float, seconds: float, weight: float = 1.0, others_weight: float = 0.0) -> None:
        """Take in one prediction and what became of it, which counts by its `weight`, above 0. `others_weight`: what is
        usual elsewhere, which the first is measured by; 0.0: nothing is known. Predictions of nothing say nothing."""
        if not predicted_s > _LEAST_PREDICTED_S or not 0.0 <= seconds < float("inf"):
            return
        usual = self.usual_weight or others_weight or weight
        weight = min(weight, MOST * usual)
        self.usual_weight = usual + NEWEST * (weight - usual)
        self.is_known = True
        self._predicted += NEWEST * (weight * predicted_s - self._predicted)
        self._observed += NEWEST * (weight * seconds - self._observed)
        moved = bounded(self.value, self._observed / self._predicted, FACTOR_STEP)
        self.value = min(max(moved, 1.0 / MOST), MOST)


class StepLine:
    """The time of a decode step by its rows, `alone_s + s_per_row · rows`, by least squares over the reports of all
    workers, the latest counting most. Mutable state: the means, and the slope; 0.0 until it is known."""

    def __init__(self) -> None:
        self._reports = 0
        self._rows = self._rows2 = self._seconds = self._seconds_rows = 0.0
        self.s_per_row = 0.0

    @property
    def alone_s(self) -> float:
        return max(self._seconds - self.s_per_row * self._rows, 0.0)

    def step_s(self, rows: int) -> float:
        """Return what a step of so many rows takes; 0.0 until it is known."""
        return self.alone_s + self.s_per_row * rows if self.s_per_row else 0.0

    def measured(self, rows: int, step_s: float) -> None:
        """Take in a report: `rows`, at least 1, ran, and steps took `step_s` each of late."""
        self._reports += 1
        share = max(NEWEST_REPORT, 1 / self._reports)
        self._rows += share * (rows - self._rows)
        self._rows2 += share * (rows * rows - self._rows2)
        self._seconds += share * (step_s - self._seconds)
        self._seconds_rows += share * (rows * step_s - self._seconds_rows)
        variance = self._rows2 - self._rows**2
        if self._reports < FEWEST_REPORTS or variance < _LEAST_VARIANCE:
            return
        slope = (self._seconds_rows - self._seconds * self._rows) / variance
        slope = min(max(slope, self._seconds / ROWS_AT_LEAST), self._seconds / self._rows)
        self.s_per_row = bounded(self.s_per_row, slope, ROW_STEP) if self.s_per_row else slope


class _WorkerFit:
    """What is fitted of one worker: of either role, as much as applies."""

    __slots__ = ("delay", "exposure", "host", "s_per_token", "step_s", "steps", "ways_s")

    def __init__(self, host: int) -> None:
        self.host = host
        self.delay = PredictionFactor()
        self.exposure = PredictionFactor(), PredictionFactor()
        self.steps = PredictionFactor()
        self.s_per_token = self.step_s = 0.0
        self.ways_s = 0.0, 0.0


class Coefficients:
    """Owner: the registry of workers."""

    # Mutable state: the fit of each worker, its host's number, the mean length of answers, the line of steps, and the
    # medians of the pools where they are known to be those of now.

    def __init__(self) -> None:
        self._prefills: dict[str, _WorkerFit] = {}
        self._decodes: dict[str, _WorkerFit] = {}
        self._hosts: dict[str, int] = {}
        self.answer_tokens = ASSUMED_ANSWER_TOKENS
        self._line = StepLine()
        self._medians: _Medians | None = None

    def joined(self, name: str, role: str, host: str) -> None:
        """Begin anew with a worker, which is connected in a new life, and maybe in another role."""
        self.forget(name)
        pool = self._prefills if role == "prefill" else self._decodes
        pool[name] = _WorkerFit(self._hosts.setdefault(host, len(self._hosts)))

    def forget(self, name: str) -> None:
        self._prefills.pop(name, None)
        self._decodes.pop(name, None)
        self._medians = None

    def host(self, name: str) -> int:
        """Return the number of a worker's host, 0 where it is not known."""
        fit = self._fit(name)
        return fit.host if fit else 0

    def reported(self, name: str, load: Load) -> None:
        """Take in a worker's report."""
        self._medians = None
        if (fit := self._prefills.get(name)) is not None:
            fit.s_per_token = load.s_per_token
        elif (fit := self._decodes.get(name)) is not None:
            fit.s_per_token, fit.step_s = load.s_per_prompt_token, load.s_per_token
            if load.running_requests and 0.0 < load.s_per_token < float("inf"):
                self._line.measured(load.running_requests, load.s_per_token)
                fit.steps.observed(self._line.step_s(load.running_requests), load.s_per_token)
            ways: tuple[list[float], list[float]] = [], []
            for peer, seconds in load.s_per_block.items():
                reader = self._prefills.get(peer)
                ways[reader is not None and reader.host != fit.host].append(seconds)
            fit.ways_s = _median(ways[0]), _median(ways[1])

    def ended(self, predicted_s: tuple[float, float] | None, stats: RequestStats) -> None:
        """Take in the account of a request. `predicted_s`: what was predicted by the workers' own figures, without any
        factor, of the time until its prompt is computed and of the time that its blocks travel; None where it did not
        go as it was priced."""
        self._medians = None
        if stats.output_tokens:
            latest = min(float(stats.output_tokens), MOST_ANSWER_TOKENS)
            self.answer_tokens += NEWEST * (latest - self.answer_tokens)
        stages = stats.stages
        reader, fit = self._prefills.get(stats.prefill_worker), self._decodes.get(stats.decode_worker)
        if predicted_s is None or reader is None or fit is None or "prefill_run" not in stages:
            return
        computed = max(stats.prompt_tokens - stats.prefill_cached_tokens, 1)
        late_s = stages.get("prefill_queue", 0.0) + stages["prefill_run"]
        others = 0.0 if reader.delay.is_known else _median(one.delay.usual_weight for one in self._prefills.values())
        reader.delay.observed(predicted_s[0], late_s, computed, others)
        far = reader.host != fit.host
        fit.exposure[far].observed(predicted_s[1], stages.get("migrate", 0.0))

    # ---- what a price is made of

    def s_per_token(self, name: str) -> float:
        """Return the time of a prompt token on a worker, by its own figures; where it has none, the median of its pool,
        and of prefill workers for a decode worker that has read no prompt; 0.0 where nobody has any."""
        fit = self._fit(name)
        return fit.s_per_token if fit is not None and fit.s_per_token else self._pools().s_per_token

    @property
    def usual_s_per_token(self) -> float:
        """The median time of a prompt token over the workers; 0.0 where nobody has any."""
        return self._pools().s_per_token

    def delay(self, name: str) -> float:
        """Return how many times longer than predicted a prompt takes on a prefill worker; 1.0 for a decode worker."""
        fit = self._prefills.get(name)
        if fit is None:
            return 1.0
        return fit.delay.value if fit.delay.is_known else self._pools().delay

    def reading(self, name: str) -> tuple[float, float, int]:
        """Return what the price of a prompt on a worker is made of: `s_per_token`, `delay`, and the number of its host.
        Of a prefill worker each of the first two is its own only where that stands out from its pool: its delay, which
        is chance for the greater part, only where it is longer, and by what goes beyond ALIKE."""
        pools, fit = self._medians or self._pools(), self._prefills.get(name)
        if fit is None:
            return self.s_per_token(name), 1.0, self.host(name)
        s_per_token, delay = pools.s_per_token, pools.delay
        own = fit.s_per_token
        if own and (own > s_per_token * ALIKE or s_per_token > own * ALIKE):
            s_per_token = own
        own = fit.delay.value
        if own > delay * ALIKE and fit.delay.is_known:
            delay = own / ALIKE
        return s_per_token, delay, fit.host

    def step(self, name: str, measured_s: float) -> tuple[float, float]:
        """Return the time of a step of a decode worker without rows, and what each row adds. `measured_s` is that of
        its steps now, all that there is until the line is known; 0.0: it has run none, and has the median of the
        others, or else it would seem to decode in no time."""
        line, fit = self._line, self._decodes.get(name)
        if not line.s_per_row:
            step_s = measured_s or self._pools().step_s
            return step_s, step_s / ASSUMED_ROWS
        factor = fit.steps.value if fit is not None and fit.steps.is_known else 1.0
        return factor * line.alone_s, factor * line.s_per_row

    @property
    def unmeasured_step_s(self) -> float:
        """The time of a step without rows, of a decode worker that has run none."""
        return self._line.alone_s if self._line.s_per_row else self._pools().step_s

    def least_s_per_token(self, name: str) -> float:
        """Return the least time of a prompt token on a worker: by its own figures alone, 0.0 where it has none, and
        without what prompts have taken longer than those say."""
        fit = self._fit(name)
        return fit.s_per_token * min(fit.delay.value, 1.0) if fit is not None else 0.0

    def least_step_s(self, name: str, measured_s: float, rows: int) -> float:
        """Return the least time of a step of a decode worker with one more than `rows`: `measured_s` is that of its
        steps of late, 0.0 where it has run none, and may be of more rows than it has now."""
        alone_s, s_per_row = self.step(name, measured_s)
        return min(measured_s, alone_s + s_per_row * (rows + 1))

    def least_exposure(self, name: str) -> float:
        """Return the least share of the time that blocks travel to a decode worker that is waited for, at most 1."""
        fit = self._decodes.get(name)
        return min(1.0, *(one.value for one in fit.exposure)) if fit is not None else 1.0

    def exposure(self, name: str) -> tuple[float, float]:
        """Return what share of the time that blocks travel to a decode worker is waited for: from its own host, and
        from others."""
        fit, (near, far) = self._decodes.get(name), self._pools().exposure
        if fit is None:
            return near, far
        known = fit.exposure
        return known[0].value if known[0].is_known else near, known[1].value if known[1].is_known else far

    def s_per_block(self, name: str) -> tuple[float, float]:
        """Return the time of a block over a way to a decode worker that it has not measured: the median of those that
        it has, or that others have; from its own host, and from others; 0.0 where there are none."""
        fit, (near, far) = self._decodes.get(name), self._pools().ways_s
        return (fit.ways_s[0] or near, fit.ways_s[1] or far) if fit is not None else (near, far)

    def _fit(self, name: str) -> _WorkerFit | None:
        return self._prefills.get(name) or self._decodes.get(name)

    def _pools(self) -> "_Medians":
        if self._medians is None:
            prefills, decodes = list(self._prefills.values()), list(self._decodes.values())
            near = [fit.exposure[0].value for fit in decodes if fit.exposure[0].is_known]
            far = [fit.exposure[1].value for fit in decodes if fit.exposure[1].is_known]
            self._medians = _Medians(
                _median([fit.s_per_token for fit in prefills]) or _median([fit.s_per_token for fit in decodes]),
                _median([fit.delay.value for fit in prefills if fit.delay.is_known]) or 1.0,
                (_median(near) or 1.0, _median(far) or 1.0),
                (_median([fit.ways_s[0] for fit in decodes]), _median([fit.ways_s[1] for fit in decodes])),
                _median([fit.step_s for fit in decodes]),
            )
        return self._medians


class _Medians(NamedTuple):
    """The medians of the workers of which something is known; `exposure` and `ways_s` from the same host, and from
    others."""

    s_per_token: float
    delay: float
    exposure: tuple[float, float]
    ways_s: tuple[float, float]
    step_s: float


def _median(figures: Iterable[float]) -> float:
    """The median of those that are not zero; 0.0 without any."""
    known = list(filter(None, figures))
    return median(known) if known else 0.0

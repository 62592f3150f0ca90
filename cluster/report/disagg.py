"""Says from what a router has seen of late whether splitting the workers into two pools pays. Pure.

The latest requests, as they came, are played through other arrangements of the same number of workers
(`cluster.report.pools`), at the speeds that the router has fitted. First the present arrangement is played, and speeds
are scaled until its mean times are those that were measured. A verdict is given only where arrangements differ by more
than the report's own error. In that are: how far the present arrangement's score is still off; what another one's would
be were its workers UNSURE times quicker or slower, as those that share a host's memory are when more of them read
prompts at once; and what so few requests can show.

A score is the mean over requests, larger is better: with the objective `goodput`, 1 for a request within both limits;
with `latency`, minus the mean of its two times, each in parts of its limit.
"""

from collections.abc import Callable, Sequence
from math import fsum, sqrt
from statistics import median
from typing import Literal

import msgspec

from cluster.report.pools import PoolSizes, PoolSpeeds, PredictedTimes, simulate
from router.status.traffic import RequestShape, Traffic

Objective = Literal["goodput", "latency"]
FEWEST_REQUESTS = 8
ROUNDS, HALVINGS = 2, 8
"""How often either scale is looked for, and in how many steps: to a hundredth."""
MOST_SCALE = 4.0
"""Speeds are scaled by no more than this: beyond it, the arrangement does not work as it is thought to."""
SURE = 1.64
"""Standard errors that a difference must exceed (one side, 95 %)."""
GOAL = 0.9
"""Where fewer requests keep the limits, that is said beside the verdict."""
UNSURE = 1.1
"""How many times quicker or slower workers may be in another arrangement than they are now."""
MOST_OTHER_SPLITS = 8
NO_DIFFERENCE = "no difference"


class TimeLimits(msgspec.Struct, frozen=True):
    """Seconds to the first token, and of the mean gap between tokens."""

    ttft_s: float
    itl_s: float


class StepBounds(msgspec.Struct, frozen=True):
    """What bounds the prompt tokens of a decode worker's step; that with rows is to last `mixed_step_s` at most."""

    mixed_step_s: float
    chunk_tokens: int
    block_tokens: int


class ArrangementForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What requests would have met. Milliseconds of the mean; `gain` is the score above that of the present
    arrangement, `error` how far that may be wrong."""

    name: str
    prefill: int
    decode: int
    is_now: bool
    score: float
    ttft_ms: float
    itl_ms: float
    within_share: float
    gain: float
    error: float

    @property
    def is_better(self) -> bool:
        return self.gain > self.error


class DisaggReport(msgspec.Struct, frozen=True, kw_only=True):
    """`verdict`: "split", "one pool" or "no difference", of the best arrangement of either kind. `best` names the best
    of all, splits with local prefill among them, if it is surely better than the present one, else that. `regret` is
    what the present one gives away by the objective, 0.0 where nothing is surely better; `self_error` how far its own
    score is predicted wrong; `within_share` the requests that kept both limits, as measured. The requests of the
    `silent` routers are not among them."""

    objective: Objective
    limits: TimeLimits
    requests: int
    now: str
    measured: float
    within_share: float
    self_error: float
    verdict: str
    best: str
    regret: float
    forecasts: list[ArrangementForecast]
    silent: dict[str, str] = {}


class TooLittleTrafficError(Exception):
    """There is nothing to judge by yet; the message says what is missing."""


def report(
    traffic: Traffic, bounds: StepBounds, limits: TimeLimits, objective: Objective = "goodput", last: int = 0
) -> DisaggReport:
    """Judge by the `last` requests, or by all that are known. Raises TooLittleTrafficError."""
    shapes = sorted(traffic.shapes[-last:], key=lambda shape: shape.arrived_s)
    if len(shapes) < FEWEST_REQUESTS:
        raise TooLittleTrafficError(f"{len(shapes)} requests have ended well of late; {FEWEST_REQUESTS} are needed")
    total = traffic.prefill_workers + traffic.decode_workers
    if total < 2 or not traffic.decode_workers:
        raise TooLittleTrafficError("two workers are needed for two pools")
    now = PoolSizes(traffic.prefill_workers, traffic.decode_workers, _is_auto(traffic))
    measured = [PredictedTimes(shape.ttft_s, shape.itl_s) for shape in shapes]
    speeds = calibrated(shapes, now, _speeds(shapes, traffic, bounds))

    def played(sizes: PoolSizes, slower: float) -> _Scored:
        return _Scored(simulate(shapes, sizes, _scaled(speeds, slower, slower)), limits, objective)

    scored = {now: played(now, 1.0)}
    for sizes in arrangements(now)[1:]:
        one = played(sizes, 1.0)
        one.slack = max(abs(played(sizes, slower).mean - one.mean) for slower in (UNSURE, 1.0 / UNSURE))
        scored[sizes] = one
    present, truth = scored[now], _Scored(measured, limits, objective)
    self_error = abs(present.mean - truth.mean)
    forecasts = [_forecast(sizes, one, present, self_error, sizes == now) for sizes, one in scored.items()]
    forecasts.sort(key=lambda one: (-one.score, not one.is_now))
    better = [one for one in forecasts if one.is_better]
    running = next(one for one in forecasts if one.is_now)
    best = better[0] if better else running
    # Split with local prefill is neither: it becomes the one or the other as traffic asks.
    split, whole = (_best(scored, is_split) for is_split in (True, False))
    return DisaggReport(
        objective=objective,
        limits=limits,
        requests=len(shapes),
        now=str(now),
        measured=truth.mean,
        within_share=fsum(truth.within) / len(truth.within),
        self_error=self_error,
        verdict=_verdict(split, whole, self_error),
        best=best.name,
        regret=max(best.gain, 0.0),
        forecasts=forecasts,
        silent=traffic.silent,
    )


def arrangements(now: PoolSizes) -> list[PoolSizes]:
    """Return what as many workers can be made into: first the present arrangement."""
    total = now.prefill + now.decode
    splits = sorted(range(1, total), key=lambda prefill: abs(prefill - (now.prefill or total // 2)))
    found = [now, PoolSizes(0, total), *(PoolSizes(n, total - n) for n in splits[:MOST_OTHER_SPLITS])]
    if now.prefill:
        found.append(PoolSizes(now.prefill, now.decode, not now.is_auto))
    return list(dict.fromkeys(found))


def calibrated(shapes: Sequence[RequestShape], now: PoolSizes, speeds: PoolSpeeds) -> PoolSpeeds:
    """Return the speeds scaled until the present arrangement takes, on average, the times that were measured: those of
    prompts by the time to first token, those of steps by the gaps between tokens, which both grow with them."""
    wanted_s = fsum(shape.ttft_s for shape in shapes), fsum(shape.itl_s for shape in shapes)

    def found_s(tokens: float, steps: float) -> tuple[float, float]:
        times = simulate(shapes, now, _scaled(speeds, tokens, steps))
        return fsum(one.ttft_s for one in times), fsum(one.itl_s for one in times)

    def tokens_for(steps: float) -> float:
        return _bisected(lambda tokens: found_s(tokens, steps)[0] < wanted_s[0])

    def steps_for(tokens: float) -> float:
        return _bisected(lambda steps: found_s(tokens, steps)[1] < wanted_s[1])

    tokens, steps = 1.0, 1.0
    for _ in range(ROUNDS):
        tokens = tokens_for(steps)
        steps = steps_for(tokens)
    return _scaled(speeds, tokens, steps)


def _scaled(speeds: PoolSpeeds, tokens: float, steps: float) -> PoolSpeeds:
    """Return the speeds with prompts and steps so many times slower."""
    times = {"token_s": speeds.token_s * tokens, "alone_s": speeds.alone_s * steps, "row_s": speeds.row_s * steps}
    return msgspec.structs.replace(speeds, **times)


def _bisected(is_below: Callable[[float], bool]) -> float:
    """Return the scale, within MOST_SCALE either way, below which `is_below` is true and above which it is not."""
    low, high = 1.0 / MOST_SCALE, MOST_SCALE
    for _ in range(HALVINGS):
        middle = sqrt(low * high)
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return sqrt(low * high)


def verdict_of(
    split: Sequence[PredictedTimes],
    whole: Sequence[PredictedTimes],
    limits: TimeLimits,
    objective: Objective = "goodput",
) -> str:
    """Return the verdict on times that were measured: with two pools, and with one, for the same requests in the same
    order."""
    return _verdict(_Scored(split, limits, objective), _Scored(whole, limits, objective), 0.0)


def text(told: DisaggReport) -> str:
    """Return the report as people read it."""
    unit = "requests within limits" if told.objective == "goodput" else "of the limits, less is better"
    lines = [
        f"{told.requests} requests; now: {told.now}; limits: first token {told.limits.ttft_s:g} s, mean gap "
        f"{told.limits.itl_s * 1e3:g} ms; score: {_score(told, told.measured)} {unit} measured, predicted within "
        f"{_score(told, told.self_error)}"
    ]
    width = max(len(one.name) for one in told.forecasts)
    for one in told.forecasts:
        mark = "now" if one.is_now else f"{'+' if one.gain >= 0 else '-'}{_score(told, abs(one.gain))}"
        sure = "" if one.is_now else f" (± {_score(told, one.error)})"
        lines.append(
            f"  {one.name:{width}}  first token {one.ttft_ms:8,.0f} ms, gap {one.itl_ms:6.1f} ms, "
            f"within limits {one.within_share:4.0%}  {mark}{sure}"
        )
    lines.append(
        {
            NO_DIFFERENCE: "no difference between a split and one pool that these requests could show",
            "split": "splitting pays",
            "one pool": "splitting does not pay: one pool does better",
        }[told.verdict]
    )
    if told.regret:
        lines.append(f"best: {told.best}; regret of what runs now: {_score(told, told.regret)}")
    else:
        lines.append("nothing is surely better than what runs now")
    if told.within_share < GOAL:
        lines.append(
            f"only {told.within_share:.0%} of the requests kept both limits: another split of as many workers is "
            "not all that it takes; `headrace top` names the longest stage"
        )
    lines += [f"{name} could not be asked, its requests are left out: {why}" for name, why in told.silent.items()]
    return "\n".join(lines)


def _score(told: DisaggReport, score: float) -> str:
    return f"{score:.0%}" if told.objective == "goodput" else f"{abs(score):.2f}"


class _Scored:
    """The scores of one arrangement, request by request. `slack`: how far their mean may be off beside what was found
    of the present arrangement."""

    def __init__(self, times: Sequence[PredictedTimes], limits: TimeLimits, objective: Objective) -> None:
        self.times = times
        self.slack = 0.0
        self.within = [float(one.ttft_s <= limits.ttft_s and one.itl_s <= limits.itl_s) for one in times]
        if objective == "goodput":
            self.scores = self.within
        else:
            self.scores = [-(one.ttft_s / limits.ttft_s + one.itl_s / limits.itl_s) / 2 for one in times]
        self.mean = fsum(self.scores) / len(self.scores)

    def gain(self, over: "_Scored", self_error: float) -> tuple[float, float]:
        """Return by how much its score is above another's for the same requests, and how far that may be wrong: what so
        few requests leave open, what the prediction has missed of the present arrangement, and their slack."""
        differences = [one - other for one, other in zip(self.scores, over.scores, strict=True)]
        mean, count = fsum(differences) / len(differences), len(differences)
        variance = fsum((one - mean) ** 2 for one in differences) / max(count - 1, 1)
        if self is over:
            return 0.0, 0.0
        return mean, sqrt(SURE**2 * variance / count + self_error**2 + self.slack**2 + over.slack**2)


def _best(scored: dict[PoolSizes, _Scored], is_split: bool) -> _Scored:
    kind = [one for sizes, one in scored.items() if bool(sizes.prefill) == is_split and not sizes.is_auto]
    return max(kind, key=lambda one: one.mean)


def _verdict(split: _Scored, whole: _Scored, self_error: float) -> str:
    gain, error = split.gain(whole, self_error)
    if abs(gain) <= error:
        return NO_DIFFERENCE
    return "split" if gain > 0 else "one pool"


def _forecast(
    sizes: PoolSizes, one: _Scored, present: _Scored, self_error: float, is_now: bool
) -> ArrangementForecast:
    gain, error = one.gain(present, self_error)
    count = len(one.times)
    return ArrangementForecast(
        name=str(sizes),
        prefill=sizes.prefill,
        decode=sizes.decode,
        is_now=is_now,
        score=one.mean,
        ttft_ms=1e3 * fsum(times.ttft_s for times in one.times) / count,
        itl_ms=1e3 * fsum(times.itl_s for times in one.times) / count,
        within_share=fsum(one.within) / count,
        gain=gain,
        error=error,
    )


def _speeds(shapes: Sequence[RequestShape], traffic: Traffic, bounds: StepBounds) -> PoolSpeeds:
    besides = [shape.ttft_s - shape.queue_s - shape.prefill_s - shape.migrate_s for shape in shapes]
    moved = [shape.migrate_s for shape in shapes if not shape.is_local]
    token_s = traffic.s_per_token or median(
        shape.prefill_s / max(shape.prompt_tokens - shape.prefill_cached_tokens, 1) for shape in shapes
    )
    gap_s = median(shape.itl_s for shape in shapes)
    is_fitted = traffic.alone_s + traffic.s_per_row > 0.0
    return PoolSpeeds(
        token_s=token_s,
        alone_s=traffic.alone_s if is_fitted else gap_s,
        row_s=traffic.s_per_row,
        migrate_s=median(moved) if moved else 0.0,
        overhead_s=max(median(besides), 0.0),
        mixed_step_s=bounds.mixed_step_s,
        chunk_tokens=bounds.chunk_tokens,
        least_tokens=bounds.block_tokens,
    )


def _is_auto(traffic: Traffic) -> bool:
    return traffic.local_prefill == "auto" and traffic.prefill_workers > 0

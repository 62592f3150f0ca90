"""One run of the routing benchmark: a workload at a load, a policy, a cluster's shape and its faults."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks import traces
from benchmarks.routing import bounds
from benchmarks.routing.cluster import NO_FAULTS, RoutingFaults, SimulatedCluster
from benchmarks.routing.curve import WEIGHTED
from benchmarks.routing.formulas import FORMULAS, formula
from benchmarks.routing.workers import ClusterShape, RoutingOutcome
from benchmarks.routing.workloads import GENERATED, PUBLISHED, Workload, in_order, of_trace, stretched
from cluster.bench.traces import read
from router.core.policies import POLICIES, make_policy
from router.core.policy import RoutingPolicy

MADE = "made"
"""The workload that `benchmarks.traces` makes."""
NAMES = (*POLICIES, *FORMULAS)
"""The policies that are compared: the router's, and peers' by formula."""
KNOWN = (*NAMES, *WEIGHTED)
"""Those that may be named."""


SPAN_ERROR = 0.01
"""Share of the time over which sessions begin."""


@dataclass(frozen=True, slots=True)
class RoutingCase:
    """One run. `source` is a workload's name or a trace's path."""

    source: str
    requests: int
    seed: int
    load: float
    policy: str
    shape: ClusterShape
    faults: RoutingFaults = NO_FAULTS


def workload(source: str, requests: int, seed: int) -> Workload:
    """Return the sessions of a case. Raises OSError for a trace that cannot be read."""
    if make := (GENERATED | PUBLISHED).get(source):
        return make(requests, seed)
    if source == MADE:
        return of_trace(traces.make(traces.TraceShape(rows=requests), seed))
    return of_trace(read(Path(source))[:requests])


def at_load(sessions: Workload, load: float, shape: ClusterShape) -> Workload:
    """Return the sessions so far apart that prefill would be busy for `load` of the time with the hits of one
    least-recently-used cache as large as all prefill workers' together, all tiers of them. Sessions that are closer to
    each other ask between each other's turns: where that cache is small it finds less."""
    workers = shape.prefill - 1 + 1 / shape.slow
    tokens = sum(turn.prompt_tokens for session in sessions for turn in session.turns)

    def busy_s(spread: Workload) -> float:
        missed = 1 - bounds.lru(in_order(spread), shape.cached_blocks)
        return tokens * missed * shape.speeds.prefill_token_s / workers

    span_s = busy_s(sessions) / load
    spread = stretched(sessions, span_s)
    # A longer span finds more, so that less is to be done: the span sought lies between these two, mostly one.
    shorter_s, longer_s = sorted((span_s, busy_s(spread) / load))
    while longer_s - shorter_s > SPAN_ERROR * longer_s:
        span_s = (shorter_s + longer_s) / 2
        spread = stretched(sessions, span_s)
        if busy_s(spread) / load > span_s:
            shorter_s = span_s
        else:
            longer_s = span_s
    return spread


def run(case: RoutingCase) -> RoutingOutcome:
    """Serve a case's sessions; deterministic."""
    return run_with(case, lambda: named(case.policy, case.seed))


def run_with(case: RoutingCase, make_policy: Callable[[], RoutingPolicy]) -> RoutingOutcome:
    """Serve a case's sessions with a policy of another kind than those that have a name."""
    sessions = at_load(workload(case.source, case.requests, case.seed), case.load, case.shape)
    return SimulatedCluster(case.shape, make_policy, case.faults, case.seed).run(sessions)


def cached_at_best(outcome: RoutingOutcome, shape: ClusterShape) -> float:
    """Return the share of prompt tokens that one least-recently-used cache as large as all prefill workers' together,
    all tiers of them, finds, asked in the order in which the prompts of a run came."""
    return bounds.lru(outcome.came, shape.cached_blocks)


def named(policy: str, seed: int) -> RoutingPolicy:
    """Return the policy of this name. Raises ValueError for an unknown one."""
    if policy in WEIGHTED:
        return WEIGHTED[policy](Random(seed))
    return formula(policy, seed) if policy in FORMULAS else make_policy(policy, seed)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def gap_ms(outcome: RoutingOutcome, share: float) -> int:
    """Return the milliseconds between tokens that `share` of them do not exceed."""
    left = share * sum(outcome.gaps.values())
    for gap in sorted(outcome.gaps):
        left -= outcome.gaps[gap]
        if left <= 0:
            return gap
    return 0


def around_restart(outcome: RoutingOutcome) -> tuple[float, float]:
    """Return the share of cached tokens of the prompts computed before the router was restarted, and of as many after
    it, a tenth of all each; 0.0 and 0.0 where it was not."""
    if outcome.restarted_s is None:
        return 0.0, 0.0
    some = max(1, len(outcome.found) // 10)
    before = [found for found in outcome.found if found[0] <= outcome.restarted_s][-some:]
    after = [found for found in outcome.found if found[0] > outcome.restarted_s][:some]
    early, late = (
        sum(cached for _, cached, _ in part) / max(1, sum(tokens for _, _, tokens in part)) for part in (before, after)
    )
    return early, late

"""The search for the largest load that a server bears: which one to try next. Pure.

It takes for granted that a server which misses at one load misses at every larger one.
"""

import math

import msgspec

from cluster.bench.slo import Slo
from cluster.bench.workloads import Workload


class SearchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe must reach (`attainment`, a share of requests), how close the ends of the interval must come
    (`tolerance`, a share of the load), the largest load to try, and the least that a probe lasts."""

    attainment: float
    tolerance: float
    most: float
    probe_s: float

    def check(self) -> None:
        """Raises ValueError naming what is out of range."""
        if not 0 < self.attainment <= 1:
            raise ValueError("the attainment must be above 0 and at most 1")
        if not 0 < self.tolerance <= 1:
            raise ValueError("the tolerance must be above 0 and at most 1")
        if not 0 < self.probe_s < math.inf:
            raise ValueError("a probe must last a number of seconds above zero")
        if not 0 < self.most < math.inf:
            raise ValueError("the largest rate must be above zero and finite")


class RateSearch:
    """Doubles the load from `lowest` until one misses, then bisects by ratio. Loads are numbers of any unit.

    Mutable state: the largest load that passed, and the smallest that missed.
    """

    def __init__(self, lowest: float, plan: SearchPlan) -> None:
        self._lowest = lowest
        self._plan = plan
        self.passed: float | None = None
        self.missed: float | None = None

    def next_load(self) -> float | None:
        """Return the next load to try; None when the search is over.

        Three cases: 1 nothing has passed: the lowest, once; 2 nothing has missed: twice as much, up to the largest
        allowed; 3 the middle, by ratio, until the ends are close.
        """
        if self.passed is None:
            return self._lowest if self.missed is None else None
        if self.missed is None:
            return min(2 * self.passed, self._plan.most) if self.passed < self._plan.most else None
        if self.missed <= self.passed * (1 + self._plan.tolerance):
            return None
        return math.sqrt(self.passed * self.missed)

    def record(self, load: float, did_pass: bool) -> None:
        """Take what the probe of `next_load` showed."""
        if did_pass:
            self.passed = load
        else:
            self.missed = load


def long_enough_s(slo: Slo, attainment: float, tolerance: float, workload: Workload) -> float:
    """Return how many seconds a probe must last to be believed.

    A server that is asked `tolerance` too much falls behind by that much of the time gone by. To miss, it must be
    behind by the limit while a share of more than 1 - `attainment` is still to come. A chat's rate is reached once
    the first chats are at their last turns.
    """
    limit_s = max(slo.ttft_s or 0.0, slo.e2e_s or 0.0)
    return max(30.0, limit_s / (attainment * tolerance), 3 * (workload.turns - 1) * workload.think_s)

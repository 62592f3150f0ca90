"""The search for a server's goodput: probes of an open loop at one rate after another, until its limit is known."""

from collections.abc import Callable, Sequence
from math import ceil

import msgspec

from access.client import ClientCredentials
from cluster.bench.driver import Level, LoadGenerator, LoadPlan
from cluster.bench.search import RateSearch
from cluster.bench.targets import LoadTarget, open_target
from cluster.bench.traces import TraceRow


class SearchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found; its probes are the report's levels, in their order. Loads are requests per second, or, with
    a trace, speeds.

    `passed` is the largest load that kept the limits, None where even the lowest missed them; `missed` the smallest
    that did not, None where the largest allowed still passed. `stopped` says why the search ended early, if it did.
    """

    passed: float | None
    missed: float | None
    stopped: str


async def find(
    plan: LoadPlan,
    credentials: ClientCredentials | None = None,
    rows: Sequence[TraceRow] = (),
    told: Callable[[Level], None] = lambda level: None,
) -> tuple[list[Level], SearchOutcome]:
    """Warm up and search; `told` hears of each probe as it ends. Raises `ApiError` if the warm-up fails."""
    target = open_target(plan.target, plan.address, credentials)
    try:
        return await search(target, plan, rows, told)
    finally:
        await target.close()


async def search(
    target: LoadTarget, plan: LoadPlan, rows: Sequence[TraceRow], told: Callable[[Level], None]
) -> tuple[list[Level], SearchOutcome]:
    """Do what `find` does, on a target that is open. The plan has one load, at which the search begins."""
    assert plan.search is not None and plan.slo is not None
    generator = LoadGenerator(target, plan, rows)
    await generator.warm_up()
    rates = RateSearch(plan.loads[0], plan.search)
    probes: list[Level] = []
    stopped = ""
    while not stopped and (load := rates.next_load()) is not None:
        probe = await generator.at_load(load, max(plan.requests, ceil(load * plan.search.probe_s)))
        assert probe.slo is not None
        rates.record(load, probe.slo.share >= plan.search.attainment)
        probes.append(probe)
        told(probe)
        if probe.summary.failed == probe.summary.requests:
            # A server that is gone misses at every rate, which says nothing of the rates.
            code = next(iter(probe.summary.errors))
            stopped = f"every request failed at {probe.name}: {code}: {probe.messages[code]}"
    return probes, SearchOutcome(passed=rates.passed, missed=rates.missed, stopped=stopped)

"""Compares routing policies on one trace after another, in simulated time: `python -m benchmarks.routing`.

The real router core and the real order of prefill, over exact least-recently-used caches of the real kind, serve open
and per-session closed arrivals (`benchmarks.routing.cluster`, `benchmarks.routing.workloads`). A load of 0.8 spaces the
sessions so that a cluster with the hits of one cache as large as all prefill workers' together would be busy for 0.8 of
the time. Hits are counted where prompts are computed, and compared with that cache's (`of LRU`); times to first token
(TTFT) in simulated seconds, and those of the best policy in the same place (`of best`). `--decision` times decisions
of a router of as many workers besides, by CPU (`benchmarks.decision`).

    python -m benchmarks.routing --trace mooncake.jsonl.xz --workload hot --workload chat --seeds 1,2,3
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean

from benchmarks import decision, output
from benchmarks.routing import bounds
from benchmarks.routing.cluster import RoutingFaults
from benchmarks.routing.lower_tiers import TierShape
from benchmarks.routing.runs import (
    KNOWN,
    MADE,
    NAMES,
    RoutingCase,
    around_restart,
    at_load,
    cached_at_best,
    gap_ms,
    percentile,
    run,
    workload,
)
from benchmarks.routing.workers import ClusterShape, RoutingOutcome
from benchmarks.routing.workloads import BLOCK, GENERATED, PUBLISHED, in_order
from router.core.policies import POLICIES

PROMPT_BLOCKS, POOL_BLOCKS, DECISIONS = 512, 2000, 1000
"""The blocks of a prompt and of each worker, and how many prompts there are, for `--decision`."""


def lines(cases: Sequence[RoutingCase], outcomes: Iterable[RoutingOutcome]) -> list[output.Line]:
    """Return one line a case. `of best` compares it with the policies of the same place, seed and load."""
    done = list(zip(cases, outcomes, strict=True))
    best: dict[tuple[str, int, float], float] = {}
    for case, outcome in done:
        place = (case.source, case.seed, case.load)
        if not outcome.diverged:
            best[place] = min(best.get(place, float("inf")), fmean(outcome.ttft_s))
    told: list[output.Line] = []
    for case, outcome in done:
        hits, most = outcome.hit_tokens / outcome.prompt_tokens, cached_at_best(outcome, case.shape)
        mean_s = fmean(outcome.ttft_s)
        before, after = around_restart(outcome)
        told.append(
            {
                "workload": Path(case.source).name.partition(".")[0],
                "seed": case.seed,
                "load": case.load,
                "policy": case.policy,
                "hits": hits,
                "of LRU": hits / most if most else 1.0,
                "TTFT mean s": mean_s,
                "of best": mean_s / best.get((case.source, case.seed, case.load), mean_s),
                "p50 s": percentile(outcome.ttft_s, 0.5),
                "p99 s": percentile(outcome.ttft_s, 0.99),
                "ITL p99 ms": gap_ms(outcome, 0.99),
                "busy": outcome.busy_s / outcome.span_s / case.shape.prefill,
                "failed": outcome.failed,
                **{
                    f"from {tier}": blocks * BLOCK / outcome.prompt_tokens
                    for tier, blocks in outcome.loaded_blocks.items()
                },
                **({"diverged": int(outcome.diverged)} if any(other.diverged for _, other in done) else {}),
                **({"reports lost": outcome.reports_lost} if case.faults.reports_lost else {}),
                **({"before restart": before, "after": after} if case.faults.restart_at else {}),
            }
        )
    return told


def limits(
    sources: Sequence[str], seeds: Sequence[int], loads: Sequence[float], requests: int, shape: ClusterShape
) -> list[output.Line]:
    """Return what caches without any routing would find if answers took no time, a line for each workload, seed and
    load."""
    told: list[output.Line] = []
    for source, seed, load in product(sources, seeds, loads):
        turns = list(in_order(at_load(workload(source, requests, seed), load, shape)))
        told.append(
            {
                "workload": Path(source).name.partition(".")[0],
                "seed": seed,
                "load": load,
                "requests": len(turns),
                "tokens a prompt": fmean(turn.prompt_tokens for turn in turns),
                "infinite": bounds.infinite(turns),
                "Belady": bounds.belady(turns, shape.cached_blocks),
                "LRU": bounds.lru(turns, shape.cached_blocks),
            }
        )
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    parser, usual = output.parser(__doc__), ClusterShape()
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a file in Mooncake's form")
    parser.add_argument("--workload", action="append", default=[], choices=[*GENERATED, *PUBLISHED, MADE])
    parser.add_argument("--requests", type=int, default=4000, help="of each workload, and at most of each trace")
    parser.add_argument("--seeds", type=_numbers(int), default=[1], metavar="N,...")
    parser.add_argument("--load", type=_numbers(float), default=[0.5, 0.8, 0.95], metavar="SHARE,...")
    parser.add_argument("--policies", type=_names, default=list(NAMES), metavar="NAME,...")
    parser.add_argument("--workers", type=int, help="of both kinds; half of them prefill if neither is given")
    parser.add_argument("--prefill", type=int, help="prefill workers")
    parser.add_argument("--decode", type=int, help="decode workers")
    parser.add_argument("--capacity-blocks", type=int, default=usual.prefill_blocks, help="of one prefill worker")
    parser.add_argument("--decode-blocks", type=int, default=usual.decode_blocks, help="of one decode worker")
    parser.add_argument("--host-blocks", type=int, default=0, help="of one prefill worker's host tier")
    parser.add_argument("--disk-blocks", type=int, default=0, help="of one prefill worker's disk tier")
    parser.add_argument("--routers", type=int, default=1, help="which prompts reach in turn")
    parser.add_argument("--slow", type=float, default=1.0, help="how much slower the first prefill worker is")
    parser.add_argument("--reports-lost", type=float, default=0.0, help="share of workers' reports that never arrive")
    parser.add_argument("--restart-at", type=float, default=0.0, help="restart the router after this share of prompts")
    parser.add_argument("--untold", action="store_true", help="workers tell no router what it has not placed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--decision", action="store_true", help="time decisions besides, of the first of the policies")
    options = parser.parse_args(arguments)
    prefill, decode = _pools(options.workers, options.prefill, options.decode)
    if min(prefill, decode) < 1 or options.workers not in (None, prefill + decode):
        parser.error(f"{prefill} prefill and {decode} decode workers: not --workers, or none of a kind")
    if options.decision and options.policies[0] not in POLICIES:
        parser.error(f"--decision times the first policy, and {options.policies[0]} is a formula of the benchmark")
    sources = [*map(str, options.trace), *options.workload] or list(GENERATED)
    shape = ClusterShape(
        prefill=prefill,
        decode=decode,
        prefill_blocks=options.capacity_blocks,
        decode_blocks=options.decode_blocks,
        slow=options.slow,
        tiers=TierShape(options.host_blocks, options.disk_blocks),
        routers=options.routers,
    )
    faults = RoutingFaults(options.reports_lost, options.restart_at, not options.untold)
    cases = [
        RoutingCase(source, options.requests, seed, load, policy, shape, faults)
        for source in sources
        for seed in options.seeds
        for load in options.load
        for policy in options.policies
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(run, cases))
    results = {
        "What caches could find": limits(sources, options.seeds, options.load, options.requests, shape),
        "What policies found": lines(cases, outcomes),
    }
    if options.decision:
        results["Decisions, CPU and wall"] = _decisions(prefill + decode, options.policies[0])
    output.tell(options, "routing", results)
    return 0


def _pools(workers: int | None, prefill: int | None, decode: int | None) -> tuple[int, int]:
    """Return how many prefill and how many decode, where any may be left out."""
    usual = ClusterShape()
    if workers is None:
        return usual.prefill if prefill is None else prefill, usual.decode if decode is None else decode
    if prefill is None:
        prefill = workers // 2 if decode is None else workers - decode
    return prefill, workers - prefill if decode is None else decode


def _decisions(workers: int, policy: str) -> list[output.Line]:
    figures = decision.measure(workers, PROMPT_BLOCKS, POOL_BLOCKS, DECISIONS, policy)
    return [{"what": what, **spent} for what, spent in figures.items() if isinstance(spent, dict)]


def _numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    return lambda text: [kind(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in KNOWN:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(KNOWN)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())

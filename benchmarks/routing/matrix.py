"""Holds `least-cost` to its goals against every policy, workload, load and seed: `python -m benchmarks.routing.matrix`.

Every run is a line of `--out`, and none is made twice: what was stopped goes on where it was, and `--seconds` ends a
part of it after a run. Runs go seed by seed, so that what there is can be compared at any time. The table has a line
for each workload and load, over the seeds for which every policy has been run:

    hits    hits over those of one least-recently-used cache as large as all prefill workers' together, asked in the
            order in which the run's prompts came: at least 0.97, at 0.9 and more of load 0.94; asked only where that
            cache finds 5 to 95 % of what an infinite one finds
    mean    mean time to first token over that of the best other policy's: at most 1.02
    p99     the same of its 99th percentile: at most 1.05
    ITL     p99 of the milliseconds between tokens: no more than that of the other policy with the best mean

`busy` is the share of the time for which prefill has worked: below the load where sessions think for long beside the
time over which they begin, or where hits are better than the bound. A policy whose queue diverges
(`benchmarks.routing.cluster.PATIENCE_S`) is the best at nothing. Beside the generated workloads, `slow` is `chat` where
the first prefill worker is three times slower.

    python -m benchmarks.routing.matrix --trace mooncake.jsonl.xz --out matrix.jsonl --seeds 21,22,23,24,25
"""

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks import output
from benchmarks.routing import bounds
from benchmarks.routing.__main__ import _names, _numbers
from benchmarks.routing.runs import NAMES, RoutingCase, cached_at_best, gap_ms, percentile, run
from benchmarks.routing.workers import ClusterShape
from benchmarks.routing.workloads import GENERATED

OURS = "least-cost"
SLOW, TIMES_SLOWER = "slow", 3.0
"""`chat` where the first prefill worker takes so many times as long."""
FULL_LOAD = 0.9
LEAST_HITS, LEAST_HITS_FULL, MOST_MEAN, MOST_P99 = 0.97, 0.94, 1.02, 1.05
LEAST_BOUND, MOST_BOUND = 0.05, 0.95


class MatrixRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one run gave. Shares of prompt tokens; simulated seconds."""

    workload: str
    requests: int
    seed: int
    load: float
    policy: str
    hits: float
    lru: float
    infinite: float
    mean_s: float
    p50_s: float
    p99_s: float
    itl_p99_ms: int
    busy: float
    failed: int
    diverged: bool
    took_s: float
    capacity: int = ClusterShape().prefill_blocks

    @property
    def key(self) -> tuple[str, int, int, float, str, int]:
        return self.workload, self.requests, self.seed, self.load, self.policy, self.capacity


Place = tuple[str, float]
"""A workload and a load."""


def cases(
    sources: Sequence[str],
    requests: int,
    seeds: Sequence[int],
    loads: Sequence[float],
    policies: Sequence[str],
    capacity: int = ClusterShape().prefill_blocks,
) -> Iterator[tuple[str, RoutingCase]]:
    """Go over all runs, seed by seed; each with its workload's name. A trace is the same for each seed but for lots."""
    for seed in seeds:
        for source in sources:
            slow = TIMES_SLOWER if source == SLOW else 1.0
            shape = replace(ClusterShape(), slow=slow, prefill_blocks=capacity)
            for load in loads:
                for policy in policies:
                    real = "chat" if source == SLOW else source
                    name = Path(source).name.partition(".")[0]
                    yield name, RoutingCase(real, requests, seed, load, policy, shape)


def measured(name: str, case: RoutingCase) -> MatrixRun:
    began_s = time.process_time()
    outcome = run(case)
    return MatrixRun(
        workload=name,
        requests=case.requests,
        seed=case.seed,
        load=case.load,
        policy=case.policy,
        hits=outcome.hit_tokens / max(1, outcome.prompt_tokens),
        lru=cached_at_best(outcome, case.shape),
        infinite=bounds.infinite(outcome.came),
        mean_s=fmean(outcome.ttft_s or [0.0]),
        p50_s=percentile(outcome.ttft_s or [0.0], 0.5),
        p99_s=percentile(outcome.ttft_s or [0.0], 0.99),
        itl_p99_ms=gap_ms(outcome, 0.99),
        busy=outcome.busy_s / outcome.span_s / case.shape.prefill,
        failed=outcome.failed,
        diverged=outcome.diverged,
        took_s=time.process_time() - began_s,
        capacity=case.shape.prefill_blocks,
    )


def fill(out: Path, todo: Iterable[tuple[str, RoutingCase]], until_s: float) -> list[MatrixRun]:
    """Make the runs that `out` lacks, until the monotonic time `until_s`; return all that are asked for and there."""
    known = {made.key: made for made in read(out)}
    found: list[MatrixRun] = []
    with out.open("ab") as file:
        for name, case in todo:
            made = known.get((name, case.requests, case.seed, case.load, case.policy, case.shape.prefill_blocks))
            if made is None and time.monotonic() < until_s:
                made = measured(name, case)
                file.write(msgspec.json.encode(made) + b"\n")
                file.flush()
            if made is not None:
                found.append(made)
    return found


def read(out: Path) -> list[MatrixRun]:
    """Return the runs of a file; a last line that was torn is cut off."""
    if not out.exists():
        return []
    whole = out.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if kept != whole:
        out.write_bytes(kept)
    return [msgspec.json.decode(line, type=MatrixRun) for line in kept.splitlines()]


def goals(runs: Sequence[MatrixRun], policies: Sequence[str], ours: str = OURS) -> list[output.Line]:
    """Return a line for each workload and load that some seed is complete for, and at the end how many were met."""
    told: list[output.Line] = []
    places: dict[Place, dict[int, dict[str, MatrixRun]]] = {}
    for made in runs:
        places.setdefault((made.workload, made.load), {}).setdefault(made.seed, {})[made.policy] = made
    for (name, load), seeds in places.items():
        whole = [by_policy for by_policy in seeds.values() if set(policies) <= by_policy.keys()]
        if whole:
            told.append({"workload": name, "load": load, "seeds": len(whole), **_goal(whole, policies, ours, load)})
    return told


def _goal(
    seeds: Sequence[dict[str, MatrixRun]], policies: Sequence[str], ours: str, load: float
) -> dict[str, str | float]:
    mine = [by_policy[ours] for by_policy in seeds]
    asked = [made for made in mine if LEAST_BOUND <= made.lru / (made.infinite or 1.0) <= MOST_BOUND]
    shares = [made.hits / made.lru for made in asked]
    steady = [p for p in policies if p != ours and not any(by_policy[p].diverged for by_policy in seeds)]
    means = {policy: fmean(by_policy[policy].mean_s for by_policy in seeds) for policy in (*steady, ours)}
    tails = {policy: fmean(by_policy[policy].p99_s for by_policy in seeds) for policy in (*steady, ours)}
    gaps = {policy: fmean(by_policy[policy].itl_p99_ms for by_policy in seeds) for policy in (*steady, ours)}
    best, best_tail = min(steady, key=means.__getitem__, default=ours), min(steady, key=tails.__getitem__, default=ours)
    mean, tail = means[ours] / means[best], tails[ours] / tails[best_tail]
    least = LEAST_HITS_FULL if load >= FULL_LOAD else LEAST_HITS
    missed = [
        what
        for what, is_met in {
            "diverged": not any(made.diverged for made in mine),
            "hits": not shares or fmean(shares) >= least,
            "mean": mean <= MOST_MEAN,
            "p99": tail <= MOST_P99,
            "ITL": gaps[ours] <= gaps[best],
        }.items()
        if not is_met
    ]
    return {
        "hits": f"{fmean(shares):.3f}" if shares else "not asked",
        "least": f"{min(shares):.3f}" if shares else "",
        "mean s": means[ours],
        "mean": mean,
        "of": best,
        "p99": tail,
        "of ": best_tail,
        "busy": fmean(made.busy for made in mine),
        "ITL ms": gaps[ours],
        "best's": gaps[best],
        "diverged": len(policies) - 1 - len(steady),
        "missed": ", ".join(missed) or "none",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table and environment here")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a JSON line for every run")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a file in Mooncake's form")
    parser.add_argument("--workload", action="append", default=[], choices=[*GENERATED, SLOW])
    parser.add_argument("--requests", type=int, default=2000, help="of each workload, and at most of each trace")
    parser.add_argument("--seeds", type=_numbers(int), default=[21, 22, 23, 24, 25], metavar="N,...")
    parser.add_argument("--load", type=_numbers(float), default=[0.5, 0.8, 0.95], metavar="SHARE,...")
    parser.add_argument("--policies", type=_names, default=list(NAMES), metavar="NAME,...")
    parser.add_argument("--capacity-blocks", type=int, default=ClusterShape().prefill_blocks, help="a prefill worker's")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many")
    options = parser.parse_args(arguments)
    sources = [*map(str, options.trace), *(options.workload or [*GENERATED, SLOW])]
    todo = cases(sources, options.requests, options.seeds, options.load, options.policies, options.capacity_blocks)
    runs = fill(options.out, todo, time.monotonic() + options.seconds)
    table = goals(runs, options.policies)
    if not table:
        print(f"{len(runs)} runs, and no seed is complete yet")
        return 1
    output.tell(options, "routing-goals", {f"Goals of {OURS}, {len(runs)} runs": table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`make mutants`: change the pure folders in small ways, one at a time, and ask whether anybody notices.

Each mutant runs against the tests that mirror its package, and what survives against the simulator for `--seconds`.
Results are kept in `.mutants/results.jsonl`: a run goes on where the last one ended, and what survived is judged again
when the tests have changed. Mutants that nobody can tell from the original are listed in
`tests/mutants/equivalent.toml`, each with a reason, and not run.

    make mutants                                            # a sample of 200
    make mutants ARGS="--sample 0"                          # all of them: a day or more
    make mutants ARGS="--only router/core/policy.py"        # those of some files
    make mutants ARGS="--seconds 0"                         # without the simulator
    make mutants ARGS="--seconds 0 --quick 3"               # a first look: three seconds of tests each, the quickest
    make mutants ARGS="--seconds 0 --tests tests/router/core/test_policy.py --only router/core/policy.py"
                                                            # what one file of tests notices
    make mutants ARGS="--show KEY"                          # one mutant as a difference

Exit status 1: fewer were found than the goal says, or one could not be judged.
"""

import argparse
import difflib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import report
from tests.mutants.catalogue import PACKAGES, ROOT, Mutant, Source, equivalents, gone, sample, sources
from tests.mutants.results import FOLDER, Outcome, Result, Results, digest, digest_of_tests
from tests.mutants.simulate import UNMADE, find

SIMULATOR = ("tests/sim",)
SAMPLE = 200
"""Few enough to be judged by all tests and by the simulator within an hour of two idle cores, as far as each part of it
was timed (CONTRIBUTING.md)."""
OVERTIME = 3.0
"""How much longer than asked for a run of the simulator may take before it counts as hanging, on a busy machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=SAMPLE, help="how many, spread over all files (0: all)")
    parser.add_argument("--seed", type=int, default=1, help="which sample, and which schedules of the simulator")
    parser.add_argument("--only", action="append", default=[], metavar="PATH", help="a folder or file of the pure ones")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="how many at once")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the simulator for each survivor (0: none)")
    parser.add_argument("--quick", type=float, default=0.0, help="seconds of tests for each mutant (0: all tests)")
    parser.add_argument("--tests", action="append", default=[], metavar="PATH", help="judge by these tests alone")
    parser.add_argument("--results", type=Path, default=FOLDER / "results.jsonl")
    parser.add_argument("--goal", type=float, default=95.0, help="per cent that must be found")
    parser.add_argument("--show", metavar="KEY", help="print one mutant and its result")
    parser.add_argument("--report", action="store_true", help="run nothing: tell what is known")
    args = parser.parse_args(arguments)
    if args.show:
        return _show(args.show, Results(args.results))
    files = [source for source in sources() if not args.only or _is_below(source.path, args.only)]
    every = [mutant for source in files for mutant, _ in source.mutants]
    listed = equivalents()
    chosen = sample(every, args.sample or None, args.seed)
    wanted = [mutant for mutant in chosen if not any(entry.covers(mutant) for entry in listed)]
    if not args.report:
        print(_plan(len(every), len(chosen), len(wanted), args), flush=True)
        _by_tests(wanted, args.results, args.jobs, args.quick, args.tests)
        if args.seconds > 0:
            _by_simulator(wanted, files, args.results, args.jobs, args.seconds, args.seed)
    counts = report.count(chosen, listed, Results(args.results))
    print(report.tell(counts, [] if args.only else gone(listed, every), args.goal))
    undecided = sum(of.not_run + of.unmade for of in counts.values())
    run = sum(of.run for of in counts.values())
    found = sum(of.by_tests + of.by_sim for of in counts.values())
    return int(undecided > 0 or 100 * found < args.goal * run)


def _plan(every: int, chosen: int, wanted: int, args: argparse.Namespace) -> str:
    """Return what a run is about to do, and how long that takes."""
    tests = f"about {args.quick:g} s of tests" if args.quick else "its tests: seconds, a minute where none notices"
    sim = f"; what they miss, {args.seconds:g} s of the simulator" if args.seconds > 0 else ""
    return (
        f"{chosen:,} of {every:,} mutants (seed {args.seed}), of which {chosen - wanted} are listed as equivalent.\n"
        f"First all tests run once, for some minutes, if they have changed; then each mutant has {tests}{sim}.\n"
        f"Results: {args.results}. A run that is interrupted goes on there."
    )


def _is_below(path: str, places: list[str]) -> bool:
    return any(path == place or path.startswith(f"{place.rstrip('/')}/") for place in places)


def _by_tests(wanted: list[Mutant], path: Path, jobs: int, quick_s: float, only: list[str]) -> None:
    for package in PACKAGES:
        known, tests = Results(path), digest_of_tests(package, quick_s=quick_s, only=only)
        due = [m for m in wanted if m.package == package and known.is_due(m, "tests", tests)]
        if not due:
            continue
        print(f"{package}: {len(due)} mutants against {(only or PACKAGES[package])[0]}", flush=True)
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
            keys.write("\n".join(mutant.key for mutant in due))
            keys.flush()
            command = [sys.executable, "-m", "tests.mutants.runner", package, keys.name, str(path), str(jobs)]
            command += [str(quick_s), *only]
            subprocess.run(command, cwd=ROOT, check=True)


def _by_simulator(
    wanted: list[Mutant], files: list[Source], path: Path, jobs: int, seconds: float, seed: int
) -> None:
    results, judge = Results(path), digest(SIMULATOR)
    lines = {mutant.key: line for source in files for mutant, line in source.mutants}
    due = []
    for mutant in wanted:
        by_tests = results.of(mutant, "tests")
        survived = by_tests is not None and by_tests.outcome is Outcome.SURVIVED
        if survived and results.is_due(mutant, "sim", judge):
            due.append(mutant)
    if due:
        print(f"{len(due)} survivors against {seconds:g} s of the simulator each", flush=True)

    def judged(mutant: Mutant) -> Result:
        began_s = time.monotonic()
        outcome, by = _simulate(mutant, seconds, seed)
        took_s = round(time.monotonic() - began_s, 1)
        return Result(mutant.key, mutant, lines[mutant.key], outcome, "sim", by, took_s, judge)

    with ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(judged, due):
            results.add(result)
            place = f"{result.mutant.file}:{result.line}"
            print(f"{result.outcome.value:9} {result.seconds:5.1f} s  {place} {result.mutant.change}", flush=True)


def _simulate(mutant: Mutant, seconds: float, seed: int) -> tuple[Outcome, str]:
    arguments = ["--seconds", f"{seconds:g}", "--seed", str(seed)]
    command = [sys.executable, "-m", "tests.mutants.simulate", mutant.key, *arguments]
    limit_s = OVERTIME * seconds + 60
    try:
        done = subprocess.run(
            command, cwd=ROOT, timeout=limit_s, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=_bounded, check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome.FOUND, f"the simulator hangs for {limit_s:g} s"
    said = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode == UNMADE:
        return Outcome.UNMADE, said[-1]
    if done.returncode:
        why = [line for line in said if line.startswith(("FAILED", "never reached"))] or said[-1:]
        return Outcome.FOUND, why[0] if why else f"status {done.returncode}"
    return Outcome.SURVIVED, f"{seconds:g} s"


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))


def _show(key: str, results: Results) -> int:
    source, mutant = find(key)
    before = source.unchanged.splitlines()
    after = source.mutated(mutant).splitlines()
    print("\n".join(difflib.unified_diff(before, after, source.path, str(mutant), lineterm="", n=4)))
    result = results.final(mutant)
    print("not run yet" if result is None else f"{result.outcome.value} in {result.stage}: {result.by}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

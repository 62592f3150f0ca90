"""`python -m tests.sim`: random schedules for a time or a number, until one fails. `make sim SECONDS=60 SEED=7`.

Schedule n of a run has seed SEED * 1,000,000 + n, so runs of different SEED are disjoint. `--processes N` shares them
out; `--ledger` begins behind the seeds noted in tests/sim/ledger.jsonl, notes the run there, piece by piece, and prints
what all runs add up to. `--until N` does the same until N schedules count over the source of the cores as it is now, in
as many runs as it takes. `--only N` runs that one schedule, with its story on standard output. Exit status 1: a promise
was broken, or a rare state was never reached.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.sim import ledger
from tests.sim.batch import Report, run
from tests.sim.coverage import missing
from tests.sim.schedule import RECOVERS, make_plan
from tests.sim.shells import loud
from tests.sim.trace import tell
from tests.sim.world import World

STRIDE = 1_000_000
NOTED = 5_000
ENOUGH = 2_000
"""Schedules after which every rare state must have been seen."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--schedules", type=int, default=None, help="schedules that count")
    parser.add_argument("--until", type=int, default=None, help="schedules that count over these cores, in all runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, default=None, help="seed of one schedule")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--ledger", type=Path, nargs="?", const=ledger.LEDGER, metavar="FILE")
    parser.add_argument(
        "--strict", action=argparse.BooleanOptionalAction, default=RECOVERS, help="expect recovery"
    )
    args = parser.parse_args()
    if args.only is not None:
        return _only(args.only, args.strict)
    seconds, schedules = args.seconds, args.schedules
    seeds = range(args.seed * STRIDE, (args.seed + 1) * STRIDE)
    if args.until is not None:
        if schedules is not None:
            parser.error("--until and --schedules both say how many: give one")
        args.ledger = args.ledger or ledger.LEDGER
        done = ledger.counted(ledger.read(args.ledger))
        if done >= args.until:
            print(f"{done:,} schedules count over cores {ledger.source_hash()} already")
            return 0
        schedules = args.until - done
        # Not every schedule counts, so as many seeds do not suffice.
        seeds = range(seeds.start, seeds.stop + 2 * args.until)
    if seconds is None and schedules is None:
        seconds = 60.0
    if args.ledger is not None:
        seeds = ledger.unused(ledger.read(args.ledger), seeds)
    began_s = time.monotonic()
    if args.ledger is None:
        report = run(seeds, args.strict, seconds, schedules, args.processes)
    else:
        report = _noted(args.ledger, seeds, args.strict, seconds, schedules, args.processes)
    _print(report, seeds.start, time.monotonic() - began_s)
    if args.ledger is not None:
        print(f"ledger: {ledger.total(ledger.read(args.ledger))}")
    for failed in report.failures:
        print(f"\nFAILED: seed {failed.seed}: {failed.why}")
        print(f"again, with its story: python -m tests.sim --only {failed.seed}")
    if report.failures:
        return 1
    gaps = missing(report.notes, report.effective, args.strict)
    if gaps:
        print(f"\nnever reached: {', '.join(gaps)}")
    return int(bool(gaps) and report.counted >= ENOUGH)


def _noted(
    path: Path, seeds: range, strict: bool, seconds: float | None, schedules: int | None, processes: int
) -> Report:
    """Run as `run` does, and note every `NOTED` schedules that count: who is ended loses no more than those, and the
    next run goes on behind them."""
    until_s = None if seconds is None else time.monotonic() + seconds
    total, cores = Report(), ledger.source_hash()
    while seeds and not total.failures and (schedules is None or total.counted < schedules):
        left_s = None if until_s is None else until_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            break
        most = NOTED if schedules is None else min(NOTED, schedules - total.counted)
        report = run(seeds, strict, left_s, most, processes)
        if ledger.source_hash() != cores:
            sys.exit("the source of the cores has changed during the run: its last piece is not noted")
        ledger.write(path, seeds.start, report)
        total.add(report)
        seeds = range(report.last + 1, seeds.stop)
    return total


def _print(report: Report, first: int, took_s: float) -> None:
    print(f"cores {ledger.source_hash()}, seeds {first} .. {report.last}")
    print(
        f"{report.ran} schedules in {took_s:.1f} s ({report.ran / took_s:.0f}/s, "
        f"{report.events / took_s:.0f} events/s)"
    )
    cpu_s = report.cpu_s or 1.0
    per_s, per_cpu_s = report.counted / took_s, report.counted / cpu_s
    print(f"{report.counted} count ({per_s:.0f}/s, {per_cpu_s:.0f} per CPU second)")
    print("faults (struck, of these during a handoff):")
    for kind, count in sorted(report.struck.items()):
        print(f"  {kind:20} {count:7} {report.effective[kind]:7}")
    print("states:")
    for state, count in sorted(report.notes.items()):
        print(f"  {state:45} {count:8}")


def _only(seed: int, strict: bool) -> int:
    with loud():
        world = World(make_plan(seed, strict=strict))
        print("\n".join(tell(world)))
    return int(bool(world.failure))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.sim`: random schedules for a time or a number, until one fails. `make sim SECONDS=60 SEED=7`.

Schedule n of a run has seed SEED * 1,000,000 + n, so runs of different SEED are disjoint. `--only N` runs that one
schedule, with its story on standard output. Exit status 1: a promise was broken, or a rare state was never reached.
"""

import argparse
import gc
import hashlib
import sys
import time
from collections import Counter
from pathlib import Path

from tests.sim.coverage import missing
from tests.sim.schedule import RECOVERS, make_plan, run_schedule
from tests.sim.shells import loud
from tests.sim.trace import tell
from tests.sim.world import World

ROOT = Path(__file__).parent.parent.parent
STRIDE = 1_000_000
CORES = ("decode_worker", "prefill_worker", "transfer", "router", "engine/kv", "engine")
ENOUGH = 2_000
"""Schedules after which every rare state must have been seen."""


def source_hash() -> str:
    """One digest over the source of everything that is simulated."""
    sums = hashlib.sha256()
    for folder in CORES:
        for path in sorted((ROOT / folder).glob("*.py")):
            sums.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return sums.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--schedules", type=int, default=None, help="schedules that count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, default=None, help="seed of one schedule")
    parser.add_argument(
        "--strict", action=argparse.BooleanOptionalAction, default=RECOVERS, help="expect recovery"
    )
    args = parser.parse_args()
    strict: bool = args.strict
    if args.only is not None:
        return _only(args.only, strict)
    seconds = args.seconds
    if seconds is None and args.schedules is None:
        seconds = 60.0
    began = time.monotonic()
    counted = ran = events = 0
    struck: Counter[str] = Counter()
    effective: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    failed = None
    # No schedule leaves cycles worth looking for, and modules are not garbage.
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    while failed is None:
        if seconds is not None and time.monotonic() - began >= seconds:
            break
        if args.schedules is not None and counted >= args.schedules:
            break
        result = run_schedule(args.seed * STRIDE + ran, strict=strict)
        ran += 1
        counted += result.counts
        events += result.events
        struck += result.struck
        effective += result.effective
        notes += result.notes
        failed = result if result.failure else None
    took = time.monotonic() - began
    print(f"cores {source_hash()}, seeds {args.seed * STRIDE} .. {args.seed * STRIDE + ran - 1}")
    print(f"{ran} schedules in {took:.1f} s ({ran / took:.0f}/s, {events / took:.0f} events/s)")
    print(f"{counted} count ({counted / took:.0f}/s)")
    print("faults (struck, of these during a handoff):")
    for kind, count in sorted(struck.items()):
        print(f"  {kind:20} {count:7} {effective[kind]:7}")
    print("states:")
    for state, count in sorted(notes.items()):
        print(f"  {state:45} {count:8}")
    if failed is not None:
        print(f"\nFAILED: seed {failed.seed}: {failed.failure}")
        print(f"again, with its story: python -m tests.sim --only {failed.seed}")
        return 1
    gaps = missing(notes, effective, strict)
    if gaps:
        print(f"\nnever reached: {', '.join(gaps)}")
    return int(bool(gaps) and counted >= ENOUGH)


def _only(seed: int, strict: bool) -> int:
    world = World(make_plan(seed, strict=strict))
    print("\n".join(tell(world)))
    return int(bool(world.failure))


if __name__ == "__main__":
    with loud():
        status = main()
    sys.exit(status)

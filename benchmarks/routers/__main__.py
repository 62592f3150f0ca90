"""Compares `least-cost` with routers of others as they are installed: `python -m benchmarks.routers`.

Each takes the place of the policy in the simulated cluster of `benchmarks.routing`, on the same trace, load and seed:
it sees every prompt as a request of its own, and its choice is where the prompt is computed (`benchmarks.routers.
policy`). What is not installed for `--python` is left out, and said. `repeats` says if the router sends a prompt that
it has seen before where it was: one that does not has not been shown at its best here.

    python -m venv peers && peers/bin/pip install smg vllm-router ai-dynamo-runtime
    python -m benchmarks.routers --python peers/bin/python --workload chat --load .8,.95
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import output
from benchmarks.routers.http_routers import MODULES, HttpRouter, version
from benchmarks.routers.policy import PeerError, PeerPolicy, knows_repeats
from benchmarks.routers.selection_service import PACKAGE, SelectionRouter
from benchmarks.routing.__main__ import _numbers, lines
from benchmarks.routing.runs import RoutingCase, run, run_with
from benchmarks.routing.workers import ClusterShape, RoutingOutcome
from benchmarks.routing.workloads import GENERATED

OURS = ("least-cost", "affinity-threshold")
NAMES = (*MODULES, PACKAGE)
"""The packages whose routers can be driven."""


def run_peer(case: RoutingCase, python: Path) -> tuple[RoutingOutcome, bool]:
    """Serve a case with the router that `case.policy` names; also say if it knows prompts again. Raises PeerError."""
    shape = case.shape
    names = [f"prefill-{number}" for number in range(shape.prefill)]
    router: HttpRouter | SelectionRouter
    if case.policy == PACKAGE:
        router = SelectionRouter(names, shape.prefill_blocks, python)
    else:
        router = HttpRouter(case.policy, names, shape.prefill_blocks, python)
    try:
        knows = knows_repeats(router)
        return run_with(case, lambda: PeerPolicy(router, case.seed)), knows
    finally:
        router.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser, usual = output.parser(__doc__), ClusterShape()
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a file in Mooncake's form")
    parser.add_argument("--workload", action="append", default=[], choices=list(GENERATED))
    parser.add_argument("--requests", type=int, default=2000, help="of each workload, and at most of each trace")
    parser.add_argument("--seeds", type=_numbers(int), default=[21], metavar="N,...")
    parser.add_argument("--load", type=_numbers(float), default=[0.8], metavar="SHARE,...")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="where the routers are installed")
    parser.add_argument("--capacity-blocks", type=int, default=usual.prefill_blocks, help="of one prefill worker")
    options = parser.parse_args(arguments)
    shape = ClusterShape(prefill_blocks=options.capacity_blocks)
    versions = {name: version(name, options.python) for name in NAMES}
    for name, installed in versions.items():
        print(f"{name} {installed}" if installed else f"{name} is left out: it is not installed for {options.python}")
    cases, outcomes, repeats = [], [], []
    for source in [*map(str, options.trace), *options.workload] or ["chat"]:
        for seed in options.seeds:
            for load in options.load:
                for policy in (*OURS, *(name for name, installed in versions.items() if installed)):
                    case = RoutingCase(source, options.requests, seed, load, policy, shape)
                    try:
                        outcome, knows = (run(case), "") if policy in OURS else _told(run_peer(case, options.python))
                    except PeerError as error:
                        print(f"{policy} is left out on {source} at {load}: {error}")
                        continue
                    cases.append(case)
                    outcomes.append(outcome)
                    repeats.append(knows)
    table = [{**line, "repeats": knows} for line, knows in zip(lines(cases, outcomes), repeats, strict=True)]
    output.tell(options, "routers", {"Routers of others in the same cluster": table})
    return 0


def _told(made: tuple[RoutingOutcome, bool]) -> tuple[RoutingOutcome, str]:
    return made[0], "yes" if made[1] else "no"


if __name__ == "__main__":
    raise SystemExit(main())

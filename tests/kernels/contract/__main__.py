"""The compile-time contract of the GPU kernels, checked without a GPU.

    python -m tests.kernels.contract [--update] [--arch 80|90] [--only TEXT]

Compiles every entry of `kernels.configs`, every launch of `benchmarks.gpu.correct` and the largest programs that the
defaults come to for sm_80 and sm_90, reads registers, spills, shared memory, load widths,
asynchronous copies, loads by the byte and matrix instructions off the machine code, and compares them with
`contract.json`, which holds one table per Triton version. Fails when one got worse, or a house rule is broken;
`--update` writes what was found.
"""

import argparse
import json
import sys
from pathlib import Path

import triton

from tests.kernels.contract.all_measured import all_measured
from tests.kernels.contract.cases import cases
from tests.kernels.contract.check import Counts, regressions

FILE = Path(__file__).parent / "contract.json"
ARCHES = (80, 90)
Table = dict[str, dict[str, dict[str, Counts]]]


def main() -> int:
    """0 if the contract holds, 1 if not, 2 if there is none for this Triton version."""
    parser = argparse.ArgumentParser(
        description="compile every kernel and compare with contract.json"
    )
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--arch", type=int, choices=ARCHES, action="append")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    table: Table = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    version = triton.__version__
    if version not in table and not options.update:
        print(f"no contract for Triton {version}: run with --update and read the difference")
        return 2
    failures = 0
    for arch, name, counts, complaints in all_measured(options.arch or ARCHES, options.only):
        recorded = table.setdefault(version, {}).setdefault(f"sm_{arch}", {})
        if not options.update:
            before = recorded.get(name)
            complaints += (
                ["not in the contract"] if before is None else regressions(before, counts)
            )
        shown = " ".join(f"{what}={value}" for what, value in counts.items())
        print(f"sm_{arch} {name}: {shown}", *(f"\n    WORSE: {c}" for c in complaints), flush=True)
        failures += bool(complaints)
        if options.update:
            recorded[name] = counts
    if options.update and not options.only:
        for arch in options.arch or ARCHES:
            recorded = table[version][f"sm_{arch}"]
            table[version][f"sm_{arch}"] = {case.name: recorded[case.name] for case in cases(arch)}
    if options.update:
        FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(
        f"{failures} of the kernels are worse than they may be"
        if failures
        else "the contract holds"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

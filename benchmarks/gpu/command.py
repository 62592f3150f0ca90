"""The command line of `python3 -m benchmarks.gpu`, and the file that it writes."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import stages
from benchmarks.gpu.card import Card, Line, NoCard, Sizes, describe, open_card
from benchmarks.gpu.dry import dry_card
from benchmarks.gpu.goals import judged
from benchmarks.gpu.parts import LIMIT_S, PARTS, within
from benchmarks.gpu.stages import PartOutcome
from cluster.bench.environment import describe as describe_host
from kernels.configs import DRY_RUN
from telemetry.build import revision

FILE = "gpu.json"
SLOWER = 4.0
"""How many times longer a dry run may take, on a machine that is busy with other things."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 where a part failed or found something wrong, 2 without a GPU."""
    options = _parser().parse_args(arguments)
    if options.dry_run:
        dry_card()
        what: Line = {"gpu": DRY_RUN}
    else:
        try:
            what = describe(open_card(Sizes()))
        except NoCard as error:
            print(f"benchmarks.gpu: {error}", file=sys.stderr)
            return 2
    told: dict[str, Any] = {
        "benchmark": "gpu",
        "date": date.today().isoformat(),
        "revision": revision(),
        "card": what,
        "environment": describe_host(),
        "results": {},
        "parts": {},
        "failures": {},
        "logs": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / options.file

    def on_end(name: str, outcome: PartOutcome) -> None:
        """Write what there is by now: a command that is cut short has not been for nothing."""
        print(
            f"{name}: {outcome.took_s:.1f} s of {outcome.limit_s:.0f} s {outcome.failure}",
            flush=True,
        )
        told["results"][name] = outcome.lines
        told["parts"][name] = {"took_s": outcome.took_s, "limit_s": outcome.limit_s}
        if outcome.failure:
            told["failures"][name] = outcome.failure
            told["logs"][name] = outcome.log
            print("\n".join(outcome.log), file=sys.stderr)
        path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")

    limit_s = options.seconds * (SLOWER if options.dry_run else 1.0)
    parts = within(list(dict.fromkeys(options.only or PARTS)), limit_s)
    stages.run(parts, dry_card if options.dry_run else whole_card, _show, on_end)
    told["goals"] = judged(told["results"])
    for line in told["goals"]:
        _show("goals", line)
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(f"written: {path}")
    wrong = [line for lines in told["results"].values() for line in lines if line.get("right") == 0]
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if told["failures"] or wrong else 0


def whole_card() -> Card:
    """Open the first GPU, with a pool that fits into what is free of its memory. Raises NoCard."""
    card = open_card(Sizes())
    free_bytes, _ = torch.cuda.mem_get_info(card.device)
    sizes = replace(card.sizes, pool_bytes=min(card.sizes.pool_bytes, free_bytes * 6 // 10))
    return replace(card, sizes=sizes)


def _show(part: str, line: Line) -> None:
    print(
        f"  {part}  " + "  ".join(f"{key}={_cell(value)}" for key, value in line.items()),
        flush=True,
    )


def _cell(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu", description="Measures all that only a GPU can show."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument(
        "--file", default=FILE, metavar="NAME", help="of the results (default: %(default)s)"
    )
    parser.add_argument("--only", action="append", choices=list(PARTS), help="of these parts")
    parser.add_argument(
        "--seconds", type=float, default=LIMIT_S, metavar="N",
        help="for all parts together (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes, no GPU: measures nothing"
    )
    return parser

"""All that a GPU can show, in one command: `python -m benchmarks.gpu --out DIR`.

Checks the kernels against 64 bits, measures them beside torch's own and beside what the card can copy, and runs decode
steps of a whole model. Needs neither Ray nor a model's files. Writes `gpu.json` with the card and all versions. A part
that fails is told, does not stop the others, and makes the status 1; without a GPU the status is 2. `--dry-run` runs
all of it on tiny shapes without a GPU, in Triton's interpreter.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.environment import describe as describe_host
from benchmarks.gpu.card import Card, Line, NoCard, Sizes, describe, open_card
from benchmarks.gpu.dry import dry_card
from benchmarks.gpu.goals import judged
from kernels.configs import DRY_RUN

PARTS = {
    "copy_rate": "benchmarks.gpu.card:copy_rate",
    "correct": "benchmarks.gpu.correct:correct",
    "orders": "benchmarks.gpu.decode:orders",
    "decode": "benchmarks.gpu.decode:shapes",
    "eight_bits": "benchmarks.gpu.decode:eight_bits",
    "shared": "benchmarks.gpu.decode:shared",
    "blocks": "benchmarks.gpu.decode:blocks",
    "peers": "benchmarks.gpu.peers:peers",
    "prefill": "benchmarks.gpu.others:prefill",
    "copies": "benchmarks.gpu.others:copies",
    "steps": "benchmarks.gpu.steps:on_card",
    "transport": "benchmarks.gpu.transport:transport",
}
"""Imported when they run, so that a package which only one of them needs is missed by that one alone."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    what: Line = {"gpu": DRY_RUN}
    if options.dry_run:
        card = dry_card()
    else:
        try:
            card = whole_card()
        except NoCard as error:
            print(f"benchmarks.gpu: {error}", file=sys.stderr)
            return 2
        what = describe(card)
    results, failures = run(card, options.only or list(PARTS))
    told = {
        "benchmark": "gpu",
        "date": date.today().isoformat(),
        "card": what,
        "environment": describe_host(),
        "results": results,
        "goals": judged(results),
        "failures": failures,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu.json"
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(f"written: {path}")
    wrong = [line for line in results.get("correct", []) if not line["right"]]
    return 1 if failures or wrong else 0


def whole_card() -> Card:
    """The first GPU, with a pool that fits into what is free of its memory. Raises NoCard."""
    card = open_card(Sizes())
    free_bytes, _ = torch.cuda.mem_get_info(card.device)
    sizes = replace(card.sizes, pool_bytes=min(card.sizes.pool_bytes, free_bytes * 6 // 10))
    return replace(card, sizes=sizes)


def run(card: Card, parts: Sequence[str]) -> tuple[dict[str, list[Line]], dict[str, str]]:
    """The lines of each part, printed as they come, and why those that failed did."""
    results: dict[str, list[Line]] = {}
    failures: dict[str, str] = {}
    for part in parts:
        module, _, name = PARTS[part].partition(":")
        began_s = time.monotonic()
        try:
            measure: Callable[[Card], list[Line]] = getattr(import_module(module), name)
            results[part] = measure(card)
        except Exception as error:
            traceback.print_exc()
            failures[part] = f"{type(error).__name__}: {error}"
        print(f"{part}: {time.monotonic() - began_s:.1f} s")
        for line in results.get(part, []):
            print("  " + "  ".join(f"{key}={_cell(value)}" for key, value in line.items()))
        if card.device.type == "cuda":
            torch.cuda.empty_cache()
    return results, failures


def _cell(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for gpu.json")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="of these parts")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, no GPU: measures nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())

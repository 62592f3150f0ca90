"""Finds the tile, warps and stages that are fastest on this card: python3 -m benchmarks.gpu.tune --out DIR

Writes `measured.json`, after each entry that it has measured. Copied to `kernels/measured.json`, its entries take the
place of those that were chosen by the compiler's counts, on cards of the same compute capability
(`kernels/configs.py`). `--dry-run` shows on any machine that the command runs, on tiny shapes in Triton's interpreter;
its file says so, and is not taken.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu.card import Line, NoCard, Sizes, describe, open_card
from benchmarks.gpu.dry import dry_card
from kernels.configs import DRY_RUN, MEASURED, ConfigKey


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all entries. Returns 1 where a kernel gives another answer than with its present entry, breaks its
    process, or cannot be timed as it is; 2 without a GPU, or where no key is as asked."""
    options = _parser().parse_args(arguments)
    if options.dry_run:
        card, gpu = dry_card(), DRY_RUN
    else:
        try:
            card = open_card(Sizes())
        except NoCard as error:
            print(f"benchmarks.gpu.tune: {error}", file=sys.stderr)
            return 2
        gpu = str(describe(card)["gpu"])
    # Not before the dry run has chosen Triton's interpreter.
    from benchmarks.gpu.tuning import key_name, keys_for, tuned

    keys = keys_for(card, options.keys)
    if not keys:
        print(f"benchmarks.gpu.tune: no key fits {options.keys}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / MEASURED.name
    told = {"gpu": gpu, "date": date.today().isoformat(), "triton": version("triton")}
    entries = _known(path, told)
    is_whole, left = True, list(keys)
    for found in tuned(card, keys, options.seconds):
        left.remove(found.key)
        for why, some in (("wrong", found.wrong), ("broke its process", found.broken)):
            for what in some:
                print(f"{why}: {what}", file=sys.stderr)
        is_whole &= found.line is not None and not found.wrong and not found.broken
        if found.line is None:
            print(f"not timed: {key_name(found.key)}", file=sys.stderr)
            continue
        print("  ".join(f"{name}={value}" for name, value in found.line.items()), flush=True)
        entries[_identity(found.line)] = found.line
        path.write_text(json.dumps({**told, "entries": list(entries.values())}, indent=1) + "\n", encoding="utf-8")
    for key in left:
        print(f"no time was left for {key_name(key)}")
    print(f"written: {path}" if entries else "nothing could be timed")
    return 0 if is_whole else 1


def _known(path: Path, told: dict[str, str]) -> dict[tuple[str | int | float, ...], Line]:
    """Return the entries of an earlier run of the same card and compiler, for other keys: they stay."""
    if not path.exists():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    if any(before[name] != told[name] for name in ("gpu", "triton")):
        return {}
    return {_identity(entry): entry for entry in before["entries"]}


def _identity(entry: Line) -> tuple[str | int | float, ...]:
    return tuple(entry[field.name] for field in fields(ConfigKey))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu.tune", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"for {MEASURED.name}")
    parser.add_argument(
        "--keys", action="append", default=[], metavar="PATTERN",
        help="of these keys, named as in 'prefill 128/4/64 bfloat16' (head size, group, block): "
        "words of it, * for anything",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=math.inf, help="how long it may take in all")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, no GPU: measures nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())

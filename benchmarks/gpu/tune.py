"""Which tile, warps and stages are fastest on this card: python -m benchmarks.gpu.tune --out DIR

Writes `measured.json`. Copied to `kernels/measured.json`, its entries take the place of those that were chosen by the
compiler's counts, on cards of the same compute capability (`kernels/configs.py`). `--dry-run` shows on any machine that
the command runs, on tiny shapes in Triton's interpreter; its file says so, and is not taken.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu.card import NoCard, Sizes, describe, open_card
from benchmarks.gpu.dry import dry_card
from kernels.configs import DRY_RUN, MEASURED

KERNELS = ("decode", "decode_shared", "prefill", "copy_blocks")


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 where a kernel gives another answer than with its present entry, 2 without a GPU."""
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
    from benchmarks.gpu.tuning import tuned

    entries, wrong = tuned(card, options.only or KERNELS)
    told = {
        "gpu": gpu,
        "date": date.today().isoformat(),
        "triton": version("triton"),
        "entries": entries,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / MEASURED.name
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
    for what in wrong:
        print(f"wrong: {what}", file=sys.stderr)
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.tune", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"for {MEASURED.name}")
    parser.add_argument("--only", action="append", choices=KERNELS, help="of these kernels")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, no GPU: measures nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())

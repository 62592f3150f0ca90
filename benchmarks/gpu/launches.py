"""One launch each of decode (K1) and of prefill (K7's 4k), for a profiler: python3 -m benchmarks.gpu.launches

Alone it shows what torch's profiler sees of them. Under another, `--marked` only says where they begin and end:

    ncu --profile-from-start off --set full --clock-control none python3 -m benchmarks.gpu.launches --marked
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from random import Random

import torch

from benchmarks.gpu.card import Card, NoCard, Sizes, open_card
from benchmarks.gpu.dry import dry_card

WARM = 3
ROWS = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch each once. Returns 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--marked", action="store_true", help="between the calls that a profiler listens to")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, no GPU")
    options = parser.parse_args(arguments)
    try:
        card = dry_card() if options.dry_run else open_card(Sizes())
    except NoCard as error:
        print(f"benchmarks.gpu.launches: {error}", file=sys.stderr)
        return 2
    for name, launch in _launches(card).items():
        for _ in range(WARM):
            launch()
        if options.dry_run:
            print(f"{name}: launched")
        elif options.marked:
            _marked(launch)
        else:
            print(f"{name}:\n{_profile(launch)}")
    return 0


def _launches(card: Card) -> dict[str, Callable[[], object]]:
    # Not before the dry run has chosen Triton's interpreter.
    from benchmarks.gpu.decode import attention_step
    from benchmarks.gpu.others import prefill_step
    from kernels.pool import KVPool

    size = card.sizes
    length, block = size.tokens(4096), 64
    per_row = -(-length // block)
    order = list(range(size.batch * per_row))
    Random(0).shuffle(order)
    tables = [order[at : at + per_row] for at in range(0, len(order), per_row)]
    pool = KVPool(card.random(len(order), size.kv_heads, 1, 2, block, size.head_dim))
    rows = card.random(size.batch, size.heads, size.head_dim)
    prompt = card.random(length, size.heads, size.head_dim)
    return {
        "decode": attention_step(card, rows, pool, [length] * size.batch, tables),
        "prefill": prefill_step(card, prompt, pool, length, tables[0]),
    }


def _marked(launch: Callable[[], object]) -> None:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _profile(launch: Callable[[], object]) -> str:
    activities = torch.profiler.ProfilerActivity
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as seen:
        launch()
        torch.cuda.synchronize()
    return str(seen.key_averages().table(sort_by="self_device_time_total", row_limit=ROWS))


if __name__ == "__main__":
    sys.exit(main())

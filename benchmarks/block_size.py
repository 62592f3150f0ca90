"""Measures throughput against block size on the demo model: `python -m benchmarks.block_size`.

The same requests, of which half begin alike, through both schedulers in one process and thread, with pools of the same
bytes and blocks of 4 to 128 tokens: output tokens a second, the median time to the first token, and the share of held
slots that hold no token when all prompts are there. Medians of `--repeats` in which the sizes take turns; the ratio is
to blocks of 16 in the same turn.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks import figures, output
from benchmarks.offline import Served, engine, record, serve
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.model.prepared.cache import prepare
from fakes.colocated import Colocated

Make = Callable[[int], EngineDevice]
COMMON = 16


def prompts(requests: int, longest: int) -> list[list[int]]:
    """Return prompts of lengths from a tenth of the longest on; every second one begins with the same third of the
    longest."""
    random = Random(requests)
    common = [random.randrange(100, 200) for _ in range(longest // 3)]
    made = []
    for at in range(requests):
        length = random.randrange(longest // 10, longest)
        own = [random.randrange(100, 200) for _ in range(length)]
        made.append((common + own)[:length] if at % 2 else own)
    return made


def run(both: Colocated, turn: int, asked: Sequence[list[int]], answer: int, at_once: int) -> Served:
    """Run one turn on an empty cache."""
    space = turn.to_bytes(4, "little")
    return serve(both, [record(f"{turn} {at}", p, answer, space) for at, p in enumerate(asked)], at_once)


def measure(
    make: Make, sizes: Sequence[int], asked: Sequence[list[int]], answer: int, at_once: int, repeats: int
) -> list[dict[str, str | int | float]]:
    """Measure every size; `sizes` has 16 among them."""
    with ExitStack() as stack:
        engines = {size: stack.enter_context(engine(partial(make, size))) for size in sizes}
        for both in engines.values():
            run(both, repeats, asked[:1], 1, 1)  # what a first run pays for
        turns = [
            {size: run(both, turn, asked, answer, at_once) for size, both in engines.items()}
            for turn in range(repeats)
        ]
    table: list[dict[str, str | int | float]] = []
    for size in sizes:
        ratios = [turn[size].tokens_per_s / turn[COMMON].tokens_per_s for turn in turns]
        held = sum(-(-(len(prompt) + answer) // size) * size for prompt in asked)
        table.append(
            {
                "block size": size,
                "tokens/s": median(turn[size].tokens_per_s for turn in turns),
                "of 16's": median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "TTFT ms": median(1000 * median(turn[size].ttft_s) for turn in turns),
                "cached %": 100 * turns[0][size].cached_tokens / turns[0][size].prompt_tokens,
                "empty slots %": 100 * (1 - sum(len(prompt) + answer for prompt in asked) / held),
            }
        )
    return table


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--sizes", type=figures.numbers, default=[4, 8, 16, 32, 64, 128])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=24, help="tokens")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    options = _options(output.parser(__doc__))
    asked = prompts(options.requests, options.longest)
    with TemporaryDirectory() as folder:
        model_dir = str(prepare(None, Path(folder)))

        def make(block_size: int) -> EngineDevice:
            return open_device(EngineConfig(model_dir=model_dir, threads=1, block_size=block_size))

        table = measure(make, options.sizes, asked, options.answer, options.at_once, options.repeats)
    title = f"{options.requests} prompts of up to {options.longest} tokens, {options.answer} output tokens, demo model"
    output.tell(options, "block_size", {title: table})


if __name__ == "__main__":
    main()

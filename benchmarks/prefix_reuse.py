"""Measures what a shared prefix is worth on the demo model: `python -m benchmarks.prefix_reuse`.

Prompts of one length, of which a share from 0 to 100 % is the same for all (of a wholly shared one, all but the last
token is found); with a short and a long answer; the cache on, and off (each request in a namespace of its own). Both
workers in one process and thread, a number of requests at a time, the shared part asked for once before. `tokens/s` is
output over time, `TTFT` from handing a request in. Medians of `--repeats`, in which off and all shares take turns; the
gain is against off in the same turn.
"""

import argparse
from collections.abc import Callable, Sequence
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

Make = Callable[[], EngineDevice]
SHARES = (0, 25, 50, 75, 100)


def run(
    both: Colocated, turn: str, prompt: int, answer: int, share: int | None, requests: int, at_once: int
) -> Served:
    """Run one turn on an empty cache; `share` in percent, None: the cache is off."""
    random = Random(prompt)
    common = [random.randrange(100, 200) for _ in range(prompt * (share or 0) // 100)]
    space = f"{turn} {share}".encode()
    if share:
        serve(both, [record(f"{turn} {share} first", common, 1, space)], 1)
    records = []
    for at in range(requests):
        own = [random.randrange(100, 200) for _ in range(prompt - len(common))]
        mine = space if share is not None else b"%b %d" % (space, at)
        records.append(record(f"{turn} {share} {at}", common + own, answer, mine))
    return serve(both, records, at_once)


def measure(
    make: Make, prompt: int, answers: Sequence[int], requests: int, at_once: int, repeats: int
) -> list[dict[str, str | int | float]]:
    kinds: tuple[int | None, ...] = (None, *SHARES)
    table: list[dict[str, str | int | float]] = []
    with engine(make) as both:
        run(both, "warm", prompt, 1, None, 1, 1)  # what a first run pays for
        for answer in answers:
            turns = [
                {kind: run(both, f"{answer} {turn}", prompt, answer, kind, requests, at_once) for kind in kinds}
                for turn in range(repeats)
            ]
            for kind in kinds:
                mine = [turn[kind] for turn in turns]
                gains = [turn[kind].tokens_per_s / turn[None].tokens_per_s for turn in turns]
                table.append(
                    {
                        "answer": answer,
                        "shared": "cache off" if kind is None else f"{kind} %",
                        "cached %": 100 * mine[0].cached_tokens / mine[0].prompt_tokens,
                        "tokens/s": median(one.tokens_per_s for one in mine),
                        "TTFT ms": median(1000 * median(one.ttft_s) for one in mine),
                        "gain": median(gains),
                        "least": min(gains),
                        "most": max(gains),
                    }
                )
    return table


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--answers", type=figures.numbers, default=[4, 48], help="tokens: 4,48")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    options = _options(output.parser(__doc__))
    with TemporaryDirectory() as folder:
        config = EngineConfig(model_dir=str(prepare(None, Path(folder))), threads=1)
        make = partial(open_device, config)
        table = measure(
            make, options.prompt, options.answers, options.requests, options.at_once, options.repeats
        )
    title = f"{options.prompt} prompt tokens, {options.at_once} requests at once, demo model"
    output.tell(options, "prefix_reuse", {title: table})


if __name__ == "__main__":
    main()

"""What parallel samples save by sharing their prompt's blocks: `python -m benchmarks.sharing`.

`n` samples of one prompt on the demo model, both workers in one process and thread: once as forks of the first, once as
`n` requests with the same prompt that come at the same moment. `blocks` is the most that the decode worker's pool held
at once, `migrated` what came to it, `tokens/s` the output over the time from the first placement to the last end. Both
draw the same tokens, which is checked. The median of `--repeats` runs that take turns, each on an empty cache.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks import output
from cluster.colocated import Colocated
from engine.config import EngineConfig
from engine.device import Device, open_device
from engine.model.cache import prepare
from engine.types import RequestId, RequestRecord, SamplingParams

Make = Callable[[], Device]


@dataclass(frozen=True)
class Run:
    """One group to its end. Blocks of the decode worker; `seconds` from the first placement to the last end."""

    peak_blocks: int
    migrated_blocks: int
    seconds: float
    tokens: list[list[int]]


def run(make: Make, prompt: list[int], answer: int, n: int, is_sharing: bool) -> Run:
    """`n` samples of `answer` tokens each behind `prompt`, on two new devices."""
    engine = Colocated(make(), make())
    began_s = time.perf_counter()
    answers = []
    for at in range(n):
        record = RequestRecord(
            request=RequestId(str(at)),
            tokens=prompt,
            prompt_tokens=len(prompt),
            max_tokens=answer,
            seed=5,
            sample_index=at,
            sampling=SamplingParams(temperature=1.0),
            ignore_eos=True,
        )
        answers.append(engine.submit(record, RequestId("0") if is_sharing and at else None))
    peak_blocks = 0
    while any(one.ended is None for one in answers):
        if not engine.turn():
            raise RuntimeError("stuck")
        counts = engine.decode.kv.pool.counts()
        peak_blocks = max(peak_blocks, counts["active"] + counts["reserved"])
    seconds = time.perf_counter() - began_s
    while engine.turn():
        pass
    migrated_blocks = sum(migration.blocks for migration in engine.decode.take_migrated())
    engine.close()
    return Run(peak_blocks, migrated_blocks, seconds, [one.tokens for one in answers])


def measure(
    make: Make, prompt: list[int], answer: int, samples: Sequence[int], repeats: int
) -> list[dict[str, str | int | float]]:
    """Raises RuntimeError if sharing changes a token."""
    run(make, prompt, 2, 1, is_sharing=False)  # what a first run pays for
    table: list[dict[str, str | int | float]] = []
    for n in samples:
        pairs = [[run(make, prompt, answer, n, on) for on in (True, False)] for _ in range(repeats)]
        if any(shared.tokens != alone.tokens for shared, alone in pairs):
            raise RuntimeError("sharing changes tokens")
        rates = [
            statistics.median(n * answer / pair[at].seconds for pair in pairs) for at in (0, 1)
        ]
        shared, alone = pairs[0]
        table.append(
            {
                "n": n,
                "blocks": shared.peak_blocks,
                "not shared": alone.peak_blocks,
                "saved %": 100 * (1 - shared.peak_blocks / alone.peak_blocks),
                "migrated": shared.migrated_blocks,
                "migrated, not shared": alone.migrated_blocks,
                "tokens/s": rates[0],
                "tokens/s, not shared": rates[1],
            }
        )
    return table


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--prompt", type=int, default=400, help="tokens")
    parser.add_argument("--answer", type=int, default=48, help="tokens of each sample")
    parser.add_argument("--samples", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    options = _options(output.parser(__doc__))
    random = Random(0)
    prompt = [random.randrange(1000, 40_000) for _ in range(options.prompt)]
    with TemporaryDirectory() as folder:
        config = EngineConfig(model_dir=str(prepare(None, Path(folder))), threads=options.threads)
        make = partial(open_device, config)
        table = measure(make, prompt, options.answer, options.samples, options.repeats)
    title = f"{options.prompt} prompt tokens, {options.answer} output tokens a sample, demo model"
    output.tell(options, "sharing", {title: table})


if __name__ == "__main__":
    main()

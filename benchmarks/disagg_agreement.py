"""How often `headrace report disagg` can agree with `benchmarks.disagg`, in simulated time: `python -m
benchmarks.disagg_agreement`.

A split cluster and one pool of as many workers (`cluster.report.pools`) are asked the same few requests, each at a
speed of its own: the machine's, times a factor whose logarithm has the standard deviation `--drift`, as where other
work comes and goes between two measurements. The report sees the split's traffic alone. Told, for each objective and
drift, over prompt lengths and rates: how often the report's verdict is the measured one; how often a second measurement
of both, at other factors, has the first one's verdict; and how often either is that of many requests at one speed.
"""

from collections import Counter
from collections.abc import Sequence
from math import exp
from random import Random
from typing import get_args

import msgspec

from benchmarks import output
from cluster.report.disagg import NO_DIFFERENCE, Objective, StepBounds, TimeLimits, report, verdict_of
from cluster.report.pools import PoolSizes, PoolSpeeds, PredictedTimes, simulate
from router.status.traffic import RequestShape, Traffic

PROMPTS, RATES, OUTPUT_TOKENS = (32, 64, 128, 192, 256), (0.6, 1.2), 32
LIMITS, BOUNDS = TimeLimits(2.0, 0.1), StepBounds(0.05, 256, 16)
SPLIT, WHOLE = PoolSizes(1, 1), PoolSizes(0, 2)
MANY = 200
"""Requests of which the verdict hardly depends on chance."""


def speeds(token_s: float) -> PoolSpeeds:
    """Return those of a worker that takes so long for a prompt token; of a small model on a processor, about."""
    return PoolSpeeds(
        token_s=token_s,
        alone_s=4 * token_s,
        row_s=0.8 * token_s,
        migrate_s=0.01,
        overhead_s=0.01,
        mixed_step_s=BOUNDS.mixed_step_s,
        chunk_tokens=BOUNDS.chunk_tokens,
        least_tokens=BOUNDS.block_tokens,
    )


def poisson(rate: float, prompt_tokens: int, count: int, random: Random) -> list[RequestShape]:
    """Return requests that nobody has served yet."""
    at_s, shapes = 0.0, []
    for _ in range(count):
        at_s += random.expovariate(rate)
        shapes.append(
            RequestShape(
                arrived_s=at_s,
                prompt_tokens=prompt_tokens,
                output_tokens=OUTPUT_TOKENS,
                prefill_cached_tokens=0,
                decode_cached_tokens=0,
                ttft_s=0.0,
                itl_s=0.0,
                queue_s=0.0,
                prefill_s=0.0,
                migrate_s=0.0,
                is_local=False,
            )
        )
    return shapes


def traffic(shapes: Sequence[RequestShape], times: Sequence[PredictedTimes], had: PoolSpeeds) -> Traffic:
    """Return what the router of the split cluster tells of requests that met these times."""
    lived = [
        msgspec.structs.replace(
            shape,
            ttft_s=met.ttft_s,
            itl_s=met.itl_s,
            prefill_s=met.ttft_s - had.overhead_s - had.migrate_s,
            migrate_s=had.migrate_s,
        )
        for shape, met in zip(shapes, times, strict=True)
    ]
    return Traffic(
        shapes=lived,
        prefill_workers=SPLIT.prefill,
        decode_workers=SPLIT.decode,
        s_per_token=had.token_s,
        alone_s=had.alone_s,
        s_per_row=had.row_s,
    )


def agreement(
    objective: Objective, drift: float, requests: int, repeats: int, token_s: float, seed: int
) -> output.Line:
    """Return the shares in which verdicts agree."""
    random, counts = Random(seed), Counter[str]()
    for prompt_tokens in PROMPTS:
        for rate in RATES:
            many = poisson(rate, prompt_tokens, MANY, random)
            split, whole = (simulate(many, sizes, speeds(token_s)) for sizes in (SPLIT, WHOLE))
            truth = verdict_of(split, whole, LIMITS, objective)
            for _ in range(repeats):
                shapes = poisson(rate, prompt_tokens, requests, random)
                measured: list[str] = []
                told = ""
                for _ in range(2):
                    had = [speeds(token_s * exp(random.gauss(0.0, drift))) for _ in range(2)]
                    split, whole = (simulate(shapes, *each) for each in zip((SPLIT, WHOLE), had, strict=True))
                    measured.append(verdict_of(split, whole, LIMITS, objective))
                    told = told or report(traffic(shapes, split, had[0]), BOUNDS, LIMITS, objective).verdict
                counts["report is measured"] += told == measured[0]
                counts["measured is measured again"] += measured[0] == measured[1]
                counts["report is that of many"] += told == truth
                counts["measured is that of many"] += measured[0] == truth
                counts["report is the opposite"] += NO_DIFFERENCE not in (told, measured[0]) and told != measured[0]
    runs = len(PROMPTS) * len(RATES) * repeats
    return {"objective": objective, "drift": drift, "runs": runs, **{what: n / runs for what, n in counts.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = output.parser(__doc__)
    parser.add_argument("--drift", default="0,0.1,0.3", help="how far speeds differ from one measurement to the next")
    parser.add_argument("--requests", type=int, default=14, help="in each measurement")
    parser.add_argument("--repeats", type=int, default=3, help="of each prompt length and rate")
    parser.add_argument("--token-s", type=float, default=0.006, help="seconds for a prompt token")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    lines = [
        agreement(objective, float(drift), options.requests, options.repeats, options.token_s, options.seed)
        for objective in get_args(Objective)
        for drift in options.drift.split(",")
    ]
    output.tell(options, "disagg-agreement", {"How often verdicts agree, of all runs": lines})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Statistics of a load run: what each request measured in, percentiles and rates out. Pure.

Definitions (docs/benchmarks.md repeats them): TTFT is from the moment at which a request was due (in a closed loop:
when it was sent) to its first output token. ITL has one value per later token: a message that carries k tokens gives
the whole gap to its first and zero to the others, which is what its reader sees. E2E is from the same moment as TTFT to
the end of the answer. Rates divide by the wall time of the whole run.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

PERCENTILES = (50, 90, 99)


class Sample(msgspec.Struct, kw_only=True):
    """One request's figures. Times in seconds; `error` is the name of a code, empty if it ended well. `late_s` is how
    long after it was due the client sent it; None where it had no time of its own, or was not sent."""

    ttft_s: float = 0.0
    itl_s: list[float] = []
    e2e_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    migrated_blocks: int = 0
    migrated_bytes: int = 0
    migration_s: float = 0.0
    stages: dict[str, float] = {}
    late_s: float | None = None
    error: str = ""
    message: str = ""


class Spread(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one concurrency. A spread is None where nothing was measured; `stages` are means per request."""

    requests: int
    failed: int
    errors: dict[str, int]
    wall_s: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    hit_rate: float
    migrated_blocks: int
    migrated_bytes: int
    ttft_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None
    migration_s: Spread | None
    stages: dict[str, float]
    late_s: Spread | None

    @property
    def is_client_late(self) -> bool:
        """True where the client sent requests so late that the figures are partly its own: by more than 5 ms, and more
        than a tenth of the median TTFT, at p99."""
        if self.late_s is None:
            return False
        return self.late_s.p99 > max(0.005, 0.1 * self.ttft_s.p50 if self.ttft_s else 0.0)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolate linearly between closest ranks (as numpy's default). `ordered` is ascending and not empty."""
    if not ordered:
        raise ValueError("a percentile of nothing")
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Iterable[float]) -> Spread | None:
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, p) for p in PERCENTILES)
    return Spread(math.fsum(ordered) / len(ordered), p50, p90, p99)


def gaps(arrivals: Iterable[tuple[float, int]]) -> list[float]:
    """Inter-token gaps in seconds from (time, tokens) of each message, the first token's own wait left out."""
    found: list[float] = []
    last: float | None = None
    for at_s, tokens in arrivals:
        if tokens == 0:
            continue
        if last is not None:
            found.append(at_s - last)
        found.extend([0.0] * (tokens - 1))
        last = at_s
    return found


def summarise(samples: Sequence[Sample], wall_s: float) -> Summary:
    """Summarise the requests of one run. Failed requests count as errors and in how late they were sent, and in nothing
    else."""
    good = [sample for sample in samples if not sample.error]
    prompt = sum(sample.prompt_tokens for sample in good)
    output = sum(sample.output_tokens for sample in good)
    cached = sum(sample.cached_tokens for sample in good)
    stages: Counter[str] = Counter()
    for sample in good:
        stages.update(sample.stages)
    return Summary(
        requests=len(samples),
        failed=len(samples) - len(good),
        errors=dict(Counter(sample.error for sample in samples if sample.error)),
        wall_s=wall_s,
        output_tokens=output,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens_per_s=_rate(output, wall_s),
        total_tokens_per_s=_rate(output + prompt, wall_s),
        requests_per_s=_rate(len(good), wall_s),
        hit_rate=_rate(cached, prompt),
        migrated_blocks=sum(sample.migrated_blocks for sample in good),
        migrated_bytes=sum(sample.migrated_bytes for sample in good),
        ttft_s=spread(sample.ttft_s for sample in good),
        itl_s=spread(gap for sample in good for gap in sample.itl_s),
        e2e_s=spread(sample.e2e_s for sample in good),
        migration_s=spread(sample.migration_s for sample in good if sample.migrated_blocks),
        stages={stage: total / len(good) for stage, total in stages.items()},
        late_s=spread(sample.late_s for sample in samples if sample.late_s is not None),
    )


def _rate(amount: float, per: float) -> float:
    return amount / per if per > 0 else 0.0

"""What a request must keep to be worth having, and how many did: attainment and goodput. Pure.

A request counts if it met every limit, and one that failed met none. Of one run, goodput is how many counted per second
(as in vLLM's `bench serve`); of a server, the largest rate with enough attainment (DistServe, Zhong et al. 2024).
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from cluster.bench.stats import Sample

FAILED = "failed"
_LIMIT = re.compile(r"([0-9.eE+-]+)(ms|s|)")


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The most seconds that a request may take; None is no limit. `itl_s` is for the mean of the request's gaps."""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def missed(self, sample: Sample) -> list[str]:
        """Return the names of the limits that a request broke; `failed` alone if it did not end well. An answer of one
        token has no gap, and breaks no limit of them."""
        if sample.error:
            return [FAILED]
        gap_s = math.fsum(sample.itl_s) / len(sample.itl_s) if sample.itl_s else 0.0
        took = {"ttft": (sample.ttft_s, self.ttft_s), "itl": (gap_s, self.itl_s), "e2e": (sample.e2e_s, self.e2e_s)}
        return [name for name, (found_s, most_s) in took.items() if most_s is not None and found_s > most_s]

    def __str__(self) -> str:
        return ", ".join(
            f"{name.removesuffix('_s')} {most_s * 1000:g} ms"
            for name, most_s in msgspec.structs.asdict(self).items()
            if most_s is not None
        )


class SloAttainment(msgspec.Struct, frozen=True):
    """How a run kept its limits: requests that met all, their share of all requests, and their number per second of the
    run. `missed` counts by limit; a request that missed two is in both."""

    met: int
    share: float
    goodput_per_s: float
    missed: dict[str, int]


def parse_slo(text: str) -> Slo:
    """Read limits such as `ttft=0.5,itl=50ms`, in seconds without a unit. Raises ValueError that says what is wrong."""
    known = [field.removesuffix("_s") for field in Slo.__struct_fields__]
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in known:
            raise ValueError(f"{part.strip()!r} is not LIMIT=TIME with a limit of {', '.join(known)}")
        if f"{name}_s" in limits:
            raise ValueError(f"{name} is given twice")
        limits[f"{name}_s"] = _seconds(name, value)
    return Slo(**limits)


def judge(samples: Sequence[Sample], wall_s: float, slo: Slo) -> SloAttainment:
    """Count the requests of a run that met the limits. A run of no requests met nothing."""
    missed = [slo.missed(sample) for sample in samples]
    met = missed.count([])
    return SloAttainment(
        met=met,
        share=met / len(samples) if samples else 0.0,
        goodput_per_s=met / wall_s if wall_s > 0 else 0.0,
        missed=dict(Counter(name for names in missed for name in names)),
    )


def _seconds(name: str, text: str) -> float:
    found = _LIMIT.fullmatch(text.strip())
    try:
        value = float(found[1]) if found else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={text} is not a time above zero, such as 0.5, 0.5s or 500ms")
    return value / 1000 if found and found[2] == "ms" else value

"""When the sessions of an open loop begin. Pure."""

from itertools import accumulate
from random import Random

BURSTINESS = (0.05, 1e6)
"""The smallest and the largest gamma shape: below, a gap may be too small for a float."""


def check_burstiness(burstiness: float) -> None:
    """Raises ValueError for a shape out of range."""
    least, most = BURSTINESS
    if not least <= burstiness <= most:
        raise ValueError(f"the burstiness must lie in {least:g} to {most:g}")


def arrivals(count: int, rate_per_s: float, burstiness: float, draw: Random) -> list[float]:
    """Draw `count` ascending times in seconds. Gaps are gamma with this shape: 1 is exponential, a Poisson process.

    All are scaled so that the last one comes at `count / rate_per_s`: a Poisson process of which so many arrivals in
    that time are known is the same one, and a run is not asked a tenth more or less than it says.
    """
    times = list(accumulate(draw.gammavariate(burstiness, 1.0) for _ in range(count)))
    return [at * count / (rate_per_s * times[-1]) for at in times]

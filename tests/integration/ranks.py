"""The Mann-Whitney test: how likely two samples of one distribution differ as much as these (two-sided).

By the normal approximation with ties and the correction for continuity, good for samples of twenty and more. Source:
Mann and Whitney 1947; the variance with ties as in Lehmann, Nonparametrics, 1.4.
"""

import math
from collections import Counter
from collections.abc import Sequence


def mann_whitney_p(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the p value; 1.0 where all values are equal. Either sample has at least one value."""
    ranks: dict[float, float] = {}
    below = 0
    counts = Counter([*one, *other])
    for value in sorted(counts):
        ranks[value] = below + (counts[value] + 1) / 2
        below += counts[value]
    n, m, both = len(one), len(other), len(one) + len(other)
    u = sum(ranks[value] for value in one) - n * (n + 1) / 2
    ties = sum(count**3 - count for count in counts.values())
    variance = n * m / 12 * (both + 1 - ties / (both * (both - 1)))
    if variance <= 0:
        return 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))

"""What it costs others when a worker computes again what another one holds, and when that is worth it. Pure.

A request goes where its first token is predicted soonest; but computing what lies elsewhere also delays all that come
behind it, of which its own prediction says nothing. So a token at depth d of a prompt, computed on one worker although
others hold it, weighs besides its own time

    delayed · clip(2 · holders(d) / (HEADROOM · workers · share(d)) - 1, 0, 1)

- `delayed`: how many requests wait at a worker on average, within MOST and LEAST_DELAYED. Each of them loses the time.
- `share(d)`: the part of all recent work that came with the same beginning. What its holders could do for all workers
  is to be HEADROOM times as much: below half of that, one more copy is an investment that the next requests will use,
  and weighs nothing. A conversation that one client goes on with has one holder and nearly no share: it weighs in full.

Shares halve with every HALF_LIFE requests a worker, or SHORTEST in all. They are counted for some depths only, fewer as
they get deeper, and forgotten when they are far too small to change a price.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

LEAST_DELAYED, MOST_DELAYED = 4.0, 24.0
HEADROOM = 8.0
HALF_LIFE, SHORTEST = 32, 256
LINEAR = 16
"""Blocks of which every one is counted; of the next as many every other one, then every fourth of twice as many."""
FEWEST_BEGINNINGS, MOST_BEGINNINGS = 1 << 12, 1 << 16
"""How many beginnings are kept without asking whether they matter, and how many at most."""
FORGOTTEN = 16.0
"""A beginning is forgotten once its share is so many times less than one that changes a price."""
_LARGEST = 1e100


@lru_cache(maxsize=4096)
def depths(blocks: int) -> tuple[int, ...]:
    """Return the depths, in blocks, at which a prompt of so many blocks is counted: the same ones for every prompt."""
    found, depth, step, end = [], 0, 1, LINEAR
    while (depth := depth + step) <= blocks:
        found.append(depth)
        if depth >= end:
            step, end = step * 2, end * 2
    return tuple(found)


class Shares:
    """How much of the recent work came with each beginning. Owner: the router core."""

    # Mutable state: the work behind each beginning and all work, in tokens; the weight of the next request's, which
    # grows instead of all earlier ones' shrinking; and how many beginnings are kept until some are forgotten.

    def __init__(self) -> None:
        self._work: dict[bytes, float] = {}
        self._total = 0.0
        self._weight = 1.0
        self._room = FEWEST_BEGINNINGS

    def __len__(self) -> int:
        return len(self._work)

    def came(self, chain: Sequence[bytes], uncached: int, tokens: int, block_size: int, workers: int) -> None:
        """Count a request of `tokens` tokens, of which at least `uncached` must be computed, for one of `workers`: to a
        beginning belongs what is computed behind it."""
        self._weight *= 2.0 ** (1.0 / max(SHORTEST, HALF_LIFE * workers))
        self._total += self._weight * uncached
        for depth in depths(len(chain)):
            behind = min(uncached, tokens - depth * block_size)
            key = chain[depth - 1]
            self._work[key] = self._work.get(key, 0.0) + self._weight * behind
        if self._weight > _LARGEST:
            self._work = {key: work / self._weight for key, work in self._work.items()}
            self._total /= self._weight
            self._weight = 1.0
        if len(self._work) > self._room:
            self._forget(self._total / (FORGOTTEN * HEADROOM * workers))

    def _forget(self, least: float) -> None:
        """Forget the beginnings with less work than `least`, and the least of what is then still too much."""
        known = [entry for entry in self._work.items() if entry[1] >= least]
        if len(known) > MOST_BEGINNINGS // 2:
            known = sorted(known, key=lambda entry: entry[1], reverse=True)[: MOST_BEGINNINGS // 2]
        self._work = dict(known)
        self._room = max(FEWEST_BEGINNINGS, 2 * len(known))

    def share(self, chain: Sequence[bytes], depth: int) -> float:
        """Return the part, 0 to 1, of the recent work that began with the first `depth` blocks of `chain`, as counted
        at the next depth that is counted."""
        counted = next((d for d in depths(len(chain)) if d >= depth), None)
        if counted is None or not self._total:
            return 0.0
        return self._work.get(chain[counted - 1], 0.0) / self._total


def delaying_tokens(
    shares: Shares, chain: Sequence[bytes], held: Mapping[str, int], block_size: int, waiting: float
) -> dict[str, float]:
    """Return how many tokens' time others would lose by each worker, if it computed again what some other one holds.

    `held`: how many blocks of `chain` each has. `waiting`: requests at a worker, on average.
    """
    delayed = min(MOST_DELAYED, max(LEAST_DELAYED, waiting))
    ending = Counter(held.values())
    levels, holders = sorted(ending, reverse=True), 0
    lost = dict.fromkeys(levels[:1], 0.0)
    # From the deepest holder up: between two levels, the same workers hold every block.
    for deeper, depth in pairwise(levels):
        holders += ending[deeper]
        wanted = HEADROOM * len(held) * shares.share(chain, deeper)
        weight = min(1.0, max(0.0, 2.0 * holders / wanted - 1.0)) if wanted else 1.0
        lost[depth] = lost[deeper] + delayed * weight * (deeper - depth) * block_size
    return {name: lost[blocks] for name, blocks in held.items()}

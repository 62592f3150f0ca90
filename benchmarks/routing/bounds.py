"""What caches could have found, without any routing: bounds for the hits of a cluster.

All are of tokens, over turns in the order in which they come, each served before the next one comes: an infinite cache,
one least-recently-used cache as large as all workers' together, and Belady's, which evicts what is used again last.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from benchmarks.routing.workloads import BLOCK, BlockKey, PromptTurn


def infinite(turns: Iterable[PromptTurn]) -> float:
    """Return the share of prompt tokens that a cache without bounds finds."""
    seen: set[BlockKey] = set()
    found = total = 0
    for turn in turns:
        found += _hit(turn, seen.__contains__)
        total += turn.prompt_tokens
        seen.update(turn.keys)
    return found / total


def lru(turns: Iterable[PromptTurn], capacity: int) -> float:
    """Return the share of prompt tokens that one least-recently-used cache of `capacity` blocks finds."""
    held: OrderedDict[BlockKey, None] = OrderedDict()
    found = total = 0
    for turn in turns:
        found += _hit(turn, held.__contains__)
        total += turn.prompt_tokens
        # A block's parent is used after it, so leaves go first.
        for block in reversed(turn.keys):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return found / total


def belady(turns: Sequence[PromptTurn], capacity: int) -> float:
    """Return the share of prompt tokens that a cache of `capacity` blocks finds that knows what will come."""
    uses: dict[BlockKey, list[int]] = {}
    for number, turn in enumerate(turns):
        for block in turn.keys:
            uses.setdefault(block, []).append(number)
    for later in uses.values():
        later.reverse()
    never = len(turns)
    held: dict[BlockKey, int] = {}
    latest: list[tuple[int, BlockKey]] = []
    found = total = 0
    for turn in turns:
        found += _hit(turn, held.__contains__)
        total += turn.prompt_tokens
        for block in turn.keys:
            uses[block].pop()
            held[block] = again = uses[block][-1] if uses[block] else never
            heapq.heappush(latest, (-again, block))
        while len(held) > capacity:
            again, block = heapq.heappop(latest)
            if held.get(block) == -again:
                del held[block]
    return found / total


def _hit(turn: PromptTurn, is_held: Callable[[BlockKey], bool]) -> int:
    count = 0
    for block in turn.keys:
        if not is_held(block):
            break
        count += 1
    return min(count * BLOCK, turn.prompt_tokens - 1)

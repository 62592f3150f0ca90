"""Finds the rows of a decode step that read the same blocks: `plan_decode` makes one product of all of them."""

from collections import defaultdict
from collections.abc import Sequence

from kernels.decode_plan import SharedPrefix

MOST_NESTED = 3
"""The deepest nesting for which `kernels.decode_plan.geometry_for` sizes the buffers."""


def shared_prefixes(
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    block_size: int,
    min_tokens: int = 256,
) -> list[SharedPrefix]:
    """Return the tree of common leading blocks of `tables`, outermost first, each worth at least `min_tokens` tokens
    beyond the one around it: fewer are read sooner than they are dealt with. Row r sees `lengths[r]` tokens; only whole
    blocks are shared."""
    found: list[SharedPrefix] = []

    def walk(rows: Sequence[int], depth: int, covered: int, nested: int) -> None:
        branches = defaultdict[int, list[int]](list)
        for row in rows:
            if (depth + 1) * block_size <= lengths[row]:
                branches[tables[row][depth]].append(row)
        for branch in branches.values():
            if len(branch) < 2:
                continue
            most = min(lengths[row] for row in branch) // block_size
            # What the least and the greatest of a set of sequences have in common, all of them have.
            tails = [list(tables[row][depth:most]) for row in branch]
            low, high = min(tails), max(tails)
            end = next((at for at in range(depth, most) if low[at - depth] != high[at - depth]), most)
            own = (end - covered) * block_size >= min_tokens
            if own:
                found.append(SharedPrefix(tuple(branch), end * block_size))
            if nested + own < MOST_NESTED:
                walk(branch, end, end if own else covered, nested + own)

    walk(range(len(tables)), 0, 0, 0)
    return found

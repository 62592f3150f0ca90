"""Compares LRU leaves with Belady's optimum, and with policies that predict reuse: `python -m benchmarks.eviction`.

Plays a trace (its form: cluster/bench/traces.py; made from a seed when no file is given) one request after the other
through the real KV cache manager, a trace block being one token at block size 1, and counts prompt blocks found.
Belady's optimum knows the future: it forgets the block that is wanted again last. The other policies are simulated;
each gives a block a number when it is let go, and the smallest goes first. A block's number is never below that of a
block after it in a sequence, so that only leaves are evicted. `gap closed` is the share of the distance between LRU and
the optimum; a policy would have to close a fifth of it on a trace that it was not tuned on to be worth having.
"""

import heapq
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks import output, traces
from cluster.bench.traces import TraceRow, read
from engine.kv.manager import KVCacheManager

CAPACITIES = (1000, 2000, 4000, 8000, 16_000, 32_000)
NEVER = 1 << 60


class Use(msgspec.Struct, frozen=True):
    """What a policy may know of a block when a request lets it go."""

    uses: int
    """How many requests have used it since it was cached."""
    tick: int
    """Blocks let go so far: the age of everything is the distance to it."""
    depth: int
    continued: bool
    """Whether a request that used it found at least half of its prompt in the cache."""
    floor: float
    """The number of the last block that was evicted."""
    capacity: int


Policy = Callable[[Use], float]
POLICIES: dict[str, Policy] = {
    "frequency": lambda use: min(use.uses, 4) * NEVER + use.tick,
    "frequency, aged": lambda use: use.floor + use.uses,
    "recency + frequency": lambda use: use.tick + use.capacity * min(use.uses - 1, 4) / 4,
    "depth": lambda use: use.tick - use.capacity * use.depth / 400,
    "conversation": lambda use: use.tick + use.capacity * use.continued,
}


def lru(rows: Sequence[TraceRow], capacity: int, count_from: int = 0) -> int:
    """Count the blocks found by the engine's own manager, from row `count_from` on. Prompts beyond the capacity pass it
    by."""
    kv = KVCacheManager(capacity, 1, "trace")
    found = 0
    for number, row in enumerate(rows):
        ids = row.hash_ids
        lease = kv.acquire(b"", ids, match_limit=len(ids), room_tokens=len(ids))
        if lease is None:
            continue
        found += lease.cached_tokens if number >= count_from else 0
        kv.commit(lease, ids)
        kv.release(lease)
        kv.take_evicted()
        kv.take_handed_out()
    return found


def belady(rows: Sequence[TraceRow], capacity: int, count_from: int = 0) -> int:
    """Count the most blocks that any cache of this capacity could have found: a request's own blocks are all held at
    once, then whatever is wanted latest goes first."""
    wanted_next: list[list[int]] = []
    last: dict[int, int] = {}
    for number in range(len(rows) - 1, -1, -1):
        wanted_next.append([last.get(block, NEVER) for block in rows[number].hash_ids])
        last |= dict.fromkeys(rows[number].hash_ids, number)
    wanted_next.reverse()

    def numbers(number: int, _known: int) -> list[float]:
        return [float(-when) for when in wanted_next[number]]

    return _play(rows, capacity, numbers, count_from)


def simulate(rows: Sequence[TraceRow], capacity: int, policy: Policy, count_from: int = 0) -> int:
    uses: dict[int, int] = {}
    continued: set[int] = set()
    tick, floor = 0, 0.0

    def evicted(block: int, number: float) -> None:
        nonlocal floor
        floor = max(floor, number)
        del uses[block]
        continued.discard(block)

    def numbers(number: int, known: int) -> list[float]:
        nonlocal tick
        ids, found = rows[number].hash_ids, []
        if known * 2 >= len(ids):
            continued.update(ids)
        tick += len(ids)
        for depth, block in enumerate(ids):
            uses[block] = uses.get(block, 0) + 1
            # The head of a sequence is let go last.
            use = Use(uses[block], tick - depth, depth, block in continued, floor, capacity)
            found.append(policy(use))
        return found

    return _play(rows, capacity, numbers, count_from, evicted)


def _play(
    rows: Sequence[TraceRow],
    capacity: int,
    numbers: Callable[[int, int], list[float]],
    count_from: int,
    evicted: Callable[[int, float], None] = lambda block, number: None,
) -> int:
    """Count the blocks found when those with the smallest of `numbers(row, blocks found)` are evicted first, deeper
    ones first among equals."""
    cached: dict[int, float] = {}
    line: list[tuple[float, int, int]] = []
    found = 0
    for number, row in enumerate(rows):
        ids = row.hash_ids
        if len(ids) > capacity:
            continue
        known = 0
        while known < len(ids) and cached.pop(ids[known], None) is not None:
            known += 1
        found += known if number >= count_from else 0
        while len(cached) + len(ids) > capacity:
            least, _, block = heapq.heappop(line)
            if cached.get(block) == least:
                del cached[block]
                evicted(block, least)
        for depth, (block, its) in enumerate(zip(ids, numbers(number, known), strict=True)):
            cached[block] = its
            heapq.heappush(line, (its, -depth, block))
    return found


def compare(
    rows: Sequence[TraceRow], capacities: Sequence[int], count_from: int = 0
) -> list[dict[str, str | int | float]]:
    """Return one row per capacity: shares of prompt blocks found, then each policy's share of the gap."""
    total = sum(len(row.hash_ids) for row in rows[count_from:])
    table: list[dict[str, str | int | float]] = []
    for capacity in capacities:
        least, most = lru(rows, capacity, count_from), belady(rows, capacity, count_from)
        line: dict[str, str | int | float] = {
            "blocks": capacity,
            "LRU %": 100 * least / total,
            "optimum %": 100 * most / total,
        }
        for name, policy in POLICIES.items():
            gain = simulate(rows, capacity, policy, count_from) - least
            line[f"gap closed by {name} %"] = 100 * gain / max(1, most - least)
        table.append(line)
    return table


def main() -> None:
    parser = output.parser(__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="JSONL, or JSONL.xz; default: made from --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=4000, help="of the made trace")
    parser.add_argument("--capacity", type=int, action="append", help="in blocks; may be repeated")
    parser.add_argument("--skip", type=float, default=0.0, help="share of rows to play before counting")
    options = parser.parse_args()
    rows = read(options.trace) if options.trace else traces.make(
        traces.TraceShape(rows=options.rows), options.seed
    )
    blocks, tokens = traces.ideal(rows)
    distinct = len({block for row in rows for block in row.hash_ids})
    facts: dict[str, str | int | float] = {
        "rows": len(rows),
        "blocks": sum(len(row.hash_ids) for row in rows),
        "distinct": distinct,
        "ideal reuse, blocks %": 100 * blocks,
        "ideal reuse, tokens %": 100 * tokens,
    }
    capacities = options.capacity or [c for c in CAPACITIES if c < distinct]
    table = compare(rows, capacities, int(len(rows) * options.skip))
    output.tell(options, "eviction", {"Trace": [facts], "Prompt blocks found": table})


if __name__ == "__main__":
    main()

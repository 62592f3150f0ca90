"""A seeded maker of request traces: `python -m benchmarks.traces --rows 4000 > FILE`.

The form is Mooncake's; `cluster/bench/traces.py` describes and reads it.
"""

import argparse
import heapq
from collections.abc import Iterable
from random import Random

import msgspec

from cluster.bench.traces import BLOCK_TOKENS, TraceRow


class TraceShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a trace: conversations that begin at random, each over one of a few system prompts (the first is the
    most popular), and go on for a geometric number of turns after log-normal pauses. A turn adds the answer before it
    and new text."""

    rows: int = 4000
    rows_per_s: float = 4.0
    systems: int = 12
    system_blocks: int = 8
    one_turn: float = 0.6
    """Share of conversations that end with their first turn; the others end with each turn with `ends`."""
    ends: float = 0.25
    pause_s: float = 60.0
    pause_sigma: float = 1.0
    first_tokens: float = 4000.0
    turn_tokens: float = 1200.0
    length_sigma: float = 1.0
    max_tokens: int = 131_072


def make(shape: TraceShape, seed: int) -> list[TraceRow]:
    """Return a trace in order of time: the same for the same seed, and a longer one begins like a shorter one."""
    random = Random(seed)
    ids = iter(range(1 << 62))
    systems = [[next(ids) for _ in range(shape.system_blocks)] for _ in range(shape.systems)]
    begins_per_s = shape.rows_per_s / (1 + (1 - shape.one_turn) / shape.ends)
    rows: list[TraceRow] = []
    begin_s = random.expovariate(begins_per_s)
    due: list[tuple[float, int, list[int], int]] = []
    while len(rows) < shape.rows:
        if due and due[0][0] <= begin_s:
            at_s, turn, blocks, tokens = heapq.heappop(due)
            more = _length(random, shape.turn_tokens, shape)
        else:
            at_s, turn, blocks = begin_s, 0, list(systems[_popular(random, shape.systems)])
            begin_s += random.expovariate(begins_per_s)
            tokens, more = len(blocks) * BLOCK_TOKENS, _length(random, shape.first_tokens, shape)
        output = _length(random, 200.0, shape)
        tokens += more
        if tokens > shape.max_tokens:
            continue
        # The block that was partly filled is another one now that it holds more.
        full = blocks[: (tokens - more) // BLOCK_TOKENS]
        blocks = full + [next(ids) for _ in range(-(-tokens // BLOCK_TOKENS) - len(full))]
        rows.append(TraceRow(int(at_s * 1000), tokens, output, blocks))
        if random.random() < (1 - shape.one_turn if turn == 0 else 1 - shape.ends):
            pause_s = random.lognormvariate(0.0, shape.pause_sigma) * shape.pause_s
            heapq.heappush(due, (at_s + pause_s, turn + 1, blocks, tokens + output))
    return rows


def ideal(rows: Iterable[TraceRow]) -> tuple[float, float]:
    """Return the share of prompt blocks, and of prompt tokens, that a cache without bounds would have had."""
    seen: set[int] = set()
    blocks = hit_blocks = tokens = hit_tokens = 0
    for row in rows:
        known = 0
        while known < len(row.hash_ids) and row.hash_ids[known] in seen:
            known += 1
        seen.update(row.hash_ids)
        blocks += len(row.hash_ids)
        hit_blocks += known
        tokens += row.input_length
        hit_tokens += min(known * BLOCK_TOKENS, row.input_length)
    return hit_blocks / blocks, hit_tokens / tokens


def _length(random: Random, median: float, shape: TraceShape) -> int:
    return max(1, int(random.lognormvariate(0.0, shape.length_sigma) * median))


def _popular(random: Random, count: int) -> int:
    """Draw one of `count`, the first twice as often as the second, three times as often as the third (Zipf)."""
    return random.choices(range(count), [1 / (n + 1) for n in range(count)])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rows", type=int, default=TraceShape().rows)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for row in make(TraceShape(rows=options.rows), options.seed):
        print(msgspec.json.encode(row).decode())


if __name__ == "__main__":
    main()

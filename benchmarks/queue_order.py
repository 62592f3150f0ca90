"""In which order to serve a queue of prompts that share prefixes: `python -m benchmarks.queue_order`.

The prompts are leaves of a random tree; the cache, the real one, holds only some of the tree at a time. Prompts are
served one after the other as first come first served (FCFS), longest cached prefix first (LPF: what the prefill
scheduler does at λ = 0), depth first through the tree (optimal when the cache holds at least the longest prompt, by
RadixAttention's theorem 3.1, but blind to who waits), and, for small queues, in every order there is. Hit rate is the
share of prompt tokens found cached.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from random import Random
from statistics import fmean

from benchmarks import output
from engine.kv.manager import KVCacheManager

BLOCK = 4
Prompt = tuple[int, ...]


def prompts(random: Random, count: int, depth: int = 3, branches: int = 3) -> list[Prompt]:
    """`count` leaves of a random tree, in random order: each edge is 2 to 12 tokens, each prompt ends with its own."""
    edges: dict[tuple[int, ...], list[int]] = {}
    drawn = []
    for _ in range(count):
        way: tuple[int, ...] = ()
        tokens: list[int] = []
        for _ in range(depth):
            way = (*way, random.randrange(branches))
            if way not in edges:
                edges[way] = [random.randrange(1 << 16) for _ in range(random.randint(2, 12))]
            tokens += edges[way]
        drawn.append((*tokens, *(random.randrange(1 << 16) for _ in range(random.randint(1, 6)))))
    return drawn


class Server:
    """Prompts go through one at a time; counts what it found cached."""

    def __init__(self, blocks: int) -> None:
        self.kv = KVCacheManager(blocks, BLOCK, "queue")
        self.found = 0

    def matched(self, prompt: Prompt) -> int:
        return self.kv.matched_tokens(b"", prompt, len(prompt) - 1)

    def serve(self, prompt: Prompt) -> None:
        lease = self.kv.acquire(
            b"", prompt, match_limit=len(prompt) - 1, room_tokens=len(prompt)
        )
        assert lease is not None, "a prompt is longer than the cache"
        self.found += lease.cached_tokens
        self.kv.copied(lease)
        self.kv.commit(lease, prompt, tail=True)
        self.kv.release(lease)


def in_order(queue: Iterable[Prompt], blocks: int) -> int:
    server = Server(blocks)
    for prompt in queue:
        server.serve(prompt)
    return server.found


def longest_prefix_first(queue: Sequence[Prompt], blocks: int) -> int:
    """Ties go to the one that came first."""
    server, waiting = Server(blocks), list(queue)
    while waiting:
        best = max(waiting, key=server.matched)
        waiting.remove(best)
        server.serve(best)
    return server.found


def best_possible(queue: Sequence[Prompt], blocks: int) -> int:
    return max(in_order(order, blocks) for order in itertools.permutations(queue))


def needed(queue: Iterable[Prompt], extra: float) -> int:
    """Blocks for the longest prompt, and `extra` times as many more."""
    longest = max(-(-len(prompt) // BLOCK) for prompt in queue)
    # A boundary block that is copied is there twice for a moment.
    return math.ceil(longest * (1 + extra)) + 1


def measure(seed: int, small: int, large: int, cases: int) -> list[dict[str, str | int | float]]:
    """Mean hit rates (%) over `cases` queues of `small` and of `large` prompts, at two sizes of the cache."""
    table = []
    for count, extra in itertools.product((small, large), (0.25, 1.0)):
        random = Random(seed)
        rates: dict[str, list[float]] = {name: [] for name in ("FCFS", "LPF", "depth first", "best")}
        for _ in range(cases):
            queue = prompts(random, count)
            blocks, total = needed(queue, extra), sum(map(len, queue))
            rates["FCFS"].append(in_order(queue, blocks) / total)
            rates["LPF"].append(longest_prefix_first(queue, blocks) / total)
            rates["depth first"].append(in_order(sorted(queue), blocks) / total)
            if count == small:
                rates["best"].append(best_possible(queue, blocks) / total)
        line: dict[str, str | int | float] = {
            "prompts": count,
            "cache": f"longest + {extra:.0%}",
        }
        for name, shares in rates.items():
            line[f"{name} %"] = 100 * fmean(shares) if shares else "-"
        best = rates["best"] or rates["depth first"]
        line["LPF / best %"] = 100 * fmean(rates["LPF"]) / fmean(best)
        line["worst case %"] = 100 * min(a / b if b else 1.0 for a, b in zip(rates["LPF"], best, strict=True))
        table.append(line)
    return table


def main() -> None:
    parser = output.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", type=int, default=6, help="prompts where every order is tried")
    parser.add_argument("--large", type=int, default=60)
    parser.add_argument("--cases", type=int, default=12)
    options = parser.parse_args()
    table = measure(options.seed, options.small, options.large, options.cases)
    output.show("Prompt tokens found cached (without a best: LPF / depth first)", table)
    output.write(options.json, {"order": table})


if __name__ == "__main__":
    main()

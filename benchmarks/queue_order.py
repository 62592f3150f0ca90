"""Compares orders in which to serve a queue of prompts that share prefixes: `python -m benchmarks.queue_order`.

The prompts are leaves of a random tree; the cache, the real one, holds only some of the tree at a time. `waiting`
prompts are there at a time, and a new one comes when one has been served. They are served one after the other as first
come first served (FCFS), longest cached prefix first (LPF: what the prefill scheduler does at λ = 0), depth first among
those waiting, and, for small queues, in the best of all orders there are. Serving all of them depth first is optimal
when the cache holds the longest prompt (RadixAttention, theorem 3.1) but needs to know what will come: `all known`. Hit
rate is the share of prompt tokens found cached.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from statistics import fmean

from benchmarks import output
from engine.kv.manager import KVCacheManager

BLOCK = 4
NAMES = ("FCFS", "LPF", "depth first", "best", "all known")
Prompt = tuple[int, ...]


def prompts(random: Random, count: int, depth: int = 3, branches: int = 3) -> list[Prompt]:
    """Return `count` leaves of a random tree, in random order: each edge is 2 to 12 tokens, each prompt ends with its
    own."""
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
    """Serves prompts one at a time and counts what it found cached."""

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


Choose = Callable[[Server, Sequence[Prompt]], Prompt]


def in_order(queue: Iterable[Prompt], blocks: int) -> int:
    server = Server(blocks)
    for prompt in queue:
        server.serve(prompt)
    return server.found


def among(queue: Sequence[Prompt], blocks: int, waiting: int, choose: Choose) -> int:
    """Serve the one of the first `waiting` that `choose` takes, until none is left."""
    server, line = Server(blocks), list(queue)
    while line:
        prompt = choose(server, line[:waiting])
        line.remove(prompt)
        server.serve(prompt)
    return server.found


def longest_prefix(server: Server, line: Sequence[Prompt]) -> Prompt:
    """Choose the prompt with the longest cached prefix; ties go to the one that came first."""
    return max(line, key=server.matched)


class DepthFirst:
    """Chooses the next in the tree's order after the one served last, round and round."""

    def __init__(self) -> None:
        self._last: Prompt = ()

    def __call__(self, server: Server, line: Sequence[Prompt]) -> Prompt:
        later = [prompt for prompt in line if prompt > self._last]
        self._last = min(later or line)
        return self._last


def best_possible(queue: Sequence[Prompt], blocks: int, waiting: int) -> int:
    """Return the best hit rate over all orders in which every prompt is served while it waits."""
    return max(in_order(order, blocks) for order in _orders((), tuple(queue), waiting))


def _orders(done: tuple[Prompt, ...], line: tuple[Prompt, ...], waiting: int) -> Iterator[tuple[Prompt, ...]]:
    if not line:
        yield done
    for at in range(min(waiting, len(line))):
        yield from _orders((*done, line[at]), line[:at] + line[at + 1 :], waiting)


def needed(queue: Iterable[Prompt], extra: float) -> int:
    """Return the blocks for the longest prompt, and `extra` times as many more."""
    longest = max(-(-len(prompt) // BLOCK) for prompt in queue)
    # A boundary block that is copied is there twice for a moment.
    return math.ceil(longest * (1 + extra)) + 1


def measure(
    seed: int, cases: int, small: int = 7, large: int = 120
) -> list[dict[str, str | int | float]]:
    """Return mean hit rates (%) over `cases` queues of `small` and of `large` prompts."""
    settings = ((small, 3, 0.25), (small, small, 0.25), (large, 8, 0.25), (large, 32, 0.25), (large, 32, 4.0))
    table = []
    for count, waiting, extra in settings:
        random = Random(seed)
        rates: dict[str, list[float]] = {name: [] for name in NAMES}
        for _ in range(cases):
            queue = prompts(random, count)
            blocks, total = needed(queue, extra), sum(map(len, queue))
            rates["FCFS"].append(in_order(queue, blocks) / total)
            rates["LPF"].append(among(queue, blocks, waiting, longest_prefix) / total)
            rates["depth first"].append(among(queue, blocks, waiting, DepthFirst()) / total)
            if count == small:
                rates["best"].append(best_possible(queue, blocks, waiting) / total)
            rates["all known"].append(in_order(sorted(queue), blocks) / total)
        line: dict[str, str | int | float] = {
            "prompts": count,
            "waiting": waiting,
            "cache": f"longest + {extra:.0%}",
        }
        line |= {f"{name} %": 100 * fmean(shares) if shares else "-" for name, shares in rates.items()}
        bound = rates["best"] or rates["all known"]
        line["LPF / bound %"] = 100 * fmean(rates["LPF"]) / fmean(bound)
        line["its worst %"] = 100 * min(a / b for a, b in zip(rates["LPF"], bound, strict=True) if b)
        table.append(line)
    return table


def main() -> None:
    parser = output.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10)
    options = parser.parse_args()
    table = measure(options.seed, options.cases)
    title = "Prompt tokens found cached; the bound is the best order, or all known"
    output.tell(options, "queue_order", {title: table})


if __name__ == "__main__":
    main()

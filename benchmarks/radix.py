"""Measures what the prefix tree costs: `python -m benchmarks.radix`.

Nanoseconds of processor time per block to insert, match and evict in trees of 1,000 to 1,000,000 blocks (sequences of
64 blocks of 16 tokens), and the same work in a path-compressed tree; children of one hot prefix; a sequence of a
million tokens; bytes per node. Figures per block are the best of several samples: other work can only add to them.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

from benchmarks import output
from benchmarks.compressed_tree import CompressedTree
from engine.kv.radix_cache import Node, RadixCache
from engine.types import BlockId

BLOCK_TOKENS = 16
SEQUENCE_BLOCKS = 64
SIZES = (1000, 10_000, 100_000, 1_000_000)
SAMPLES = 12
Line = dict[str, str | int | float]


def fresh(count: int, seed: int) -> list[int]:
    """Return token ids, each an object of its own as in a request that has just been decoded."""
    random = Random(seed)
    return [300 + random.getrandbits(17) for _ in range(count)]


def insert(cache: RadixCache, tokens: list[int], block: int) -> int:
    """Index a sequence from `block` on and let it go; returns the next block."""
    node: Node = cache.root(b"")
    path: list[Node] = []
    for at in range(0, len(tokens), BLOCK_TOKENS):
        found = cache.insert(node, tokens[at : at + BLOCK_TOKENS], BlockId(block + len(path)))
        assert found is not None
        path.append(found)
        node = found
    for node in reversed(path):
        cache.let_go(node.block)
    return block + len(path)


def sized(blocks: int) -> Line:
    """Return ns per block in a tree that holds `blocks` of them."""
    cache = RadixCache(BLOCK_TOKENS, "benchmark")
    compressed = CompressedTree(BLOCK_TOKENS)
    sequences = max(SAMPLES + 1, blocks // SEQUENCE_BLOCKS)
    tokens = SEQUENCE_BLOCKS * BLOCK_TOKENS
    next_block = 0
    timed: dict[str, list[int]] = {
        name: [] for name in ("insert", "match", "evict", "compressed insert", "compressed match")
    }

    def sample(name: str, work: Callable[[], object]) -> None:
        begin_ns = time.thread_time_ns()
        work()
        timed[name].append(time.thread_time_ns() - begin_ns)

    with _no_collection():
        for number in range(sequences):
            sequence = fresh(tokens, number)
            ids = [BlockId(n) for n in range(next_block, next_block + SEQUENCE_BLOCKS)]
            if number < sequences - SAMPLES:
                insert(cache, sequence, next_block)
                compressed.insert(sequence, ids)
            else:
                sample("insert", lambda s=sequence, b=next_block: insert(cache, s, b))  # type: ignore[misc]
                sample("compressed insert", lambda s=sequence, i=ids: compressed.insert(s, i))  # type: ignore[misc]
            next_block += SEQUENCE_BLOCKS
        for number in Random(1).choices(range(sequences), k=SAMPLES):
            sequence = fresh(tokens, number)
            assert len(cache.match(b"", sequence, tokens).nodes) == SEQUENCE_BLOCKS
            assert compressed.match(sequence)[1] == SEQUENCE_BLOCKS
            sample("match", lambda s=sequence: cache.match(b"", s, tokens))  # type: ignore[misc]
            sample("compressed match", lambda s=sequence: compressed.match(s))  # type: ignore[misc]
        for _ in range(SAMPLES):
            sample("evict", lambda: [cache.evict(b"") for _ in range(SEQUENCE_BLOCKS)])
    line: Line = {name: min(ns) / SEQUENCE_BLOCKS for name, ns in timed.items()}
    return {"blocks": blocks} | line


def hot_prefix(children: int) -> Line:
    """Return ns per operation on the children of one node, which all begin with the same half block."""
    cache = RadixCache(BLOCK_TOKENS, "benchmark")
    prefix = cache.insert(cache.root(b""), fresh(BLOCK_TOKENS, 0), BlockId(children))
    assert prefix is not None
    half = fresh(BLOCK_TOKENS // 2, 1)
    keys = [half + fresh(BLOCK_TOKENS // 2, 2 + child) for child in range(children)]
    root_key = fresh(BLOCK_TOKENS, 0)
    tenth = children // 10
    with _no_collection():
        for child in range(children - tenth):
            cache.insert(prefix, keys[child], BlockId(child))
        begin_ns = time.thread_time_ns()
        for child in range(children - tenth, children):
            cache.insert(prefix, keys[child], BlockId(child))
        insert_ns = time.thread_time_ns() - begin_ns
        for child in Random(3).sample(range(children), children):
            cache.let_go(BlockId(child))
        begin_ns = time.thread_time_ns()
        for child in range(tenth):
            prompt = root_key + keys[child][:12] + half
            assert cache.match(b"", prompt, 2 * BLOCK_TOKENS).partial_tokens >= 12
        match_ns = time.thread_time_ns() - begin_ns
        begin_ns = time.thread_time_ns()
        for _ in range(tenth):
            cache.evict(b"")
        evict_ns = time.thread_time_ns() - begin_ns
    return {
        "children": children,
        "insert": insert_ns / tenth,
        "match the longest": match_ns / tenth,
        "evict": evict_ns / tenth,
    }


def long_sequence(tokens: int) -> Line:
    """Return milliseconds to insert and to match one sequence."""
    cache = RadixCache(BLOCK_TOKENS, "benchmark")
    sequence = fresh(tokens, 0)
    with _no_collection():
        begin_ns = time.thread_time_ns()
        insert(cache, sequence, 0)
        inserted_ns = time.thread_time_ns()
        cache.match(b"", sequence, tokens)
        matched_ns = time.thread_time_ns()
    return {
        "tokens": tokens,
        "insert ms": (inserted_ns - begin_ns) / 1e6,
        "match ms": (matched_ns - inserted_ns) / 1e6,
    }


def node_bytes(blocks: int = 6400) -> Line:
    """Return bytes of memory per block of either tree, all included but the block numbers themselves."""
    sequences = [fresh(SEQUENCE_BLOCKS * BLOCK_TOKENS, n) for n in range(blocks // SEQUENCE_BLOCKS)]
    ids = [BlockId(n) for n in range(blocks)]

    def ours() -> object:
        cache = RadixCache(BLOCK_TOKENS, "benchmark")
        for number, sequence in enumerate(sequences):
            insert(cache, sequence, number * SEQUENCE_BLOCKS)
        return cache

    def peer() -> object:
        tree = CompressedTree(BLOCK_TOKENS)
        for number, sequence in enumerate(sequences):
            tree.insert(sequence, ids[number * SEQUENCE_BLOCKS : (number + 1) * SEQUENCE_BLOCKS])
        return tree

    return {"one block a node": _allocated(ours) / blocks, "compressed": _allocated(peer) / blocks}


def _allocated(build: Callable[[], object]) -> int:
    tracemalloc.start()
    built = build()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del built
    return size


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch the garbage collector off: its passes depend on what else the process holds."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main() -> None:
    parser = output.parser(__doc__)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="blocks of the largest tree")
    options = parser.parse_args()
    results: dict[str, list[Line]] = {
        "ns per block": [sized(blocks) for blocks in SIZES if blocks <= options.largest],
        "ns per child of a hot prefix": [
            hot_prefix(children) for children in (1000, 10_000, 100_000) if children <= options.largest
        ],
        "one sequence": [long_sequence(1_000_000)],
        "bytes per block": [node_bytes()],
    }
    output.tell(options, "radix", results)


if __name__ == "__main__":
    main()

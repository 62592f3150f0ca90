"""Shadow memory: instead of keys and values, every row knows which token after which past it stands for.

A row is a 61-bit number chained over the namespace and all tokens up to its position, as a real KV row depends on
its whole prefix. A reader recomputes the chain, so a wrong, stale, foreign or blank row is noticed as it is
read, and the next token is a function of the last row. Blocks that are handed out anew are wiped.
"""

from array import array
from collections import Counter
from functools import reduce
from types import SimpleNamespace

import xxhash

from engine.beam import BeamSearch
from engine.kv.block_pool import BlockPool, BlockState
from engine.kv.layout import KVLayout
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.tiers import Tiers
from engine.messages import Handoff, MemoryUse
from engine.plan import banned_tokens, end_tokens, finish_reason
from engine.step import Candidates, Drawn, Row, StepPlan
from engine.types import Beam, BlockId, RequestRecord
from kernels.compilations import Compilations
from tests.sim.clock import Process, Violation
from transfer import digest

VOCAB = 61
STOP_IDS = frozenset({60})
FINGERPRINT = "shadow"
_MASK = (1 << 61) - 1


def mix(past: int, token: int) -> int:
    return ((past ^ token + 1) * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1) & _MASK


def root(namespace: bytes) -> int:
    return mix(int.from_bytes(namespace[:7], "little"), 977)


def draw(row: int, sample_index: int, banned: tuple[int, ...]) -> int:
    token = (row >> 23 ^ sample_index * 0x9E3779B1) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def candidates(row: int, count: int, banned: tuple[int, ...]) -> Candidates:
    """Return the likeliest tokens, with log probabilities of their own for every row."""
    likely = []
    for token in range(VOCAB):
        mixed = (row ^ (token + 1) * 0x9E3779B97F4A7C1) * 0x2545F4914F6CDD1D & _MASK
        likely.append((-(mixed >> 40) / (1 << 18), token))
    likely.sort(reverse=True)
    return tuple((t, log_prob) for log_prob, t in likely if t not in banned)[:count]


def expected_output(record: RequestRecord) -> list[int]:
    """Return the whole answer of the uninterrupted run, from the tokens alone."""
    past = root(record.namespace)
    for token in record.tokens[: record.prompt_tokens]:
        past = mix(past, token)
    output: list[int] = []
    while True:
        token = draw(past, record.sample_index, banned_tokens(record, len(output), STOP_IDS))
        output.append(token)
        if finish_reason(record, len(output), token, STOP_IDS) is not None:
            return output
        past = mix(past, token)


def expected_answers(record: RequestRecord) -> list[Beam]:
    """Return the answers of an undisturbed beam search, from the tokens alone, as many as it is wide."""
    assert record.beams is not None
    search = BeamSearch(record.beams, record.max_tokens, end_tokens(record, STOP_IDS))
    prompt = root(record.namespace)
    for token in record.tokens[: record.prompt_tokens]:
        prompt = mix(prompt, token)
    while not search.is_over:
        drawn = []
        for live in search.live:
            banned = banned_tokens(record, len(live.ids), STOP_IDS)
            drawn.append(candidates(reduce(mix, live.ids, prompt), search.candidates, banned))
        search.advance(drawn)
    return search.answers


def block_digest(
    rows: list[int], tokens: int, identity: bytes, generation: int, name: Handoff
) -> int:
    """Digest as `transfer.digest` does: over the valid rows of a block, bound to what the block is and to the attempt.
    """
    bound = digest.binding(identity, generation, name)
    return xxhash.xxh3_64_intdigest(array("Q", rows[:tokens]).tobytes() + bound)


class ShadowKV:
    """What `engine.storage.paged.PagedKV` is to a worker. Mutable state: rows and generations by block."""

    device = "cpu"

    def __init__(self, process: Process, blocks: int, block_size: int) -> None:
        self.process = process
        self.blocks = blocks
        self.block_size = block_size
        self.layout = KVLayout(kv_heads=1, layers=1, block_size=block_size, head_dim=1)
        self.block_bytes = self.layout.block_bytes
        self.rows = [[0] * block_size for _ in range(blocks)]
        self.generations = [0] * blocks
        self.manager: KVCacheManager = None  # type: ignore[assignment]
        self.runner = ShadowRunner(self)

    @property
    def pool(self) -> BlockPool:
        return self.manager.pool

    def advance(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            self.generations[block] += 1
            self.rows[block] = [0] * self.block_size

    def check(self) -> None:
        if self.generations != self.pool.generations:
            raise Violation(f"{self.process}: a generation in memory lags behind the pool's")

    def close(self) -> None:
        pass


class ShadowRunner:
    """Fulfils `engine.runner.Runner`; verifies every row it reads and every block it writes."""

    def __init__(self, kv: ShadowKV) -> None:
        self.kv = kv
        self.copies = 0
        self.computed_tokens = 0
        self._copied: Counter[BlockId] = Counter()

    def run(self, plan: StepPlan) -> list[Drawn]:
        rows, pool = self.kv.rows, self.kv.pool
        self._copied.clear()
        for source, target in plan.copies:
            if not pool.refs(source):
                raise Violation(f"{self.kv.process}: block {source} is copied but nobody holds it")
            self._writable(target, "copy-on-write")
            rows[target] = list(rows[source])
            self.copies += 1
        self.computed_tokens += plan.computed_tokens
        # Whoever holds a block only for its copy does not hold it any more.
        self._copied = Counter(source for source, _ in plan.copies)
        return [drawn for row in plan.rows for drawn in self._row(row)]

    def _row(self, row: Row) -> list[Drawn]:
        kv, size, blocks = self.kv, self.kv.block_size, row.blocks
        rows, tokens, start = kv.rows, row.tokens, row.start
        for index in range(start // size, (row.end - 1) // size + 1):
            self._writable(blocks[index], row.request)
        past = root(row.record.namespace)
        for at in range(row.end):
            past = mix(past, tokens[at])
            block = rows[blocks[at // size]]
            if at >= start:
                block[at % size] = past
            elif block[at % size] != past:
                raise Violation(
                    f"{kv.process}: {row.request} reads a {'wrong' if block[at % size] else 'blank'} row"
                    f" at position {at}, block {blocks[at // size]}"
                )
        if not row.draw:
            return []
        if row.candidates:
            return [candidates(past, row.candidates, row.banned)]
        return [draw(past, row.record.sample_index, row.banned)]

    def _writable(self, block: BlockId, who: str) -> None:
        pool, cache = self.kv.pool, self.kv.manager.cache
        holders = pool.refs(block) - self._copied[block]
        if pool.state(block) is not BlockState.ACTIVE or holders != 1 or cache.holds(block):
            raise Violation(
                f"{self.kv.process}: {who} writes block {block}, which is {pool.state(block)}, held by "
                f"{pool.refs(block)}{', indexed' if cache.holds(block) else ''}"
            )


def device(process: Process, blocks: int, block_size: int, context_tokens: int) -> SimpleNamespace:
    """What `engine.device.open_device` returns, over shadow memory."""
    kv = ShadowKV(process, blocks, block_size)

    def manager(tiers: Tiers | None = None) -> KVCacheManager:
        kv.manager = KVCacheManager(blocks, block_size, FINGERPRINT, tiers)
        return kv.manager

    return SimpleNamespace(
        model="shadow",
        layout=kv.layout,
        blocks=blocks,
        kv=kv,
        runner=kv.runner,
        fingerprint=FINGERPRINT,
        arithmetic="",
        vocab=VOCAB,
        context_tokens=context_tokens,
        stop_ids=STOP_IDS,
        manager=manager,
        memory=MemoryUse(),
        compilations=Compilations(),
    )



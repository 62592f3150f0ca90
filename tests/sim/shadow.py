"""Shadow memory: instead of keys and values, every row knows which token after which past it stands for.

A row is a 61-bit number chained over namespace, adapter and all tokens up to its position, as a real KV row depends on
its whole prefix, and another in each layer group. A reader recomputes the chain, so a wrong, stale, foreign or blank
row is noticed as it is read, and the next token is a function of the last row and of what windows show. Of a group with
a window the rows in it are read, and no others; masked, they are read of the one group that keeps all. Blocks that are
handed out anew are wiped.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from engine.drafts import Drafter
from engine.kv.block_pool import BlockPool, BlockState
from engine.kv.groups import GONE, LayerGroup
from engine.kv.layout import KVLayout
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.tiers import Tiers
from engine.messages import Handoff, MemoryUse
from engine.step import (
    Candidates,
    DeadEnd,
    Drawn,
    DrawnRun,
    LatestDraws,
    Row,
    StepPlan,
    draws_of,
    forced_token,
    result_of,
    run_of,
)
from engine.types import BlockId, DrawnToken, RequestRecord, TokenLogprobs, id_of
from kernels.compilations import Compilations
from tests.sim import grammar
from tests.sim.clock import Process, Violation
from tests.sim.rank_memory import HeadRows
from transfer import digest

VOCAB = 61
STOP_IDS = frozenset({60})
FINGERPRINT = "shadow"
ADAPTERS = ("5ad0", "5ad1")
_MASK = (1 << 61) - 1
_PASTS = [(token, (token + 1) * 0x9E3779B97F4A7C1) for token in range(VOCAB)]


def mix(past: int, token: int) -> int:
    return ((past ^ token + 1) * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1) & _MASK


def in_group(row: int, group: int) -> int:
    """Return what a layer group has in the place of the first group's row."""
    return row ^ group * 0x1B3D5F79A7C9E13 & _MASK


def root(record: RequestRecord) -> int:
    past = mix(int.from_bytes(record.namespace[:7], "little"), 977)
    return mix(past, int(record.adapter, 16)) if record.adapter else past


def rows_of(record: RequestRecord, tokens: Sequence[int]) -> list[int]:
    """Return the rows of these tokens of a request."""
    past, rows = root(record), []
    for token in tokens:
        past = mix(past, token)
        rows.append(past)
    return rows


def shown(rows: Sequence[int], windows: Sequence[int]) -> int:
    """Return what the last of a sequence's rows draws by: itself, and all that each window shows."""
    if not windows:
        return rows[-1]
    seen = [in_group(row, group) for group, window in enumerate(windows, 1) for row in rows[-window:]]
    return (rows[-1] + sum(seen)) & _MASK


def draw(row: int, key: tuple[int, int, int], banned: tuple[int, ...], choices: tuple[int, ...] = ()) -> int:
    """Return what a seeded sampler draws: as much a function of its key (seed, sample index and position) as of the
    last row. With `choices`: of these, unbanned ones if there are any."""
    seed, sample_index, position = key
    number = (row >> 23) ^ (seed * 0xC2B2AE3D + sample_index * 0x9E3779B1 + position * 0x85EBCA77)
    if choices:
        choices = tuple([token for token in choices if token not in banned]) or choices
        return choices[number % len(choices)]
    token = number % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


@lru_cache(4096)
def _likeliest(row: int) -> list[int]:
    """Return all tokens, the likeliest first: each as its cost, then 63 less the token in the last six bits."""
    return sorted([((row ^ past) * 0x2545F4914F6CDD1D & _MASK) >> 40 << 6 | 63 - token for token, past in _PASTS])


def candidates(row: int, count: int, banned: tuple[int, ...]) -> Candidates:
    """Return the likeliest tokens, with log probabilities of their own for every row."""
    likely = [one for one in _likeliest(row)[: count + len(banned)] if 63 - (one & 63) not in banned]
    return tuple([(63 - (one & 63), -(one >> 6) / (1 << 18)) for one in likely[:count]])


def log_probs(row: int, token: int, count: int) -> TokenLogprobs:
    """Return the log probabilities of a token and of the likeliest ones: they depend on the row alone."""
    cost = ((row ^ _PASTS[token][1]) * 0x2545F4914F6CDD1D & _MASK) >> 40
    return TokenLogprobs(token, -cost / (1 << 18), candidates(row, count, ()) if count else ())


def block_digest(
    rows: list[int], layout: KVLayout, tokens: int, identity: bytes, generation: int, name: Handoff
) -> int:
    """Digest as a worker does, by `transfer.digest`: over all heads of the valid rows, bound to what the block is and
    to the attempt."""
    bound = digest.Binding(name).of(identity, generation)
    return digest.block_digest(memoryview(_flat(rows)), layout, tokens, bound)


def _flat(rows: list[int]) -> bytes:
    """Return a block as its layout has it: a quarter of each row is the key or the value of one of the two heads."""
    quarters = array("H", array("Q", rows).tobytes())
    return b"".join([quarters[at::4].tobytes() for at in range(4)])


class ShadowKV:
    """What `engine.storage.paged.PagedKV` is to a worker. Mutable state: rows and generations by block."""

    device = "cpu"
    rank = 0
    quarters = range(4)
    """The quarters of a row that this memory has: two for each head."""

    def __init__(
        self, process: Process, blocks: int, block_size: int, windows: Sequence[int] = (), masked: bool = False
    ) -> None:
        """`windows`: of the layer groups but the first, where there are several. `masked`: they are masks, and there is
        one group."""
        self.process = process
        self.windows = windows
        windows = () if masked else windows
        self.blocks = blocks
        self.block_size = block_size
        groups = tuple(LayerGroup((at,), window) for at, window in enumerate((0, *windows))) if windows else ()
        self.layout = KVLayout(
            kv_heads=2, layers=1, block_size=block_size, head_dim=1, dtype="bfloat16", groups=groups
        )
        self.block_bytes = self.layout.block_bytes
        self.rows = [[0] * block_size for _ in range(blocks)]
        self.generations = [0] * blocks
        self.manager: KVCacheManager = None  # type: ignore[assignment]
        self.pool: BlockPool = None  # type: ignore[assignment]
        self.runner = ShadowRunner(self)

    def advance(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            self.generations[block] += 1
            self.rows[block] = [0] * self.block_size

    def part(self, heads: range, rank: int) -> "ShadowKV":
        """Return the memory of a rank, as one that it shares these heads with sees it."""
        return self if heads == self.layout.heads else PartOfShadow(self, heads, rank)

    def check(self) -> None:
        if self.generations != self.pool.generations:
            raise Violation(f"{self.process}: a generation in memory lags behind the pool's")

    def close(self) -> None:
        pass


class PartOfShadow(ShadowKV):
    """Some heads of a memory, those of one of several ranks: all else is its worker's."""

    def __init__(self, whole: ShadowKV, heads: range, rank: int) -> None:
        self.rank = rank
        self.quarters = range(2 * heads.start, 2 * heads.stop)
        mask = sum(0xFFFF << 16 * quarter for quarter in self.quarters)
        self.rows = HeadRows(whole, mask)  # type: ignore[assignment]
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class LateStep:
    """A step that computes nothing before it is waited for: what is done to its blocks meanwhile, it finds."""

    def __init__(self, runner: "ShadowRunner", plan: StepPlan, latest: LatestDraws) -> None:
        self._runner = runner
        self._plan = plan
        self._latest: LatestDraws | None = latest
        self._drawn: list[Drawn] = []

    def wait(self) -> list[Drawn]:
        if self._latest is not None:
            latest, self._latest = self._latest, None
            self._drawn = self._runner.compute(self._plan, latest)
        return self._drawn

    def scores(self) -> list[list[TokenLogprobs]]:
        return [self._runner.scores(row) for row in self._plan.rows if row.scored]

    def idle_s(self, before: object) -> float:
        return 0.0


class ShadowRunner:
    """Fulfils `engine.runner.Runner`; verifies every row it reads and every block it writes."""

    def __init__(self, kv: ShadowKV) -> None:
        self.kv = kv
        self.plans_ahead = False
        self.jumps = True
        self.drafted = self.drawn_drafts = 0
        self.copies = 0
        self.computed_tokens = 0
        self.slid = 0
        """Tables of groups that have let blocks go, by the step that reads them."""
        self._latest = LatestDraws()
        # Of the step that is computed: copies, and how many are of each source.
        self._pairs: tuple[tuple[BlockId, BlockId], ...] = ()
        self._copied: Counter[BlockId] = Counter()

    def launch(self, plan: StepPlan) -> "LateStep":
        """Take the step, to be computed when it is waited for, as late as a device may."""
        if self.plans_ahead:
            rows = [
                replace(row, tokens=row.tokens[:], blocks=row.blocks[:], windows=tuple([one[:] for one in row.windows]))
                for row in plan.rows
            ]
            plan = StepPlan(tuple(rows), plan.copies, plan.number)
        launched = LateStep(self, plan, self._latest)
        self._latest = LatestDraws(plan.rows, launched)
        return launched

    def compute(self, plan: StepPlan, latest: LatestDraws) -> list[Drawn]:
        if any([row.follows for row in plan.rows]):
            plan = StepPlan(tuple([latest.resolved(row) for row in plan.rows]), plan.copies, plan.number)
        rows, pool = self.kv.rows, self.kv.pool
        if self._pairs:
            self._pairs = ()
            self._copied.clear()
        for source, target in plan.copies:
            if not pool.refs(source):
                raise Violation(f"{self.kv.process}: block {source} is copied but nobody holds it")
            self._writable(target, "copy-on-write")
            rows[target] = list(rows[source])
            self.copies += 1
        self.computed_tokens += plan.computed_tokens
        # Whoever holds a block only for its copy does not hold it any more.
        if plan.copies:
            self._pairs, self._copied = plan.copies, Counter(source for source, _ in plan.copies)
        return [drawn for row in plan.rows for drawn in self._row(row)]

    def _row(self, row: Row) -> list[Drawn]:
        kv, size, blocks = self.kv, self.kv.block_size, row.blocks
        rows, tokens, start = kv.rows, row.tokens, row.start
        for index in range(start // size, (row.end - 1) // size + 1):
            self._writable(blocks[index], row.request)
        past, end, at = root(row.record), row.end, 0
        pasts: list[int] = []
        for number in blocks:
            block = rows[number]
            for inside in range(min(size, end - at)):
                past = ((past ^ tokens[at] + 1) * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1) & _MASK  # `mix`
                if at >= start:
                    block[inside] = past
                elif block[inside] != past:
                    raise Violation(
                        f"{kv.process}: {row.request} reads a {'wrong' if block[inside] else 'blank'} row"
                        f" at position {at}, block {number}"
                    )
                at += 1
                if at >= end - row.drafts:
                    pasts.append(past)
            if at == end:
                break
        for number, table in enumerate(row.windows, 1):
            self._window(row, number, table)
        if not row.draw:
            return []
        if kv.windows:
            pasts = [self._shown(row, row.end - row.drafts + at) for at in range(len(pasts))]
            past = pasts[-1]
        if row.candidates:
            return [candidates(past, row.candidates, row.banned)]
        said: list[Drawn] = []
        for one, past in zip(draws_of(row), pasts, strict=True):
            drawn = self._draw(past, one)
            if isinstance(drawn, DeadEnd):
                break
            token = id_of(run_of(drawn)[0])
            is_over = row.record.constraint is not None and token == grammar.END
            if len(said) == row.drafts or token != tokens[len(one.tokens)] or is_over:
                break
            said.append(run_of(drawn)[0])
        self.drafted += row.drafts
        self.drawn_drafts += len(said)
        return [result_of(said, drawn)]

    def _window(self, row: Row, number: int, table: Sequence[BlockId]) -> None:
        """Read what a group's layers see of a row's tokens, and write what is computed of them."""
        kv, size, past = self.kv, self.kv.block_size, root(row.record)
        self.slid += GONE in table
        first = max(0, row.start - kv.layout.groups[number].window + 1)
        for index in range(row.start // size, (row.end - 1) // size + 1):
            if table[index] == GONE:
                raise Violation(f"{kv.process}: {row.request} has no block {index} of group {number} to write to")
            self._writable(table[index], row.request)
        for at, token in enumerate(row.tokens[: row.end]):
            past = mix(past, token)
            if at < first:
                continue
            block = table[at // size]
            if block == GONE:
                raise Violation(f"{kv.process}: {row.request} sees position {at} in group {number}, which is gone")
            told, held = in_group(past, number), kv.rows[block]
            if at >= row.start:
                held[at % size] = told
            elif held[at % size] != told:
                raise Violation(
                    f"{kv.process}: {row.request} reads a {'wrong' if held[at % size] else 'blank'} row"
                    f" at position {at} of group {number}, block {block}"
                )

    def _shown(self, row: Row, end: int) -> int:
        """Return what the last of a row's first `end` tokens draws by, read back as `shown` has it."""
        kv, size = self.kv, self.kv.block_size
        tables = row.windows or [row.blocks] * len(kv.windows)
        total = kv.rows[row.blocks[(end - 1) // size]][(end - 1) % size]
        for number, (window, table) in enumerate(zip(kv.windows, tables, strict=True), 1):
            held = [kv.rows[table[at // size]][at % size] for at in range(max(0, end - window), end)]
            total += sum(held) if row.windows else sum([in_group(past, number) for past in held])
        return total & _MASK

    def _draw(self, past: int, row: Row) -> DrawnToken | DrawnRun | DeadEnd:
        if row.record.constraint is not None:
            return self._constrained(past, row)
        token, wanted = draw(past, row.draw_key, row.banned), row.record.logprobs
        return token if wanted is None else log_probs(past, token, wanted)

    def _constrained(self, past: int, row: Row) -> DrawnToken | DrawnRun | DeadEnd:
        record, output = row.record, [*row.tokens[row.record.prompt_tokens :]]
        assert record.constraint is not None
        if row.allowed:
            return int.from_bytes(row.allowed, "little").bit_length() - 1  # known, and dropped
        choices = grammar.allowed(record.constraint, output)
        if self.plans_ahead and output and (
            output[-1] == grammar.END or grammar.is_dead_end(record.constraint, output[:-1])
        ):
            return 0  # it ended in the step before, which nobody knew
        if grammar.is_dead_end(record.constraint, output):
            return DeadEnd(grammar.NOTHING_FOLLOWS)
        if not choices:
            raise Violation(f"{self.kv.process}: {row.request} goes on behind {output}: that breaks its constraint")
        token = draw(past, row.draw_key, row.banned, choices)
        told: DrawnToken = token if record.logprobs is None else log_probs(past, token, record.logprobs)
        if len(choices) == 1:
            told = forced_token(token, record)
        more = grammar.run(record, [*output, token]) if self.jumps else []
        return DrawnRun((told, *[forced_token(one, record) for one in more])) if more else told

    def scores(self, row: Row) -> list[TokenLogprobs]:
        """Return what the rows in memory say of the tokens behind them."""
        size, wanted = self.kv.block_size, row.record.prompt_logprobs or 0
        places = range(row.start, row.start + row.scored)
        held = [self.kv.rows[row.blocks[at // size]][at % size] for at in places]
        return [log_probs(past, row.tokens[at + 1], wanted) for at, past in zip(places, held, strict=True)]

    def _writable(self, block: BlockId, who: str) -> None:
        pool, cache = self.kv.pool, self.kv.manager.cache
        holders = pool.refs(block) - self._copied[block]
        allowed = {BlockState.ACTIVE}
        if self.plans_ahead:
            # Its job may have ended since it was launched; or a sample that has forked since awaits its copy, in which
            # it writes its own rows over what comes after the fork.
            allowed.add(BlockState.QUARANTINED)
            if holders > 1:
                copies = [pair for lease in self.kv.manager.leases() for pair in lease.copies]
                holders -= sum(pair[0] == block and pair not in self._pairs for pair in copies)
        if pool.state(block) not in allowed or holders != 1 or cache.holds(block):
            raise Violation(
                f"{self.kv.process}: {who} writes block {block}, which is {pool.state(block)}, held by "
                f"{pool.refs(block)}{', indexed' if cache.holds(block) else ''}"
            )


def device(
    process: Process,
    blocks: int,
    block_size: int,
    context_tokens: int,
    ahead: bool,
    drafter: Drafter | None = None,
    windows: Sequence[int] = (),
    masked: bool = False,
) -> SimpleNamespace:
    """What `engine.device.open_device` returns, over shadow memory."""
    kv = ShadowKV(process, blocks, block_size, windows, masked)
    kv.runner.plans_ahead = ahead

    def manager(tiers: Tiers | None = None, step_tokens: int = 1) -> KVCacheManager:
        ahead_tokens = (step_tokens + 1) * (2 if ahead else 1)
        kv.manager = KVCacheManager(blocks, block_size, FINGERPRINT, tiers, kv.layout.groups, ahead_tokens)
        kv.pool = kv.manager.pool
        return kv.manager

    return SimpleNamespace(
        model="shadow",
        layout=kv.layout,
        blocks=blocks,
        kv=kv,
        runner=kv.runner,
        plans_ahead=ahead,
        fingerprint=FINGERPRINT,
        arithmetic="",
        vocab=VOCAB,
        context_tokens=context_tokens,
        stop_ids=STOP_IDS,
        manager=manager,
        memory=MemoryUse(),
        compilations=Compilations(),
        matchers=grammar.SlowCompiler(process),
        adapters=frozenset(ADAPTERS),
        drafter=drafter,
        draft_kv=None,
        ranks=None,
    )



"""Chooses the pair of workers that gets a request.

`LeastCost` takes the least predicted cost, a sum of named terms in seconds, whose coefficients are fitted for each
worker (`router.core.fitting`):

    queue before it(prefill) + uncached_tokens · s_per_token(prefill)
    + missing_blocks · s_per_block(prefill → decode)
    + blocks that lower tiers give back · s_per_block(tier), as far as its turn does not take as long
    + answer_tokens · (alone_s + 2 · rows · s_per_row)(decode), and a step for a pool that is full

and one term that is not this request's own: the time that others lose, or gain, when a worker computes again what
another one holds (`router.core.reuse`). Where decode workers may read prompts themselves, each is also priced as a pair
of its own, between whose halves nothing moves, and the rows that it runs lose the time of the prompt. Simpler policies,
to compare with, are in `router.core.policies`.

Views of workers come in, a choice goes out; no clock, and randomness is a generator passed in.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter
from random import Random
from typing import Protocol

import msgspec

ASSUMED_S_PER_TOKEN = 1 / 500
ASSUMED_S_PER_BLOCK = 1e-3
"""Taken until a worker has measured its own. Between unmeasured workers only their ratio counts."""

MANY_PAIRS, SHORTLIST = 4096, 32
"""Above so many pairs only the cheapest workers of either side are paired."""
_RESOLUTION_DIGITS = 6  # costs that differ by less than a microsecond are ties


class Demand(msgspec.Struct, frozen=True):
    """The memory that a request asks for. `blocks` covers its tokens and the room that a worker promises for more,
    `most_blocks` all that its answer may need."""

    prompt_tokens: int
    prompt_blocks: int
    blocks: int
    most_blocks: int
    answer_tokens: float = 0.0
    """How long its answer is taken to be."""


class PrefillView(msgspec.Struct, frozen=True, gc=False):
    """A worker that could read a prompt, as one request sees it. `queue_tokens` are uncached and not computed yet."""

    name: str
    cached_tokens: int
    queue_tokens: int
    s_per_token: float
    outstanding: int
    delaying_tokens: float = 0.0
    """Tokens whose time others lose if it computes again what another one holds, less what they gain
    (`router.core.reuse`)."""
    delay: float = 1.0
    """How many times longer prompts have taken here than its own speed says (`router.core.fitting`)."""
    host: int = 0
    """A number for its host."""
    passed_tokens: int = 0
    """Those of its queue that this prompt goes before (`router.core.overtaking`)."""
    load_s: float = 0.0
    """The time of those of its cached blocks that lower tiers give back."""

    @property
    def awaited_tokens(self) -> int:
        """What of its queue this prompt waits for."""
        return self.queue_tokens - self.passed_tokens


class DecodeView(msgspec.Struct, frozen=True):
    """A decode worker as one request sees it. `used_blocks` are those that no eviction frees, `s_per_step` is the time
    of its steps now, with `rows` requests in each; more of the `outstanding` ones are still being prefilled."""

    name: str
    cached_blocks: int
    used_blocks: int
    blocks: int
    s_per_step: float
    s_per_block: dict[str, float]
    outstanding: int
    least_s_per_block: float = 0.0
    """No way to it is quicker, in seconds a block."""
    local: PrefillView | None = None
    """The same worker as one that reads prompts itself, where it may: of the same name."""
    rows: int = 0
    alone_s: float = 0.0
    s_per_row: float = 0.0
    """What a step takes without rows, and what each row adds (`router.core.fitting`)."""
    host: int = 0
    unmeasured_s_per_block: tuple[float, float] = (0.0, 0.0)
    """The time of a block over ways that are not in `s_per_block`: from the same host, and from another one."""
    exposure: tuple[float, float] = (1.0, 1.0)
    """The share of the time of a move that is waited for, of the same two."""
    load_s: float = 0.0
    """The time of those of its cached blocks that lower tiers give back: before the prompt is asked for."""
    loaded_blocks: int = 0
    """How many they are: they take room as new ones do."""

    @property
    def device_blocks(self) -> int:
        """Cached blocks that take no room."""
        return self.cached_blocks - self.loaded_blocks


class Cost(msgspec.Struct, frozen=True):
    """What a pair is predicted to cost by term, in seconds: the first three and `load_s` until the first token."""

    queue_s: float
    compute_s: float
    move_s: float
    pressure_s: float
    others_s: float = 0.0
    """Not this request's own: by how much it delays others, behind it or beside it, beyond what it must; below zero
    where they gain more by finding its prefix in one more place."""
    load_s: float = 0.0
    """What is waited for of blocks that lower tiers give back."""

    @property
    def total_s(self) -> float:
        return self.queue_s + self.compute_s + self.move_s + self.pressure_s + self.others_s + self.load_s


class Choice(msgspec.Struct, frozen=True):
    """`reason` is "affinity" if either worker was believed to hold some of the prompt."""

    prefill: PrefillView
    decode: DecodeView
    cost: Cost
    reason: str


class RoutingPolicy(Protocol):
    def choose(
        self, demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Choice | None:
        """The pair for a request among workers that may take it, or twice the same name: a decode worker with itself as
        the one that reads the prompt. None where there is neither."""


def cost(demand: Demand, prefill: PrefillView, decode: DecodeView) -> Cost:
    """The predicted time to first token on one pair, and what the rest of the answer costs there."""
    is_local = prefill.name == decode.name
    return Cost(
        *prefill_terms(demand, prefill),
        missing_blocks(demand, decode) * _s_per_block(prefill, decode),
        pressure_s(demand, decode),
        _others_s(demand, prefill, decode if is_local else None),
        loading_s(prefill) + (0.0 if is_local else decode.load_s),
    )


def missing_blocks(demand: Demand, decode: DecodeView) -> int:
    """Return how many blocks of the prompt a decode worker does not have."""
    return max(demand.prompt_blocks - decode.cached_blocks, 0)


def _s_per_block(prefill: PrefillView, decode: DecodeView) -> float:
    """Return the time of a block that is waited for."""
    if prefill.name == decode.name:
        return 0.0
    far = prefill.host != decode.host
    measured_s = decode.s_per_block.get(prefill.name) or decode.unmeasured_s_per_block[far]
    return (measured_s or ASSUMED_S_PER_BLOCK) * decode.exposure[far]


def _least_s_per_block(decode: DecodeView) -> float:
    """Return a time that no way of `_s_per_block` is below."""
    # Without `min`, which takes as long as all the rest: every decision asks every decode worker.
    near_s, far_s = decode.unmeasured_s_per_block
    near_s, far_s = near_s or ASSUMED_S_PER_BLOCK, far_s or ASSUMED_S_PER_BLOCK
    way_s = decode.least_s_per_block or near_s
    way_s = near_s if near_s < way_s else way_s
    way_s = far_s if far_s < way_s else way_s
    near, far = decode.exposure
    return way_s * (far if far < near else near)


def token_s(prefill: PrefillView) -> float:
    """Return what a prompt token takes on a worker, in seconds: as it has measured, times what it has been late by."""
    return (prefill.s_per_token or ASSUMED_S_PER_TOKEN) * prefill.delay


def loading_s(prefill: PrefillView) -> float:
    """Return what a prompt waits for blocks from lower tiers when its turn has come: they are loaded meanwhile."""
    if not prefill.load_s:
        return 0.0
    return max(prefill.load_s - prefill.awaited_tokens * token_s(prefill), 0.0)


def _others_s(demand: Demand, prefill: PrefillView, decode: DecodeView | None = None) -> float:
    """Return what others lose: `decode` is given where it reads the prompt itself, beside the rows that it runs."""
    lost_s = prefill.delaying_tokens * token_s(prefill)
    if decode is not None:
        lost_s += decode.rows * prefill_terms(demand, prefill)[1]
    return lost_s


def prefill_terms(demand: Demand, prefill: PrefillView) -> tuple[float, float]:
    each_s = token_s(prefill)
    uncached_tokens = max(demand.prompt_tokens - prefill.cached_tokens, 1)
    return prefill.awaited_tokens * each_s, uncached_tokens * each_s


def pressure_s(demand: Demand, decode: DecodeView) -> float:
    """Return what the answer takes there, and what the others in its steps lose by one more row; and a step for a pool
    that is full. Who is still being prefilled will be a row by then: left out, all that waits in long lines would be
    sent to the worker with the fewest rows of now."""
    busy = decode.used_blocks / decode.blocks if decode.blocks else 1.0
    rows, outstanding = decode.rows, decode.outstanding
    if outstanding > rows:
        rows = outstanding
    return decode.s_per_step * busy + demand.answer_tokens * (decode.alone_s + 2.0 * decode.s_per_row * rows)


def reason(prefill: PrefillView, decode: DecodeView) -> str:
    """Return what `Choice.reason` says of a pair."""
    return "affinity" if prefill.cached_tokens or decode.cached_blocks else "load"


class LeastCost:
    """The pair with the least predicted cost; ties go to the least outstanding work, then by lot.

    Most of a cost belongs to one side alone; only the move is priced by the pair. So both sides are gone through from
    the cheapest on, and what cannot be as cheap as the best so far is left out. Above MANY_PAIRS only a SHORTLIST of
    either side is gone through, so that a decision takes a time in proportion to the workers, not to their pairs.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.memory: tuple[str, ...] = ()

    def choose(
        self, demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Choice | None:
        found = _Cheapest(len(decodes))
        for at, decode in enumerate(decodes):
            if decode.local is not None:
                reader_s = sum(prefill_terms(demand, decode.local)) + _others_s(demand, decode.local, decode)
                reader_s += loading_s(decode.local)
                found.add(reader_s + pressure_s(demand, decode), 2 * decode.outstanding, at)
        readers = _readers_s(demand, prefills)
        sides = [(_least_s(demand, view), at) for at, view in enumerate(decodes)]
        readers.sort(key=_FIRST)
        sides.sort(key=_FIRST)
        if len(readers) * len(sides) > MANY_PAIRS:
            _shorten(self._random, readers)
            _shorten(self._random, sides)
        for least_s, at in sides:
            if not readers or found.is_below(readers[0][0] + least_s):
                break
            decode = decodes[at]
            waits_s, missing = pressure_s(demand, decode) + decode.load_s, missing_blocks(demand, decode)
            found.add_row(prefills, readers, decode, (missing, waits_s, least_s), at)
        if not found.ties:
            return None
        ties = sorted(found.ties)
        reader, at = divmod(ties[0] if len(ties) == 1 else self._random.choice(ties), len(decodes))
        decode = decodes[at]
        chosen = prefills[reader - 1] if reader else decode.local
        assert chosen is not None
        return Choice(chosen, decode, cost(demand, chosen, decode), reason(chosen, decode))


class _Cheapest:
    """The cheapest pairs so far: `ties`, the place of the reader, counted from 1, times the number of decode workers,
    plus the decode worker's place; a decode worker that reads itself has reader 0."""

    def __init__(self, places: int) -> None:
        self.ties: list[int] = []
        self._places = places
        self._total_s, self._work = float("inf"), 0
        self._as_given_s = float("inf")

    def is_below(self, total_s: float) -> bool:
        """Return True if no pair that costs `total_s` or more is among the cheapest."""
        return total_s > self._as_given_s and round(total_s, _RESOLUTION_DIGITS) > self._total_s

    def add(self, total_s: float, work: int, pair: int) -> None:
        # Idle workers cost the same to the last bit: then nothing is rounded twice.
        if total_s != self._as_given_s:
            rounded_s = round(total_s, _RESOLUTION_DIGITS)
            if rounded_s > self._total_s:
                return
            if rounded_s < self._total_s:
                self.ties, self._total_s, self._work = [], rounded_s, work
            self._as_given_s = total_s
        if work < self._work:
            self.ties, self._work = [], work
        if work == self._work:
            self.ties.append(pair)

    def add_row(
        self,
        prefills: Sequence[PrefillView],
        readers: Sequence[tuple[float, int]],
        decode: DecodeView,
        costs: tuple[int, float, float],
        at: int,
    ) -> None:
        """Add the pairs of a decode worker with `readers`, the cheapest first: their costs and their places."""
        missing, waits_s, least_s = costs
        name, ways, others, places = decode.name, decode.s_per_block, decode.outstanding, self._places
        pairs = zip(decode.unmeasured_s_per_block, decode.exposure, strict=True)
        near_s, far_s = ((way_s or ASSUMED_S_PER_BLOCK) * exposure for way_s, exposure in pairs)
        for reader_s, reader in readers:
            if reader_s + least_s > self._as_given_s and self.is_below(reader_s + least_s):
                break
            prefill = prefills[reader]
            if ways or prefill.name == name:
                way_s = _s_per_block(prefill, decode)
            else:
                way_s = near_s if prefill.host == decode.host else far_s
            total_s, work = reader_s + missing * way_s + waits_s, prefill.outstanding + others
            if total_s == self._as_given_s and work == self._work:
                self.ties.append((reader + 1) * places + at)  # as most do where there is no work
            else:
                self.add(total_s, work, (reader + 1) * places + at)


_FIRST = itemgetter(0)


def _shorten(random: Random, items: list[tuple[float, int]]) -> None:
    """Keep a SHORTLIST of what is in order: who is left out of those that tie with its last one, is drawn by lot."""
    if len(items) <= SHORTLIST:
        return
    last = items[SHORTLIST - 1][0]
    if items[SHORTLIST][0] == last:
        first = bisect_left(items, last, key=_FIRST)
        items[first:] = random.sample(items[first : bisect_right(items, last, key=_FIRST)], SHORTLIST - first)
    del items[SHORTLIST:]


def _readers_s(demand: Demand, prefills: Sequence[PrefillView]) -> list[tuple[float, int]]:
    """Return what a pair with each prefill worker costs for its part, and its place: the sum of `prefill_terms`,
    `_others_s` and `loading_s`, to the last bit, at a quarter of the time."""
    prompt_tokens, found = demand.prompt_tokens, []
    for at, view in enumerate(prefills):
        each_s = (view.s_per_token or ASSUMED_S_PER_TOKEN) * view.delay
        uncached_tokens = prompt_tokens - view.cached_tokens
        awaited_s = (view.queue_tokens - view.passed_tokens) * each_s
        own_s = awaited_s + (uncached_tokens if uncached_tokens > 1 else 1) * each_s
        reader_s = own_s + view.delaying_tokens * each_s
        found.append((reader_s + loading_s(view) if view.load_s else reader_s, at))
    return found


def _least_s(demand: Demand, decode: DecodeView) -> float:
    """Return the least that a pair with this decode worker costs, beside its prefill worker's part."""
    missing = demand.prompt_blocks - decode.cached_blocks
    waits_s = pressure_s(demand, decode) + decode.load_s
    return (missing if missing > 0 else 0) * _least_s_per_block(decode) + waits_s

"""Workloads of the routing benchmark: sessions of prompts that share prefixes, from a trace or drawn with a seed.

A session begins at a time of its own, and each of its further turns comes a think time after the answer to the one
before (closed within a session, open across sessions); a trace's rows are sessions of one turn. Prompts are made of
blocks, as `cluster.bench.traces` says; one token here stands for TOKEN_SCALE of the trace, so that a block of the trace
is one block of the workers' caches.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

from cluster.bench.traces import BLOCK_TOKENS, TraceRow

BLOCK = 16
TOKEN_SCALE = BLOCK_TOKENS // BLOCK


BlockKey = int | tuple[bytes, int]
"""What a cache knows a block by: its id, and whose it is where there are tenants."""


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """One prompt: the ids of its blocks, of which the last may be partly filled, and its length in tokens of here.
    `output_tokens` are those of the trace: as many steps are decoded. `think_s` passes before it."""

    blocks: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    think_s: float = 0.0
    tenant: bytes = b""
    """Whose prompt it is: nobody else finds its blocks, though they have the same ids."""

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """What a cache knows its blocks by."""
        return tuple((self.tenant, block) for block in self.blocks) if self.tenant else self.blocks

    def tokens(self) -> list[int]:
        """Return the prompt: equal blocks are equal tokens, others differ in all."""
        ids = [(block * BLOCK + n) & 0xFFFFFFFF for block in self.blocks for n in range(BLOCK)]
        return ids[: self.prompt_tokens]


@dataclass(frozen=True, slots=True)
class Visit:
    begins_s: float
    turns: tuple[PromptTurn, ...]


Workload = list[Visit]


def of_trace(rows: Iterable[TraceRow]) -> Workload:
    """Return the rows as open arrivals."""
    return [
        Visit(row.timestamp / 1000, (_turn(row.hash_ids, row.input_length, row.output_length),))
        for row in rows
        if row.input_length > 0
    ]


def in_order(workload: Workload) -> Iterator[PromptTurn]:
    """Go over all turns in the order in which they come if answers take no time."""
    timed = []
    for session in workload:
        at_s = session.begins_s
        for turn in session.turns:
            at_s += turn.think_s
            timed.append((at_s, turn))
    timed.sort(key=lambda entry: entry[0])
    return (turn for _, turn in timed)


def stretched(workload: Workload, span_s: float) -> Workload:
    """Return the sessions with their beginnings spread over `span_s` seconds."""
    first = min(session.begins_s for session in workload)
    factor = span_s / (max(session.begins_s for session in workload) - first or 1.0)
    return [replace(session, begins_s=(session.begins_s - first) * factor) for session in workload]


class _Maker:
    """Draws blocks that nobody has drawn before."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._next = 0

    def fresh(self, count: int) -> tuple[int, ...]:
        self._next += count
        return tuple(range(self._next - count, self._next))

    def length(self, median: float, sigma: float = 0.7) -> int:
        return max(1, round(self.random.lognormvariate(0.0, sigma) * median))

    def popular(self, count: int, exponent: float = 1.0) -> int:
        return self.random.choices(range(count), [(n + 1.0) ** -exponent for n in range(count)])[0]

    def session(self, begins_s: float, prefix: tuple[int, ...], turns: int, more: float, think_s: float) -> Visit:
        """Return a conversation: every turn goes on behind the one before, after its answer and new text."""
        made: list[PromptTurn] = []
        blocks = prefix
        for number in range(turns):
            blocks += self.fresh(self.length(more))
            output = self.length(150.0)
            pause_s = self.random.lognormvariate(0.0, 0.8) * think_s if number else 0.0
            tokens = len(blocks) * BLOCK_TOKENS - self.random.randrange(BLOCK_TOKENS)
            made.append(_turn(blocks, tokens, output, pause_s))
        return Visit(begins_s, tuple(made))


def chat(requests: int, seed: int) -> Workload:
    """Conversations over a dozen system prompts of different popularity, with pauses for thought."""
    make = _Maker(seed)
    systems = [make.fresh(make.length(6)) for _ in range(12)]
    return _sessions(
        make,
        requests,
        lambda at: make.session(at, systems[make.popular(12)], 1 + make.popular(8, 0.8), 3.0, 5.0),
    )


def agents(requests: int, seed: int) -> Workload:
    """Loops over tools: many short turns behind a long common beginning, hardly a pause between them."""
    make = _Maker(seed)
    tools = [make.fresh(12) for _ in range(4)]
    return _sessions(
        make, requests, lambda at: make.session(at, tools[make.popular(4)], make.length(12.0, 0.5), 1.0, 1.0)
    )


def hot(requests: int, seed: int) -> Workload:
    """A few long prefixes that nearly everybody shares, each request with a tail of its own."""
    make = _Maker(seed)
    prefixes = [make.fresh(24) for _ in range(3)]
    return _sessions(make, requests, lambda at: make.session(at, prefixes[make.popular(3)], 1, 4.0, 0.0))


def bursts(requests: int, seed: int) -> Workload:
    """Groups of requests that arrive at once behind a long prefix that nobody has seen."""
    make = _Maker(seed)
    made: Workload = []
    at_s = 0.0
    while sum(len(session.turns) for session in made) < requests:
        at_s += make.random.expovariate(1.0)
        prefix = make.fresh(make.length(30.0))
        for _ in range(make.length(8.0)):
            made.append(make.session(at_s + make.random.random() * 0.2, prefix, 1, 1.0, 0.0))
    return made


def drift(requests: int, seed: int) -> Workload:
    """Many documents asked about again and again, of which others are popular as time goes on."""
    make = _Maker(seed)
    documents = [make.fresh(make.length(20.0)) for _ in range(200)]

    def ask(at_s: float) -> Visit:
        place = (make.popular(200, 1.1) + int(at_s / 200.0)) % 200
        return make.session(at_s, documents[place], 1, 1.0, 0.0)

    return _sessions(make, requests, ask)


def cold(requests: int, seed: int) -> Workload:
    """Prompts that share nothing: only the queues count."""
    make = _Maker(seed)
    return _sessions(make, requests, lambda at: make.session(at, (), 1, 12.0, 0.0))


def tenants(requests: int, seed: int) -> Workload:
    """Twelve tenants of different size who all use the same four system prompts, and may not share a block."""
    make = _Maker(seed)
    systems = [make.fresh(make.length(16.0)) for _ in range(4)]

    def talk(at_s: float) -> Visit:
        tenant = b"tenant-%d" % make.popular(12)
        visit = make.session(at_s, systems[make.popular(4)], 1 + make.popular(5), 2.0, 4.0)
        return Visit(at_s, tuple(replace(turn, tenant=tenant) for turn in visit.turns))

    return _sessions(make, requests, talk)


def groups(requests: int, seed: int) -> Workload:
    """64 system prompts of 2,048 tokens, with as many questions of 128 tokens for each, in any order, and answers of
    256: the workload with which a cache-aware router was published (SGLang v0.4's `generated-shared-prefix`)."""
    make = _Maker(seed)
    prefixes = [make.fresh(2048 // BLOCK_TOKENS) for _ in range(64)]
    asked = [prefixes[number % 64] for number in range(requests)]
    make.random.shuffle(asked)
    made: Workload = []
    at_s = 0.0
    for prefix in asked:
        at_s += make.random.expovariate(1.0)
        made.append(Visit(at_s, (_turn(prefix + make.fresh(1), 2048 + 128, 256),)))
    return made


GENERATED: dict[str, Callable[[int, int], Workload]] = {
    "chat": chat,
    "agents": agents,
    "hot": hot,
    "bursts": bursts,
    "drift": drift,
    "cold": cold,
    "tenants": tenants,
}
PUBLISHED: dict[str, Callable[[int, int], Workload]] = {"groups": groups}
"""What others have published figures for: no part of what is run by default, or of the goals."""


def _sessions(make: _Maker, requests: int, begin: Callable[[float], Visit]) -> Workload:
    made: Workload = []
    at_s, count = 0.0, 0
    while count < requests:
        at_s += make.random.expovariate(1.0)
        made.append(begin(at_s))
        count += len(made[-1].turns)
    return made


def _turn(blocks: Iterable[int], input_tokens: int, output_tokens: int, think_s: float = 0.0) -> PromptTurn:
    return PromptTurn(tuple(blocks), max(1, -(-input_tokens // TOKEN_SCALE)), max(1, output_tokens), think_s)

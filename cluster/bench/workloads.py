"""What a load run sends, and when: drawn from a seed, so that two runs, or two servers, get the same requests. Pure.

Prompts are token ids, so that their length is exact for every tokenizer. The presets A to D are the shapes that
docs/benchmarks.md reports.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, chain
from random import Random

import msgspec

BURSTINESS = (0.05, 1e6)
"""The smallest and the largest gamma shape: below, a gap may be too small for a float."""


class Kind(StrEnum):
    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    STREAM = "stream"
    CHAT = "chat"
    TRACE = "trace"
    """The requests of a trace (`cluster/bench/traces.py`), whose mean lengths the workload has."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`input_tokens` are new to every request; with a shared prefix, `prefix_tokens` common to its group precede them.

    A chat has `turns`, of `input_tokens` and `output_tokens` each, and pauses with a mean of `think_s` seconds between
    an answer and the next question; it may have a prefix.

    Ids are drawn from [`token_low`, `token_high`). The defaults avoid the special tokens at the start of most
    vocabularies and fit any of 32,000 ids or more.
    """

    kind: Kind
    input_tokens: int
    output_tokens: int
    prefix_tokens: int = 0
    groups: int = 1
    turns: int = 1
    think_s: float = 0.0
    token_low: int = 100
    token_high: int = 32_000

    def check(self) -> None:
        """Check every field. Raises `ValueError` naming what is out of range."""
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise ValueError("input and output tokens must be at least 1")
        if self.kind is Kind.SHARED_PREFIX and (self.groups < 1 or self.prefix_tokens < 1):
            raise ValueError("a shared prefix needs at least 1 group and 1 prefix token")
        if self.kind is Kind.CHAT and (self.turns < 1 or self.groups < 1 or self.prefix_tokens < 0):
            raise ValueError("a chat needs at least 1 turn and 1 group, and a prefix of at least 0 tokens")
        if not 0 <= self.think_s < math.inf:
            raise ValueError("the time to think must be at least 0 seconds, and finite")
        if self.kind is not Kind.CHAT and (self.turns != 1 or self.think_s):
            raise ValueError("only the chat workload has turns, and needs pauses to think")
        if not 0 <= self.token_low < self.token_high <= 1 << 32:
            raise ValueError("the token range must be LOW:HIGH with 0 <= LOW < HIGH, and 32 bits")


@dataclass(frozen=True, slots=True)
class LoadTurn:
    """One request of a session: what its prompt adds to all that went before, in `pieces` of token ids, how many tokens
    are to be answered, and the pause in seconds since the answer before."""

    pieces: tuple[Sequence[int], ...]
    output_tokens: int
    think_s: float = 0.0

    def tokens(self) -> list[int]:
        return list(chain.from_iterable(self.pieces))


@dataclass(frozen=True, slots=True)
class LoadSession:
    """A request, or a chat of several, that begins `begins_s` seconds into an open loop; a closed one begins it when a
    client is free."""

    begins_s: float
    turns: tuple[LoadTurn, ...]


class Preset(msgspec.Struct, frozen=True):
    workload: Workload
    requests: int
    concurrency: tuple[int, ...]


PRESETS = {
    "A": Preset(Workload(kind=Kind.RANDOM, input_tokens=256, output_tokens=64), 32, (8,)),
    "B": Preset(
        Workload(
            kind=Kind.SHARED_PREFIX,
            input_tokens=64,
            output_tokens=32,
            prefix_tokens=1024,
            groups=4,
        ),
        32,
        (8,),
    ),
    "C": Preset(Workload(kind=Kind.STREAM, input_tokens=32, output_tokens=128), 4, (1,)),
    "D": Preset(Workload(kind=Kind.STREAM, input_tokens=512, output_tokens=1), 8, (1,)),
}


def prompts(workload: Workload, count: int, seed: str) -> list[list[int]]:
    """Return `count` prompts. Groups take turns, so that every group is met early and none runs alone.

    Different seeds share no prefix, so a run does not meet what another one left in the cache.
    """
    draw = Random(seed)
    shared = workload.kind is Kind.SHARED_PREFIX or (workload.kind is Kind.CHAT and workload.prefix_tokens > 0)
    prefixes = (
        [_ids(draw, workload, workload.prefix_tokens) for _ in range(workload.groups)]
        if shared
        else [[]]
    )
    return [
        prefixes[i % len(prefixes)] + _ids(draw, workload, workload.input_tokens)
        for i in range(count)
    ]


def sessions(workload: Workload, begins_s: Sequence[float], seed: str) -> list[LoadSession]:
    """Return a session for each time at which one begins, in any workload but a trace's.

    Ids are packed to 4 bytes: all prompts of a run are there before its clock starts.
    """
    later = Random(f"{seed}/turns")
    made = []
    for begin_s, prompt in zip(begins_s, prompts(workload, len(begins_s), seed), strict=True):
        turns = [LoadTurn((array("I", prompt),), workload.output_tokens)]
        for _ in range(workload.turns - 1):
            asked = array("I", _ids(later, workload, workload.input_tokens))
            think_s = later.expovariate(1 / workload.think_s) if workload.think_s else 0.0
            turns.append(LoadTurn((asked,), workload.output_tokens, think_s))
        made.append(LoadSession(begin_s, tuple(turns)))
    return made


def check_burstiness(burstiness: float) -> None:
    """Raises ValueError for a shape out of range."""
    least, most = BURSTINESS
    if not least <= burstiness <= most:
        raise ValueError(f"the burstiness must lie in {least:g} to {most:g}")


def arrivals(count: int, rate_per_s: float, burstiness: float, draw: Random) -> list[float]:
    """Draw `count` ascending times in seconds. Gaps are gamma with this shape: 1 is exponential, a Poisson process.

    All are scaled so that the last one comes at `count / rate_per_s`: a Poisson process of which so many arrivals in
    that time are known is the same one, and a run is not asked a tenth more or less than it says.
    """
    times = list(accumulate(draw.gammavariate(burstiness, 1.0) for _ in range(count)))
    return [at * count / (rate_per_s * times[-1]) for at in times]


def _ids(draw: Random, workload: Workload, count: int) -> list[int]:
    return [draw.randrange(workload.token_low, workload.token_high) for _ in range(count)]

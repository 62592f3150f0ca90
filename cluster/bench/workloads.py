"""The prompts of a load run: made from a seed, so that two runs, or two servers, get the very same requests. Pure.

Prompts are token ids, so that their length is exact for every tokenizer. The presets A to D are the shapes that
docs/benchmarks.md reports.
"""

from enum import StrEnum
from random import Random

import msgspec


class Kind(StrEnum):
    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    STREAM = "stream"


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`input_tokens` are new to every request; with a shared prefix, `prefix_tokens` common to its group precede them.

    Ids are drawn from [`token_low`, `token_high`). The defaults avoid the special tokens at the start of most
    vocabularies and fit any of 32,000 ids or more.
    """

    kind: Kind
    input_tokens: int
    output_tokens: int
    prefix_tokens: int = 0
    groups: int = 1
    token_low: int = 100
    token_high: int = 32_000

    def check(self) -> None:
        """Check every field. Raises `ValueError` naming what is out of range."""
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise ValueError("input and output tokens must be at least 1")
        if self.kind is Kind.SHARED_PREFIX and (self.groups < 1 or self.prefix_tokens < 1):
            raise ValueError("a shared prefix needs at least 1 group and 1 prefix token")
        if not 0 <= self.token_low < self.token_high:
            raise ValueError("the token range must be LOW:HIGH with 0 <= LOW < HIGH")


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
    shared = workload.kind is Kind.SHARED_PREFIX
    prefixes = (
        [_ids(draw, workload, workload.prefix_tokens) for _ in range(workload.groups)]
        if shared
        else [[]]
    )
    return [
        prefixes[i % len(prefixes)] + _ids(draw, workload, workload.input_tokens)
        for i in range(count)
    ]


def _ids(draw: Random, workload: Workload, count: int) -> list[int]:
    return [draw.randrange(workload.token_low, workload.token_high) for _ in range(count)]

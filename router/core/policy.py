"""Chooses the pair of workers that gets a request.

`LeastCost` takes the smallest predicted time to first token, a sum of named terms in seconds:

    queue(prefill) + uncached_tokens · s_per_token(prefill)
    + missing_blocks · s_per_block(prefill → decode) + pressure(decode)

and one term that is not this request's own: the time that others lose when a worker computes again what another one
holds (`router.core.reuse`). Simpler policies, to compare with, are in `router.core.policies`.

Views of workers come in, a choice goes out; no clock, and randomness is a generator passed in.
"""

from collections.abc import Sequence
from random import Random
from typing import Protocol

import msgspec

ASSUMED_S_PER_TOKEN = 1 / 500
ASSUMED_S_PER_BLOCK = 1e-3
"""Taken until a worker has measured its own. Between unmeasured workers only their ratio counts."""

_RESOLUTION_DIGITS = 6  # costs that differ by less than a microsecond are ties


class Demand(msgspec.Struct, frozen=True):
    """The memory that a request asks for. `blocks` covers its tokens and the room that a worker promises for more,
    `most_blocks` all that its answer may need."""

    prompt_tokens: int
    prompt_blocks: int
    blocks: int
    most_blocks: int


class PrefillView(msgspec.Struct, frozen=True):
    """A prefill worker as one request sees it. `queue_tokens` are uncached and not computed yet."""

    name: str
    cached_tokens: int
    queue_tokens: int
    s_per_token: float
    outstanding: int
    delaying_tokens: float = 0.0
    """Tokens whose time others lose if it computes again what another one holds (`router.core.reuse`)."""


class DecodeView(msgspec.Struct, frozen=True):
    """A decode worker as one request sees it. `used_blocks` are those that no eviction frees."""

    name: str
    cached_blocks: int
    used_blocks: int
    blocks: int
    s_per_step: float
    s_per_block: dict[str, float]
    outstanding: int


class Cost(msgspec.Struct, frozen=True):
    """Predicted time to first token by term, in seconds."""

    queue_s: float
    compute_s: float
    move_s: float
    pressure_s: float
    others_s: float = 0.0
    """Not this request's own: by how much it delays those that come behind it, beyond what it must."""

    @property
    def total_s(self) -> float:
        return self.queue_s + self.compute_s + self.move_s + self.pressure_s + self.others_s


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
        """The pair for a request among workers that may take it; None if a side is empty."""


def cost(demand: Demand, prefill: PrefillView, decode: DecodeView) -> Cost:
    """The predicted time to first token on one pair.

    Pressure is the decode worker's step time, scaled by the share of its pool that is in use and
    by the requests that share a step: what a new request waits for and slows down.
    """
    s_per_block = decode.s_per_block.get(prefill.name) or ASSUMED_S_PER_BLOCK
    return Cost(
        *_prefill_terms(demand, prefill),
        max(demand.prompt_blocks - decode.cached_blocks, 0) * s_per_block,
        _pressure_s(decode),
        _others_s(prefill),
    )


def _others_s(prefill: PrefillView) -> float:
    return prefill.delaying_tokens * (prefill.s_per_token or ASSUMED_S_PER_TOKEN)


def _prefill_terms(demand: Demand, prefill: PrefillView) -> tuple[float, float]:
    s_per_token = prefill.s_per_token or ASSUMED_S_PER_TOKEN
    uncached_tokens = max(demand.prompt_tokens - prefill.cached_tokens, 1)
    return prefill.queue_tokens * s_per_token, uncached_tokens * s_per_token


def _pressure_s(decode: DecodeView) -> float:
    busy = decode.used_blocks / decode.blocks if decode.blocks else 1.0
    return decode.s_per_step * (busy + decode.outstanding / 8)


def reason(prefill: PrefillView, decode: DecodeView) -> str:
    """Return what `Choice.reason` says of a pair."""
    return "affinity" if prefill.cached_tokens or decode.cached_blocks else "load"


class LeastCost:
    """The pair with the least predicted cost; ties go to the least outstanding work, then by lot."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.memory: tuple[str, ...] = ()

    def choose(
        self, demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Choice | None:
        # Most of a cost belongs to one side alone; only the move is priced for every pair.
        prefill_sides = [(view, sum(_prefill_terms(demand, view)) + _others_s(view)) for view in prefills]
        decode_sides = [
            (view, max(demand.prompt_blocks - view.cached_blocks, 0), _pressure_s(view))
            for view in decodes
        ]
        best: list[tuple[PrefillView, DecodeView]] = []
        best_s, best_work = float("inf"), 0
        for prefill, prefill_s in prefill_sides:
            for decode, missing_blocks, pressure_s in decode_sides:
                move_s = missing_blocks * (
                    decode.s_per_block.get(prefill.name) or ASSUMED_S_PER_BLOCK
                )
                total_s = round(prefill_s + move_s + pressure_s, _RESOLUTION_DIGITS)
                if total_s > best_s:
                    continue
                work = prefill.outstanding + decode.outstanding
                if total_s < best_s or work < best_work:
                    best, best_s, best_work = [], total_s, work
                if work == best_work:
                    best.append((prefill, decode))
        if not best:
            return None
        prefill, decode = best[0] if len(best) == 1 else self._random.choice(best)
        return Choice(prefill, decode, cost(demand, prefill, decode), reason(prefill, decode))

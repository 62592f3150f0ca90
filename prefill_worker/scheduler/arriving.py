"""Which waiting prompts are held back because their next tokens are on their way into the cache. Pure.

- A lower tier has them, and gives them back sooner than they would be computed: the fetch is begun while the prompt
  waits (`engine.kv.tiers.fetches`). Nobody is held for longer than computing the prompt would have taken.
- Another prompt is computing them. Prompts that share an uncached prefix compute it once: the later ones wait until the
  first has come to where they part. What is less than a block is computed twice rather than waited for.
"""

from collections.abc import Iterable, Sequence

from engine.kv.tiers.fetches import Fetches
from engine.types import RequestRecord
from prefill_worker.scheduler.order import Job

LOOK_AHEAD = 4
"""How many of the first in line may be fetched for."""


class Arriving:
    """Owns no state but the fetches'. Changes `fetch` and `held_until` of the prompts it is asked for."""

    def __init__(self, fetches: Fetches | None, block_size: int) -> None:
        self._fetches = fetches
        self._block_size = block_size

    def look(self, prompts: Sequence[Job], matched: Sequence[int], tokens_per_s: float, now: float) -> None:
        """See what a lower tier has for the first in line; `matched` are their tokens in the cache."""
        if self._fetches is None:
            return
        for prompt, cached in list(zip(prompts, matched, strict=True))[:LOOK_AHEAD]:
            if prompt.fetch is not None and prompt.fetch.is_over:
                prompt.fetch = None
            if prompt.fetch is None and (prompt.held_until is None or now < prompt.held_until):
                self._look(prompt, cached, tokens_per_s, now)

    def _look(self, prompt: Job, cached: int, tokens_per_s: float, now: float) -> None:
        assert self._fetches is not None
        record = prompt.record
        limit = len(record.tokens) - 1
        prompt.fetch = self._fetches.wanted(record.namespace, record.tokens, limit, tokens_per_s)
        if prompt.fetch is not None and prompt.held_until is None:
            prompt.held_until = now + (limit - cached) / tokens_per_s

    def is_held(self, prompt: Job, matched: int, running: Iterable[Job], now: float) -> bool:
        """Say if the prompt should wait, though there is budget for it. `matched` of its tokens are in the cache."""
        if prompt.fetch is not None and not prompt.fetch.is_over:
            assert prompt.held_until is not None
            if now < prompt.held_until:
                return True
        end = matched + self._block_size
        return end < len(prompt.record.tokens) and any(
            other.computed < end and _begin_alike(prompt.record, other.record, matched, end)
            for other in running
        )


def _begin_alike(one: RequestRecord, other: RequestRecord, matched: int, end: int) -> bool:
    """Say if both begin with the same `end` tokens. The last of them, which differ most often, are compared first."""
    mine, theirs = one.tokens, other.tokens
    return (
        one.namespace == other.namespace
        and mine[matched:end] == theirs[matched:end]
        and mine[:matched] == theirs[:matched]
    )

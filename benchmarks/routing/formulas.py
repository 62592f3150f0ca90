"""Policies of peers by their formulas, beside those that a cluster can be configured with (`router.core.policies`).

Each chooses the prefill worker; the decode worker is the one with the fewest blocks in use.

    lmetric      the least product of tokens to compute, this prompt's uncached ones included, and requests
                 (LMetric, arXiv 2603.15202: no constant to choose)
    affinity-80  among those that hold 0.8 of the prompt or more, if any, the one with the fewest tokens queued, else
                 that one of all; affinity is left where the queue is longer than the shortest by five seconds
                 (the affinity filter of llm-d's scheduler, without its one per cent of exploration)
    excess-decay prefill tokens, where the credit for what is cached fades as a worker's queue exceeds the shortest:
                 1 / (1 + excess / prompt) (the decay of NVIDIA Dynamo's router, at weight one)
"""

from collections.abc import Callable, Sequence
from random import Random

from router.core.policies import PrefillTokens
from router.core.policy import ASSUMED_S_PER_TOKEN, Demand, PrefillView

HOLDS, MOST_LATER_S = 0.8, 5.0


class TokensTimesRequests(PrefillTokens):
    def prefill(self, demand: Demand, views: Sequence[PrefillView]) -> PrefillView:
        def score(view: PrefillView) -> float:
            return (view.queue_tokens + demand.prompt_tokens - view.cached_tokens) * (view.outstanding + 1)

        return self._least(views, score)


class AffinityFilter(PrefillTokens):
    def prefill(self, demand: Demand, views: Sequence[PrefillView]) -> PrefillView:
        def wait_s(view: PrefillView) -> float:
            return view.queue_tokens * (view.s_per_token or ASSUMED_S_PER_TOKEN)

        holders = [view for view in views if view.cached_tokens >= HOLDS * demand.prompt_tokens]
        if holders and min(map(wait_s, holders)) - min(map(wait_s, views)) <= MOST_LATER_S:
            return self._least(holders, wait_s)
        return self._least(views, wait_s)


class FadingCredit(PrefillTokens):
    def prefill(self, demand: Demand, views: Sequence[PrefillView]) -> PrefillView:
        shortest = min(view.queue_tokens for view in views)

        def score(view: PrefillView) -> float:
            credit = 1 / (1 + (view.queue_tokens - shortest) / demand.prompt_tokens)
            return view.queue_tokens + demand.prompt_tokens - credit * view.cached_tokens

        return self._least(views, score)


FORMULAS: dict[str, Callable[[Random], PrefillTokens]] = {
    "lmetric": TokensTimesRequests,
    "affinity-80": AffinityFilter,
    "excess-decay": FadingCredit,
}


def formula(name: str, seed: int) -> PrefillTokens:
    """Return the policy of this name."""
    return FORMULAS[name](Random(seed))

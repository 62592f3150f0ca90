"""What hits are worth: `least-cost` with more weight on hits than its price derives, for the curve of hits and times.

`hits-K` counts what a prefill worker would have to compute of a prompt K times instead of once. All else of the price
is the same, and so is all of it where a decode worker reads the prompt. A constant that is right for one workload is
wrong for another, so none of them can be configured.
"""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import msgspec

from router.core.policy import Choice, DecodeView, Demand, LeastCost, PrefillView


class HitsWeighted(LeastCost):
    def __init__(self, random: Random, weight: float) -> None:
        super().__init__(random)
        self._weight = weight

    def choose(
        self, demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Choice | None:
        choice = super().choose(demand, [self._weighted(demand, view) for view in prefills], decodes)
        if choice is None:
            return None
        chosen = next((view for view in prefills if view.name == choice.prefill.name), choice.prefill)
        return msgspec.structs.replace(choice, prefill=chosen)

    def _weighted(self, demand: Demand, view: PrefillView) -> PrefillView:
        uncached_tokens = max(demand.prompt_tokens - view.cached_tokens, 0)
        more = (self._weight - 1) * uncached_tokens
        return msgspec.structs.replace(view, delaying_tokens=view.delaying_tokens + more)


WEIGHTED: dict[str, Callable[[Random], LeastCost]] = {
    f"hits-{weight:g}": partial(HitsWeighted, weight=weight) for weight in (1.0, 2.0, 4.0, 16.0)
}
"""By name; with weight 1 it is `least-cost` itself."""

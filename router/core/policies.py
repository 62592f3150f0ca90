"""Simpler policies than `LeastCost`, each as its authors give it, for comparison; and the table of all by name.

The first six choose either side for itself, and let ties be broken by lot. Where there is no prefill worker they choose
a worker as they would choose one, and it does both; else no decode worker reads a prompt:

    affinity-threshold  the worker with the longest cached prefix if that is more than 0.3 of the prompt, otherwise the
                        one with the fewest requests; that one also where the most loaded has 64 more than the least
                        loaded, and 1.5 times as many (SGLang's cache-aware rule)
    prefill-tokens      the prefill worker with the fewest tokens to compute, this prompt's uncached ones included, and
                        the decode worker with the fewest blocks in use (the default cost of NVIDIA Dynamo's router)
    least-loaded        the workers with the fewest requests
    power-of-two        of two workers drawn by lot, the one with fewer requests (Mitzenmacher 2001)
    random              any
    round-robin         each in turn
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol, TypeVar

from router.core.policy import (
    ASSUMED_S_PER_BLOCK,
    ASSUMED_S_PER_TOKEN,
    MANY_PAIRS,
    SHORTLIST,
    Choice,
    DecodeView,
    Demand,
    LeastCost,
    PrefillView,
    RoutingPolicy,
    cost,
    reason,
)

AFFINITY_SHARE = 0.3
MOST_MORE, MOST_TIMES = 64, 1.5

View = TypeVar("View", PrefillView, DecodeView)


class StatedPolicy(RoutingPolicy, Protocol):
    """A policy whose whole state is its generator's and its memory."""

    memory: tuple[str, ...]
    """What it remembers from one choice to the next; most remember nothing."""


class SidePolicy(ABC):
    """Chooses the prefill worker and the decode worker without a look at the other one."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.memory: tuple[str, ...] = ()

    def choose(
        self, demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Choice | None:
        if prefills and decodes:
            prefill, decode = self.prefill(demand, prefills), self.decode(demand, decodes)
        elif owners := {view.name: view for view in decodes if view.local is not None}:
            prefill = self.prefill(demand, [view.local for view in owners.values() if view.local is not None])
            decode = owners[prefill.name]
        else:
            return None
        return Choice(prefill, decode, cost(demand, prefill, decode), reason(prefill, decode))

    @abstractmethod
    def prefill(self, demand: Demand, views: Sequence[PrefillView]) -> PrefillView:
        """Choose one of several."""

    @abstractmethod
    def decode(self, demand: Demand, views: Sequence[DecodeView]) -> DecodeView:
        """Choose one of several."""

    def _least(self, views: Sequence[View], of: Callable[[View], float]) -> View:
        figures = [of(view) for view in views]
        least = min(figures)
        return self._random.choice([view for view, figure in zip(views, figures, strict=True) if figure == least])


class LeastLoaded(SidePolicy):
    def prefill(self, demand: Demand, views: Sequence[PrefillView]) -> PrefillView:
        return self._least(views, lambda view: view.outstanding)

    def decode(self, demand: Demand, views: Sequence[DecodeView]) -> DecodeView:
        return self._least(views, lambda view: view.outstanding)


class AffinityThreshold(LeastLoaded):
    def prefill(self, demand: Demand, views: Sequence[PrefillView]) -> PrefillView:
        loads = [view.outstanding for view in views]
        if max(loads) - min(loads) > MOST_MORE and max(loads) > MOST_TIMES * min(loads):
            return super().prefill(demand, views)
        holder = self._least(views, lambda view: -view.cached_tokens)
        if holder.cached_tokens > AFFINITY_SHARE * demand.prompt_tokens:
            return holder
        return super().prefill(demand, views)


class PrefillTokens(SidePolicy):
    def prefill(self, demand: Demand, views: Sequence[PrefillView]) -> PrefillView:
        return self._least(views, lambda view: view.queue_tokens + demand.prompt_tokens - view.cached_tokens)

    def decode(self, demand: Demand, views: Sequence[DecodeView]) -> DecodeView:
        return self._least(views, lambda view: view.used_blocks)


class PowerOfTwo(LeastLoaded):
    def prefill(self, demand: Demand, views: Sequence[PrefillView]) -> PrefillView:
        return super().prefill(demand, self._random.sample(views, min(2, len(views))))

    def decode(self, demand: Demand, views: Sequence[DecodeView]) -> DecodeView:
        return super().decode(demand, self._random.sample(views, min(2, len(views))))


class RandomPair(SidePolicy):
    def prefill(self, demand: Demand, views: Sequence[PrefillView]) -> PrefillView:
        return self._random.choice(views)

    def decode(self, demand: Demand, views: Sequence[DecodeView]) -> DecodeView:
        return self._random.choice(views)


class RoundRobin(SidePolicy):
    """Every worker in turn, by name, also where one comes or goes."""

    # Mutable state: the last ones chosen, which are its memory.

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.memory = ("", "")

    def prefill(self, demand: Demand, views: Sequence[PrefillView]) -> PrefillView:
        last, decode = self.memory
        chosen = min(views, key=lambda view: (view.name <= last, view.name))
        self.memory = chosen.name, decode
        return chosen

    def decode(self, demand: Demand, views: Sequence[DecodeView]) -> DecodeView:
        prefill, last = self.memory
        chosen = min(views, key=lambda view: (view.name <= last, view.name))
        self.memory = prefill, chosen.name
        return chosen


POLICIES: dict[str, Callable[[Random], StatedPolicy]] = {
    "least-cost": LeastCost,
    "affinity-threshold": AffinityThreshold,
    "prefill-tokens": PrefillTokens,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "random": RandomPair,
    "round-robin": RoundRobin,
}


def settings(name: str) -> dict[str, float]:
    """Return the constants that a policy's choices and costs rest on."""
    assumed = {"assumed_s_per_token": ASSUMED_S_PER_TOKEN, "assumed_s_per_block": ASSUMED_S_PER_BLOCK}
    if name == "least-cost":
        return assumed | {"many_pairs": float(MANY_PAIRS), "shortlist": float(SHORTLIST)}
    if name != "affinity-threshold":
        return assumed
    return assumed | {"affinity_share": AFFINITY_SHARE, "most_more": MOST_MORE, "most_times": MOST_TIMES}


def make_policy(name: str, seed: int) -> StatedPolicy:
    """Return the policy that a config names. Raises ValueError for an unknown name."""
    return policy_with(name, Random(seed))


def policy_with(name: str, random: Random) -> StatedPolicy:
    """Return the policy of this name, with a generator for its lots. Raises ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {name!r}")
    return POLICIES[name](random)

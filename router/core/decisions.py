"""A policy's decisions, each as a record that can be repeated bit for bit and compared with another policy's. Pure.

A policy is a function of what it is given (`Demand` and the views), of its generator and of what it remembers. So a
`Decision` holds all of these as they were before the choice, beside the choice itself. A generator's state is its seed
and the number of 32-bit words that were drawn from it: as short as can be, and drawing that many brings it back.

`RecordedPolicy` stands before a policy, changes none of its choices, and tells whoever listens of each one
(`router/decision_log.py`, `router/shadows.py`). A decision holds counts, names and costs: no token and no tenant.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import msgspec

from engine.types import RequestId
from router.config import LocalPrefill
from router.core.call import Call
from router.core.placement import Placer
from router.core.policies import policy_with, settings
from router.core.policy import Choice, DecodeView, Demand, PrefillView, RoutingPolicy
from router.core.prefix_index import PrefixIndex
from router.core.registry import Registry

VERSION = 6
"""The version of the records: another one where an older program could not repeat what a newer one has written."""
_WORD_BITS = 32
_WORDS_AT_ONCE = 1 << 16


class PolicyState(msgspec.Struct, frozen=True):
    """All that a policy's next choice depends on beside what it is given."""

    seed: int
    drawn_words: int = 0
    memory: tuple[str, ...] = ()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a policy, with everything that it was made of. `at_s` is on the router's clock; `number` counts the
    decisions of one router from 1 on."""

    version: int = VERSION
    number: int
    at_s: float
    request: RequestId
    policy: str
    settings: dict[str, float]
    before: PolicyState
    demand: Demand
    prefills: Sequence[PrefillView]
    decodes: Sequence[DecodeView]
    choice: Choice | None

    @property
    def views(self) -> int:
        """How many workers were looked at."""
        return len(self.prefills) + len(self.decodes)


class CountedDraws(Random):
    """Draws as `Random` of the same seed does, and counts the words drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.words = 0

    def getrandbits(self, k: int, /) -> int:
        self.words += -(-k // _WORD_BITS)
        return super().getrandbits(k)

    def random(self) -> float:
        self.words += 2
        return super().random()

    def skip_to(self, words: int) -> None:
        """Draw until so many words are drawn in all. Raises ValueError if more are drawn already."""
        if words < self.words:
            raise ValueError(f"{self.words} words are drawn already")
        while self.words < words:
            self.getrandbits(_WORD_BITS * min(_WORDS_AT_ONCE, words - self.words))


class RepeatablePolicy:
    """A policy whose state can be read, and taken up again."""

    # Mutable state: the generator, and the policy's memory.

    def __init__(self, name: str, seed: int) -> None:
        """Raises ValueError for an unknown name."""
        self.name = name
        self._begin(seed)

    def _begin(self, seed: int) -> None:
        self._seed = seed
        self._draws = CountedDraws(seed)
        self._policy = policy_with(self.name, self._draws)

    @property
    def state(self) -> PolicyState:
        return PolicyState(self._seed, self._draws.words, self._policy.memory)

    def resume(self, state: PolicyState) -> None:
        """Go on as from `state`: quick where it follows one that this policy has had."""
        if state.seed != self._seed or state.drawn_words < self._draws.words:
            self._begin(state.seed)
        self._draws.skip_to(state.drawn_words)
        self._policy.memory = state.memory

    def choose(
        self, demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Choice | None:
        return self._policy.choose(demand, prefills, decodes)


class RecordedPolicy:
    """A policy that tells of each choice; `asked_for` says for which request the next ones are."""

    # Mutable state: the policy's, how many decisions there were, and for whom and when the next one is.

    def __init__(self, name: str, seed: int, listeners: Sequence[Callable[[Decision], None]]) -> None:
        """`listeners` must neither wait nor raise. Raises ValueError for an unknown name."""
        self._policy = RepeatablePolicy(name, seed)
        self._settings = settings(name)
        self._listeners = listeners
        self._number = 0
        self._request, self._now = RequestId(""), 0.0

    def asked_for(self, request: RequestId, now: float) -> None:
        self._request, self._now = request, now

    def choose(
        self, demand: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Choice | None:
        policy = self._policy
        before = policy.state
        choice = policy.choose(demand, prefills, decodes)
        self._number += 1
        decision = Decision(
            number=self._number,
            at_s=self._now,
            request=self._request,
            policy=policy.name,
            settings=self._settings,
            before=before,
            demand=demand,
            prefills=prefills,
            decodes=decodes,
            choice=choice,
        )
        for listener in self._listeners:
            listener(decision)
        return choice


class RecordedPlacer(Placer):
    """A placer that tells its policy for whom it asks."""

    def __init__(
        self,
        policy: RecordedPolicy,
        registry: Registry,
        index: PrefixIndex,
        local_prefill: LocalPrefill,
        return_s: float,
    ) -> None:
        super().__init__(policy, registry, index, local_prefill, return_s)
        self._asked_for = policy.asked_for

    def choose(self, call: Call, now: float) -> Choice | None:
        self._asked_for(call.record.request, now)
        return super().choose(call, now)

    def beside(self, call: Call, host: Call, now: float) -> Choice | None:
        self._asked_for(call.record.request, now)
        return super().beside(call, host, now)

    def choose_prefill(self, call: Call, now: float) -> PrefillView | None:
        self._asked_for(call.record.request, now)
        return super().choose_prefill(call, now)


def make_placer(
    policy: RoutingPolicy,
    registry: Registry,
    index: PrefixIndex,
    local_prefill: LocalPrefill = "never",
    return_s: float = 0.0,
) -> Placer:
    """Return the placer that this policy needs."""
    if isinstance(policy, RecordedPolicy):
        return RecordedPlacer(policy, registry, index, local_prefill, return_s)
    return Placer(policy, registry, index, local_prefill, return_s)


class Otherwise(NamedTuple):
    """What another policy would have done: whether it takes the same pair, and by how many seconds its pair's predicted
    cost is above that of the pair taken (below zero: it would have gained)."""

    same: bool
    cost_s: float


def compare(decision: Decision, other: Choice | None) -> Otherwise:
    """Compare the choice that was made with another policy's on the same views."""
    made = decision.choice
    if made is None or other is None:
        return Otherwise(made is other, 0.0)
    same = (made.prefill.name, made.decode.name) == (other.prefill.name, other.decode.name)
    return Otherwise(same, other.cost.total_s - made.cost.total_s)

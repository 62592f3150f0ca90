"""Decides what becomes of a request whose worker was lost: it goes on elsewhere, is complete already, or is given up.

Bounded three ways, beside the deadline. A request may lose `max_placements` placements that were accepted; offers
that were lost unheard are no sign against it, since a router that was itself frozen hears of all its broken streams
one by one and makes the same offer on each, so they have a wider bound. One that was in the hands of two workers that
were lost may be what kills them, and is refused as poisonous. And all requests together may be placed again only so
often: a budget that grows with the requests that arrive keeps a failing cluster from drowning in its own retries.
Pure: time is an argument.
"""

import msgspec

from engine.messages import Fault
from engine.plan import finish_reason
from engine.types import FinishReason
from router.config import RouterConfig
from router.core.call import Call

POISON_VICTIMS = 2
"""Lost workers after which a request is suspected of having killed them."""
MAX_UNHEARD = 16
"""Offers of one request that may be lost with their workers before these said anything."""
REFILL_S = 60.0
"""The time in which the budget's reserve fills up by itself, whatever arrives."""


class RetryBudget:
    """A budget of placements after losses; each takes one.

    It begins with `reserve`, never holds more, and grows by `fraction` with every new request, by `reserve` a minute.
    """

    # Mutable state: what is left, and when it was last topped up.

    def __init__(self, reserve: int, fraction: float) -> None:
        self._reserve = float(reserve)
        self._fraction = fraction
        self._left = self._reserve
        self._at_s: float | None = None

    def __repr__(self) -> str:
        return f"RetryBudget({self._left:.1f} of {self._reserve:.0f})"

    def arrived(self) -> None:
        """A new request."""
        self._left = min(self._left + self._fraction, self._reserve)

    def take(self, now: float) -> bool:
        """Spend one; False if none is left."""
        if self._at_s is not None:
            grown = (now - self._at_s) / REFILL_S * self._reserve
            self._left = min(self._left + grown, self._reserve)
        self._at_s = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class PlaceAgain(msgspec.Struct, frozen=True):
    """The request is placed once more."""


class AlreadyComplete(msgspec.Struct, frozen=True):
    """Everything had been emitted when the worker was lost; only its last word is missing."""

    reason: FinishReason


class GivenUp(msgspec.Struct, frozen=True):
    fault: Fault


Recovery = PlaceAgain | AlreadyComplete | GivenUp


def poisoned(call: Call) -> Fault | None:
    """Return the fault of a request that is refused as poisonous, else None. Never shows its text."""
    if len(call.victims) < POISON_VICTIMS:
        return None
    names = ", ".join(sorted({name for name, _ in call.victims}))
    message = (
        f"refused as poisonous: {len(call.victims)} workers were lost while they held this request "
        f"({names})"
    )
    return Fault("UNAVAILABLE", message)


def judge(
    call: Call,
    config: RouterConfig,
    stop_ids: frozenset[int],
    budget: RetryBudget,
    now: float,
    announced: bool = False,
) -> Recovery:
    """Decide on `call`, whose decode worker was just lost and counted. Takes from `budget` for `PlaceAgain`, unless the
    worker's end was `announced`: such losses are bounded by themselves."""
    if call.emitted:
        reason = finish_reason(call.record, len(call.emitted), call.emitted[-1], stop_ids)
        if reason is not None:
            return AlreadyComplete(reason)
    poison = poisoned(call)
    if poison is not None:
        return GivenUp(poison)
    lost = f"decode worker {call.decode} was lost during the request"
    if call.losses >= config.max_placements or call.unheard >= MAX_UNHEARD:
        placements = call.losses + call.unheard
        return GivenUp(Fault("UNAVAILABLE", f"{lost}, the last of {placements} placements"))
    if not announced and not budget.take(now):
        return GivenUp(Fault("UNAVAILABLE", f"{lost}, and the retry budget is spent"))
    return PlaceAgain()

"""Decides what becomes of a request whose worker was lost: it goes on elsewhere, is complete already, or is given up.

Bounded three ways, beside the deadline. A request may lose `max_placements` placements that were accepted; offers
that were lost unheard have a wider bound. One that was in the hands of workers that were lost, or was on its way there,
may be what kills them, and is refused as poisonous. And all requests together may be placed again only so often: a
budget that grows with the requests that arrive keeps a failing cluster from drowning in its own retries.

A worker that was lost before it had accepted a request counts as soon as it is known to be dead: another life has its
name, whoever started it has taken it away, or it was given up. Until then it is *missing*, which is no sign against a
request, since a router that was itself frozen hears of all its broken streams one by one and makes the same offer on
each. But where the request would be refused if those that are missing were dead, it is held back until their fate is
known, for `NEWS_S` at most: what kills every worker that it is offered to is not sent on to the next one meanwhile.

After one lost worker nobody is suspected; after three, everybody who was on all of them. After two it is a request's
own record that decides. It is spared, for one more placement, in either of two cases:

1. They were lost within `TOGETHER_S` of each other, and both held other requests too: a host, a network or an
   operator took them. Or the second had not accepted it: it may have been gone with the first when it was offered the
   request. A request that kills takes its next worker with it as well, and is refused then.
2. It got further: its client was given tokens between the two losses. What kills a worker is met again at the same
   token, since a request goes on exactly where it was.

In every other case the losses show the pattern of one that kills: it was alone on its workers, or they were lost one
after the other, each before it had got a token further. So whatever kills takes two decode workers where it is plain,
and never more than three; with each may go the prefill worker that had still to read its prompt, as nobody is left to
tell of that one. Pure: time is an argument.
"""

from collections.abc import Collection

import msgspec

from engine.messages import Fault
from engine.plan import finish_reason
from engine.types import FinishReason
from router.config import RouterConfig
from router.core.call import Call, Death

SUSPECTS_VICTIMS = 2
"""Lost workers after which a request's record is looked at."""
POISON_VICTIMS = 3
"""Lost workers after which a request is refused, whatever its record."""
TOGETHER_S = 3.0
"""Losses this close to each other may have a cause in common, if others were on both workers: one that ends is missed
at once, one that falls silent in the same moment only when it has not answered for two seconds (`router.dispatch`)."""
MAX_UNHEARD = 16
"""Offers of one request that may be lost with their workers before these said anything."""
NEWS_S = 5.0
"""How long a request is held back for news of workers that are missing. A death is told, or the same life dials again,
within two seconds; past it, none of those that know has seen either."""
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
    if not is_suspect(call.victims.values()):
        return None
    told = f"{len(call.victims)} workers were lost while they held this request"
    return Fault("UNAVAILABLE", f"refused as poisonous: {told}: {obituary(call)}")


def is_suspect(deaths: Collection[Death]) -> bool:
    """Return whether these losses show the pattern of a request that kills its workers."""
    if len(deaths) < SUSPECTS_VICTIMS:
        return False
    if len(deaths) >= POISON_VICTIMS:
        return True
    first, second = sorted(deaths, key=lambda death: death.at_s)
    others = min(first.held_requests, second.held_requests) > 1
    was_offered_behind = first.was_accepted and not second.was_accepted
    # 1. Something took them together.
    if (others or was_offered_behind) and second.at_s - first.at_s <= TOGETHER_S:
        return False
    # 2. It got further.
    return second.emitted_tokens <= first.emitted_tokens


def is_in_doubt(call: Call) -> bool:
    """Return whether the call would be refused as poisonous if the workers that are missing were dead."""
    return bool(call.missing) and is_suspect([*call.victims.values(), *call.missing.values()])


def obituary(call: Call) -> str:
    """Name the workers that were lost while they held `call`, in order, with how and after how many of its tokens."""
    deaths = sorted(call.victims.items(), key=lambda item: item[1].at_s)
    told, before_s = [], None
    for (name, _), death in deaths:
        later = "" if before_s is None else f"{death.at_s - before_s:.1f} s later "
        others = death.held_requests - 1
        company = f"with {others} other{'s' * (others != 1)}" if others else "alone"
        when = f"after {death.emitted_tokens} tokens" + ("" if death.was_accepted else ", not accepted")
        told.append(f"{later}{name} ({death.why}; {when}, {company})")
        before_s = death.at_s
    return ", ".join(told)


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

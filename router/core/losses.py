"""Handles the loss of a worker for every request that it held.

A request is blamed for a worker that had accepted it, and for one that had not as soon as that is known to be dead.
`router.core.recovery` decides what becomes of a request, `router.core.escalation` who is given up. Pure: time is an
argument.
"""

from collections.abc import Iterable
from typing import NamedTuple

from engine.types import FinishReason, Incarnation
from router.config import RouterConfig
from router.core.call import Call, Death, State
from router.core.call_table import CallTable
from router.core.endings import complete, unreported
from router.core.escalation import Verdict
from router.core.events import Command, Condemn, DecodeLost, Fail, Poisonous
from router.core.recovery import (
    NEWS_S,
    AlreadyComplete,
    GivenUp,
    PlaceAgain,
    RetryBudget,
    is_in_doubt,
    judge,
    obituary,
    poisoned,
)
from router.core.registry import Life, Registry
from router.core.waiting_queue import WaitingQueue

KEPT = 256
"""Lost lives whose end is remembered for those that learn of it later."""

NOBODY = Incarnation(-1)
"""No life's: incarnations are not negative."""


class Loss(NamedTuple):
    at_s: float
    why: str
    held_requests: int


class Losses:
    """Mutable state: the retry budget, and how the latest lives were lost. The router core owns it."""

    def __init__(
        self, config: RouterConfig, table: CallTable, queue: WaitingQueue, registry: Registry, stop_ids: frozenset[int]
    ) -> None:
        self._config = config
        self._table = table
        self._queue = queue
        self._registry = registry
        self._stop_ids = stop_ids
        self.budget = RetryBudget(config.retry_reserve, config.retry_fraction)
        self._latest: dict[Life, Loss] = {}

    def lost(
        self, name: str, now: float, out: list[Command], back: Life | None = None, why: str = "its stream broke"
    ) -> None:
        """A worker is lost, for this reason; `back` is the life that has just connected under its name, if any."""
        worker = self._registry.get(name)
        if worker is None:
            return
        self._registry.leave(name, now)
        life, announced = worker.life, self._registry.was_leaving(worker.life)
        self._note(life, Loss(now, why, sum(_holds(call, life) for call in self._table.calls.values())))
        for call in list(self._table.calls.values()):
            if call.source == life:
                call.source = None
            is_its = call.decode == name
            if life != back and not announced:
                if is_its and call.state is State.OFFERED:
                    call.missing[life] = self._death(call, life, now, was_accepted=False)
                # A prompt that another one has read since does not kill who reads it.
                elif is_its or (call.failed_prefills.get(life) and not call.is_prefilled):
                    self.blame(call, life, now)
            if is_its:
                self._recover(call, announced, now, out)

    def give_up(self, verdicts: list[Verdict], now: float, out: list[Command]) -> None:
        """Treat each condemned life as lost at once, whatever becomes of its stream."""
        for verdict in verdicts:
            self.lost(verdict.name, now, out, why=f"given up: {verdict.why}")
            self.died((verdict.name, verdict.incarnation), out)
            out.append(Condemn(verdict))

    def blame(self, call: Call, life: Life, now: float) -> None:
        """Note that a life was lost while it held `call`."""
        call.victims[life] = self._death(call, life, now)

    def back(self, life: Life, out: list[Command]) -> None:
        """A life is connected: it was no victim of any request, and every other life of its name is dead."""
        for call in self._table.calls.values():
            call.victims.pop(life, None)
            call.missing.pop(life, None)
            self._look_again(call)
        self.named([life], out)

    def named(self, lives: Iterable[Life], out: list[Command]) -> None:
        """Take in which life each of these names has: every other one of that name is dead."""
        alive = dict(lives)
        missing = {life for call in self._table.calls.values() for life in call.missing}
        for life in sorted(missing):
            if alive.get(life[0], life[1]) != life[1]:
                self.died(life, out)

    def removed(self, name: str, out: list[Command]) -> None:
        """A worker was taken away by whoever has started it."""
        self.named([(name, NOBODY)], out)

    def died(self, life: Life, out: list[Command]) -> None:
        """A life is dead for certain: it is a victim of those that were offered to it. One of them that waits may be
        refused by that."""
        for call in list(self._table.calls.values()):
            death = call.missing.pop(life, None)
            if death is None:
                continue
            call.victims[life] = death
            self._look_again(call)
            fault = poisoned(call) if call.state is State.WAITING else None
            if fault is not None:
                out.append(poisonous(call))
                self._table.forget(call, out, Fail(call.record.request, fault, FinishReason.ERROR))

    def _look_again(self, call: Call) -> None:
        """Hold a call back no more where what is missing does not matter any longer."""
        if not is_in_doubt(call):
            call.held_back_until_s = None

    def _death(self, call: Call, life: Life, now: float, was_accepted: bool = True) -> Death:
        loss = self._latest.get(life, Loss(now, "it cannot be reached", 1))
        return Death(loss.at_s, loss.why, max(1, loss.held_requests), len(call.emitted), was_accepted)

    def _note(self, life: Life, loss: Loss) -> None:
        self._latest[life] = loss
        if len(self._latest) > KEPT:
            del self._latest[next(iter(self._latest))]

    def _recover(self, call: Call, announced: bool, now: float, out: list[Command]) -> None:
        """The decode worker of `call` is lost: go on elsewhere, or find that nothing is left to do."""
        request, state = call.record.request, call.state
        # 1. Its client has been answered.
        if state is State.CLOSING:
            self._table.forget(call, out)
            return
        # 2. The router has found a stop string: its client has all of the answer.
        if state is State.FINISHING:
            self._table.forget(call, out, complete(call, FinishReason.STOP, unreported(call)))
            return
        # 3. It was offered and not accepted, or runs: it may go on, or has had all its tokens, or is given up.
        if state is State.OFFERED:
            call.unheard += not announced
        else:
            call.losses += not announced
        match judge(call, self._config, self._stop_ids, self.budget, now, announced):
            case PlaceAgain():
                if state is State.RUNNING:
                    call.rewrite()
                    out.append(DecodeLost(request, call.decode, len(call.emitted)))
                call.held_back_until_s = now + NEWS_S if is_in_doubt(call) else None
                self._queue.rejoin(call)
            case AlreadyComplete(reason):
                self._table.forget(call, out, complete(call, reason, unreported(call)))
            case GivenUp(fault):
                if poisoned(call):
                    out.append(poisonous(call))
                self._table.forget(call, out, Fail(request, fault, FinishReason.ERROR))


def _holds(call: Call, life: Life) -> bool:
    """Return whether a life decodes the call, or was offered it, or prefills it: one that has a token needs its prefill
    worker no more."""
    took = call.decode_life == life and call.state is not State.WAITING
    return took or (call.prefill_life == life and call.state is State.RUNNING and not call.emitted)


def poisonous(call: Call) -> Poisonous:
    """Name the workers that `call` is refused for, and what became of them."""
    return Poisonous(call.record.request, obituary(call))

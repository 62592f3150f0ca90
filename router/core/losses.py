"""Handles the loss of a worker for every request that it held.

A request is not blamed for a worker that had not accepted it. `router.core.recovery` decides what becomes of a request,
`router.core.escalation` who is given up. Pure: time is an argument.
"""

from engine.types import FinishReason
from router.config import RouterConfig
from router.core.call import Call, State
from router.core.call_table import CallTable
from router.core.endings import complete, unreported
from router.core.escalation import Verdict
from router.core.events import Command, Condemn, DecodeLost, Fail, Poisonous
from router.core.recovery import AlreadyComplete, GivenUp, PlaceAgain, RetryBudget, judge, poisoned
from router.core.registry import Life, Registry
from router.core.waiting_queue import WaitingQueue


class Losses:
    """Mutable state: the retry budget. The router core owns it."""

    def __init__(
        self, config: RouterConfig, table: CallTable, queue: WaitingQueue, registry: Registry, stop_ids: frozenset[int]
    ) -> None:
        self._config = config
        self._table = table
        self._queue = queue
        self._registry = registry
        self._stop_ids = stop_ids
        self.budget = RetryBudget(config.retry_reserve, config.retry_fraction)

    def lost(self, name: str, now: float, out: list[Command], back: Life | None = None) -> None:
        """The stream to a worker broke; `back` is the life that has just connected under this name, if any."""
        worker = self._registry.get(name)
        if worker is None:
            return
        self._registry.leave(name)
        life, announced = worker.life, self._registry.was_leaving(worker.life)
        for call in list(self._table.calls.values()):
            if call.source == life:
                call.source = None
            took = call.decode == name and call.state is not State.OFFERED
            if (took or life in call.failed_prefills) and life != back and not announced:
                call.victims.add(life)
            if call.decode == name:
                self._recover(call, announced, now, out)

    def give_up(self, verdicts: list[Verdict], now: float, out: list[Command]) -> None:
        """Treat each condemned life as lost at once, whatever becomes of its stream."""
        for verdict in verdicts:
            self.lost(verdict.name, now, out)
            out.append(Condemn(verdict))

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
                self._queue.rejoin(call)
            case AlreadyComplete(reason):
                self._table.forget(call, out, complete(call, reason, unreported(call)))
            case GivenUp(fault):
                if poisoned(call):
                    out.append(poisonous(call))
                self._table.forget(call, out, Fail(request, fault, FinishReason.ERROR))


def poisonous(call: Call) -> Poisonous:
    """Name the workers that `call` is refused for."""
    return Poisonous(call.record.request, sorted(name for name, _ in call.victims))

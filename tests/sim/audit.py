"""The judge of a world: ledgers that add up at every step, and at the end everything at rest."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from engine.kv.cache_ledger import CacheLedger
from engine.kv.ledger import BlockLedger
from telemetry.audit import SlicedLedger
from tests.sim.clock import Process, Violation

if TYPE_CHECKING:
    from tests.sim.world import World

CHECK_EVERY = 16
SLICE_BLOCKS = 16


class Audit:
    """Checks the world and changes nothing in it. Mutable state: how often it was asked about each process, who was
    preempted when it last was, and where the checks in slices are."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._occasions: Counter[int] = Counter()
        self._preempted: dict[int, dict[str, int]] = {}
        self._slices: dict[int, list[SlicedLedger]] = {}

    def is_due(self, process: Process) -> bool:
        """Say whether it is this time's turn. The ledgers of a process are recomputed at every sixteenth occasion, when
        it leaves or is killed between two steps, when the run ends, and at each occasion when the story is told: a
        broken ledger stays broken, so it is found a little later, for a small part of the time."""
        self._occasions[process.pid] += 1
        return self._occasions[process.pid] % CHECK_EVERY == 0 or self._world.say is not None

    def check(self, process: Process) -> None:
        """Check a process, after every step and every batch of events. Raises Violation."""
        world = self._world
        if world.say is not None and process.role == "decode":
            self._say_preempted(process)
        world.memories[process.pid].check()
        self._check_slices(process)
        if self.is_due(process):
            self.recompute(process)
        world.witness.passes(process)

    def _check_slices(self, process: Process) -> None:
        """Go on with what a worker's own auditor checks in slices, which must not find anything that is not so."""
        kv = self._world.workers[process.pid].scheduler.kv
        ledgers = self._slices.setdefault(process.pid, [])
        if not ledgers:
            ledgers += [BlockLedger(kv), CacheLedger(kv)]
        try:
            for ledger in ledgers:
                ledger.check_some(SLICE_BLOCKS)
        except Exception as error:
            raise Violation(f"{process}, in slices: {type(error).__name__}: {error}\n{kv!r}") from error

    def recompute(self, process: Process) -> None:
        """Recompute all ledgers of a process, now. Raises Violation."""
        world = self._world
        core = world.front.core if process.role == "router" else world.workers[process.pid].scheduler
        try:
            core.check()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{process}: {type(error).__name__}: {error}\n{core!r}") from error

    def recompute_all(self) -> None:
        """Recompute the ledgers of all that live, also of those that are frozen. Raises Violation."""
        for process in self._world.live.values():
            if process.alive:
                self.recompute(process)

    def _say_preempted(self, process: Process) -> None:
        world, pid = self._world, process.pid
        assert world.say is not None
        waits = {r.record.request: len(r.tokens) for r in world.workers[pid].scheduler.preemption.line}
        before = self._preempted.get(pid, {})
        for request in (one for one in waits if one not in before):
            world.say(process.name, f"preempts {request}, which has {waits[request]} tokens")
        for request in (one for one in before if one not in waits):
            world.say(process.name, f"has room for {request} again")
        self._preempted[pid] = waits

    def rest(self) -> str:
        """Return what has not come to rest, or nothing."""
        world = self._world
        if self._is_unreconciled():
            return ""
        for client in world.clients:
            if not client.outcome:
                return f"{client.name} has not ended ({len(client.tokens_)} of {len(client.want)} tokens)"
        if world.to_come:
            return f"{world.to_come} requests are still to come"
        for process in world.live.values():
            if not process.alive or process.frozen:
                return f"{process} is not back"
            if process.role == "router":
                if world.front.core.open:
                    return f"the router still knows requests: {world.front.core!r}"
            elif held := self._holds(process):
                return held
        return ""

    def owes(self, process: Process) -> str:
        """Return what a worker still owes to anybody, or nothing; by its blocks and tables, not by its own word."""
        held = self._holds(process)
        scheduler = self._world.workers[process.pid].scheduler
        if not held and process.role == "decode" and scheduler._requests:
            return f"it has {list(scheduler._requests)}"
        return held

    def _holds(self, process: Process) -> str:
        world = self._world
        scheduler = world.workers[process.pid].scheduler
        counts = scheduler.kv.pool.counts()
        if counts["free"] + counts["cached"] != scheduler.kv.pool.total:
            return f"{process} holds blocks: {counts} {scheduler!r} {_side(scheduler)!r}"
        if world.handoffs(process):
            return f"{process} keeps handoffs: {_side(scheduler)!r}"
        return f"{process} still copies" if world.movers[process.pid].copying else ""

    def _is_unreconciled(self) -> bool:
        """Say whether, without `strict`, blocks are kept for a decode worker after their stream broke: they may starve
        the others."""
        world = self._world
        if world.plan.strict or not world.breaks:
            return False
        return bool(world.notes["dropped: a stream that was replaced"]) or any(
            bool(world.handoffs(p)) for p in world.live.values() if p.alive and p.role == "prefill"
        )


def _side(scheduler: Any) -> object:
    return getattr(scheduler, "receiver", None) or scheduler.sender

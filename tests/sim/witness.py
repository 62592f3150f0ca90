"""What is noted on the way: rare states as they are passed, and what each worker has counted when it is gone."""

from typing import TYPE_CHECKING, Any

from engine.messages import Ended, FirstToken, HoldingTold, Load, Orphan, PrefillFailed, Record, StartPrefill
from prefill_worker.scheduler.scheduler import GIVEN_UP
from tests.sim.clock import Process

if TYPE_CHECKING:
    from tests.sim.world import World


class Witness:
    """Notes what happens in a run, for its coverage. Mutable state: the requests that this life of the router was told
    of as orphans, and the last of them."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._reported: set[str] = set()
        self._orphan: str | None = None

    def note(self, what: str) -> None:
        self._world.notes[what] += 1

    def router_begins(self) -> None:
        self._reported.clear()

    def saw(self, record: Record) -> None:
        """Note a record on its way between two workers."""
        if isinstance(record, StartPrefill):
            if record.have_tokens:
                self.note("only a part is migrated")
            if record.handoff.attempt:
                self.note("second try of a handoff")
            if len(record.record.tokens) > record.record.prompt_tokens:
                self.note("resumed with history")
            if record.handoff.placement > 1:
                self.note("second placement")
        elif type(record).__name__ in ("Stop", "PrefillFailed"):
            self.note(type(record).__name__)
        if isinstance(record, PrefillFailed) and record.fault.message == GIVEN_UP:
            self.note("leaving prefill worker gave up what waited")

    def saw_move(self, record: Record) -> None:
        """Note a record between a decode worker and one that yields its requests."""
        if isinstance(record, FirstToken):
            self.note("served by a decode worker")
        elif isinstance(record, PrefillFailed):
            self.note("a decode worker could not serve")
        elif isinstance(record, StartPrefill) and record.handoff.attempt:
            self.note("second try of a move")

    def heard(self, record: Record) -> None:
        """Note what the router hears of a worker."""
        if isinstance(record, Load):
            if record.evicted:
                self.note("cache evicted")
        elif isinstance(record, HoldingTold):
            self.note("cache told to a new router")
        elif isinstance(record, Orphan):
            if record.record.request in self._reported:
                self.note("orphan: reported by two workers")
            self._reported.add(record.record.request)
            self._orphan = record.record.request
        elif isinstance(record, Ended):
            if record.request == self._orphan:
                self.note("orphan: had ended")
            self._orphan = None
        elif type(record).__name__ in ("Refused", "NeedPrefill"):
            self.note(type(record).__name__)

    def kills(self, process: Process) -> None:
        """Note what a worker is doing as it is killed."""
        world = self._world
        if world.movers[process.pid].copying:
            self.note("killed while copying")
        if process.role == "decode":
            scheduler = world.workers[process.pid].scheduler
            if scheduler.batch.beams._live:
                self.note("killed while searching")
            if scheduler.departures:
                self.note("source of a move died")
            decodes = {p.incarnation for p in world.processes.values() if p.role == "decode"}
            if any(name.prefill in decodes for name in scheduler.receiver.unfinished):
                self.note("target of a move died")

    def collect(self, process: Process) -> None:
        """Take over what a worker has counted; to be called once for each life."""
        notes = self._world.notes
        scheduler = self._world.workers[process.pid].scheduler
        for name, part in (("sender", "sender"), ("receiver", "receiver")):
            for why, count in getattr(getattr(scheduler, part, None), "dropped", {}).items():
                notes[f"{name} dropped {why}"] += count
        notes["layer groups: windows slid"] += self._world.memories[process.pid].runner.slid
        if scheduler.kv.groups and scheduler.kv.tiers is not None:
            notes["layer groups: loaded"] += sum(scheduler.kv.tiers.counts.loaded_blocks.values())
        if process.role == "decode":
            if scheduler.kv.groups and scheduler.swapping.stashes is not None:
                notes["layer groups: swapped"] += scheduler.swapping.stashes.stored_blocks
            notes["orphan expired"] += scheduler.endings.orphans.expired
            notes["sample forked"] += scheduler.prefills.forks.forked
            notes["hypothesis forked"] += scheduler.batch.beams.forked
            for state, count in scheduler.preemption.preempted.items():
                notes[f"preempted: {state}"] += count
            for way, count in scheduler.swapping.ways.items():
                notes[f"resumed after preemption: {way}"] += count
            notes["swap chosen"] += scheduler.swapping.choices["swap"]
            for why, count in scheduler.swapping.fallbacks.items():
                notes[f"swap fell back: {why}"] += count
            if scheduler.kv.tiers is not None:
                notes["loaded by a decode worker"] += sum(scheduler.kv.tiers.counts.loaded_blocks.values())
            notes["parent gone before fork"] += scheduler.prefills.forks.inherited
            notes["boundary block copied"] += self._world.memories[process.pid].runner.copies
        notes["copy on write"] += self._world.memories[process.pid].runner.copies

    def passes(self, process: Process) -> None:
        """Note the states that a worker is in now."""
        notes, scheduler = self._world.notes, self._world.workers[process.pid].scheduler
        if scheduler.kv.pool._counts["quarantined"]:
            notes["blocks quarantined"] += 1
        if process.role == "prefill":
            if scheduler.waiting_requests and scheduler.kv.available < 3:
                notes["prompt waits for blocks"] += 1
            return
        if any(not request.record.group for request in scheduler.batch.local):
            notes["prefilled by the decode worker"] += 1
        self._searches(scheduler)

    def _searches(self, scheduler: Any) -> None:
        notes, live = self._world.notes, len(scheduler.batch.beams._live)
        if live:
            notes["search beside others"] += len(scheduler.batch.running) > live
            notes["search on a leaving worker"] += scheduler.leaving
        notes["search preempted"] += any(r.record.beams for r in scheduler.preemption.line)

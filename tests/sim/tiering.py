"""The lower tiers in virtual time: the real index, the real commands; host memory and segments are rows.

A target of a load must stay the reserved block that it was when the load was asked for, until it has ended, and what a
store reads must stay held, and as it was. Now and then a segment cannot be read, a disk is full or does not answer, a
store fails, or what it wrote is worn when it is wanted.
"""

from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING

from engine.kv.block_pool import BlockState
from engine.kv.tiers.commands import (
    DiskHung,
    Loaded,
    OnDisk,
    Save,
    Spill,
    Spilled,
    Store,
    Stored,
    TierCommand,
    TierDrop,
    TierEvent,
    TierLoad,
    TierSlot,
)
from engine.kv.tiers.disk_index import segment_bytes
from engine.kv.tiers.tiers import Tiers
from tests.sim.clock import Process, Violation
from tests.sim.shadow import ShadowKV

if TYPE_CHECKING:
    from tests.sim.world import World

BLOCK_BYTES = 4096
SEGMENTS = (1, 1, 2, 4, 8)
"""How many fit on disk."""
LATE_S = {"prefill": (0.0001, 0.003), "decode": (0.0001, 0.012)}
"""How long a load takes, or a spill or store: long enough, now and then, for a request to end meanwhile."""
TORN = 0.4
FULL = 0.03
HANGS = 0.3
FAILS = 0.08
WORN = 0.1


def open_tiers(
    world: "World", memory: ShadowKV, on_event: Callable[[TierEvent], None]
) -> SimpleNamespace | None:
    """Open tiers as `engine.storage.tiers.opening.open_tiers` does, of the size that the plan says."""
    plan = world.plan
    blocks = plan.decode_tier_blocks if world.starting.role == "decode" else plan.tier_blocks
    if not blocks:
        return None
    tiers = Tiers(blocks, BLOCK_BYTES, _segments(plan.seed) * segment_bytes(max(1, blocks // 4), BLOCK_BYTES))
    return SimpleNamespace(tiers=tiers, mover=SimTierMover(world, memory, on_event))


@lru_cache(1)
def _segments(seed: int) -> int:
    """Draw how many segments the disk of each worker has room for."""
    return Random(f"segments {seed}").choice(SEGMENTS)


class SimTierMover:
    """Stands in for `engine.storage.tiers.mover.TierMover`. Mutable state: the rows of slots and segments."""

    def __init__(self, world: "World", memory: ShadowKV, on_event: Callable[[TierEvent], None]) -> None:
        self._world = world
        self._process: Process = world.starting
        self._memory = memory
        self._on_event = on_event
        self._slots: dict[int, list[int]] = {}
        self._segments: dict[int, list[list[int]]] = {}
        self._stored: set[int] = set()
        """Slots with a digest."""
        self._hung: Callable[[], None] | None = None
        """Ends the load whose read does not come back, as far as it has come."""
        self._has_disk = True
        self._reading: dict[int, TierLoad] = {}
        """Loads that have not ended, by number: nothing that they read may go, or be written, meanwhile."""
        self._spilling: Spill | None = None
        self._lost: set[int] = set()
        """Segments that could not be read: they may go whoever reads them."""

    @cached_property
    def _rng(self) -> Random:
        """A generator of its own: the rest of the run does not depend on it. Many lives end before they need one."""
        return Random(self._world.plan.seed)

    @cached_property
    def _hangs(self) -> Random:
        return Random(f"hangs {self._world.plan.seed}")

    @property
    def beat(self) -> int | None:
        """What the shell's watchdog looks at; of the real one's commands, only a hung one takes long."""
        return None if self._hung is None else 0

    def abandon(self, beat: int | None, why: str) -> None:
        assert self._hung is not None and beat == self.beat
        hung, self._hung, self._has_disk = self._hung, None, False
        self._segments.clear()
        self._world.note("the disk tier hung")
        self._say("gives its disk up")
        self._on_event(DiskHung(why))
        hung()

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def stop(self) -> None:
        """Do nothing: there is no thread."""

    def save(self, commands: Iterable[TierCommand]) -> None:
        for command in commands:
            if isinstance(command, Save):
                rows = self._memory.rows[command.block]
                if 0 in rows:
                    raise Violation(f"{self._process}: block {command.block} is saved, and was never filled")
                self._unread(command.slot)
                self._slots[command.slot.index] = list(rows)
                self._stored.discard(command.slot.index)
                self._world.note("saved to a tier")

    def submit(self, commands: Iterable[TierCommand]) -> None:
        for command in commands:
            match command:
                case Store():
                    self._store(command)
                case TierLoad():
                    self._load(command)
                case Spill():
                    self._spill(command)
                case TierDrop(segment):
                    self._dropped(segment)

    def _unread(self, slot: TierSlot) -> None:
        """Check that nobody reads a slot that is written."""
        read = [place for load in self._reading.values() for place in load.places]
        if slot in read or (self._spilling is not None and slot in self._spilling.slots):
            raise Violation(f"{self._process}: {slot} is written while it is read")

    def _dropped(self, segment: int) -> None:
        """Remove a segment. One that is being read may go only with the whole tier, or where it cannot be read."""
        read = {p.segment for load in self._reading.values() for p in load.places if isinstance(p, OnDisk)}
        if segment in read:
            if self._has_disk and segment not in self._lost:
                raise Violation(f"{self._process}: segment {segment} is dropped while it is read")
            self._world.note("a segment went while it was read")
        self._segments.pop(segment, None)

    def _later(self, event: TierEvent) -> None:
        self._process.later(self._rng.uniform(*LATE_S[self._process.role]), lambda: self._on_event(event))

    def _say(self, what: str) -> None:
        if self._world.say is not None:
            self._world.say(self._process.name, what)

    def _store(self, store: Store) -> None:
        self._say(f"copies blocks {list(store.blocks)} to host memory")
        generations = [self._memory.generations[block] for block in store.blocks]
        rows = [list(self._memory.rows[block]) for block in store.blocks]

        for slot in store.slots:
            self._unread(slot)

        def end() -> None:
            for count, block in enumerate(store.blocks):
                held = self._memory.pool.refs(block) > 0
                as_it_was = self._memory.generations[block] == generations[count]
                if not held or not as_it_was or self._memory.rows[block] != rows[count]:
                    raise Violation(f"{self._process}: block {block} is stored, and is not as it was any more")
                if 0 in rows[count]:
                    raise Violation(f"{self._process}: block {block} is stored, and was never filled")
            if self._rng.random() < FAILS:
                self._world.note("a store failed")
                self._say("could not copy them")
                for slot in store.slots:
                    self._slots.pop(slot.index, None)
                return self._on_event(Stored(store.number, 0, 0.0, "cannot be read"))
            for slot, content in zip(store.slots, rows, strict=True):
                self._slots[slot.index] = content
                self._stored.add(slot.index)
                self._world.note("stored for a swap")
            self._say("has copied them")
            self._on_event(Stored(store.number, len(rows), 0.0001 * len(rows)))

        self._process.later(self._rng.uniform(*LATE_S[self._process.role]), end)

    def _load(self, load: TierLoad) -> None:
        self._say(f"loads into blocks {list(load.targets)}")
        generations = [self._memory.generations[target] for target in load.targets]
        self._reading[load.number] = load
        on_disk = [count for count, place in enumerate(load.places) if isinstance(place, OnDisk)]
        hangs = self._has_disk and self._hung is None and on_disk and self._hangs.random() < HANGS

        def end() -> None:
            del self._reading[load.number]
            for count, (place, target) in enumerate(zip(load.places, load.targets, strict=True)):
                if hangs and count == on_disk[0]:
                    return self._on_event(Loaded(load.number, count, 0.0001, 0.0))
                reserved = self._memory.pool.state(target) is BlockState.RESERVED
                if not reserved or self._memory.generations[target] != generations[count]:
                    raise Violation(f"{self._process}: a load writes block {target}, which is not its own any more")
                if isinstance(place, OnDisk):
                    if place.segment not in self._segments or self._rng.random() < TORN:
                        self._memory.rows[target] = [1] * self._memory.block_size
                        self._lost.add(place.segment)
                        self._world.note("a tier's block was torn")
                        return self._on_event(Loaded(load.number, count, 0.0001, 0.0001))
                    rows = self._segments[place.segment][place.at]
                    self._world.note("loaded from disk")
                else:
                    worn = place.index in self._stored and self._rng.random() < WORN
                    if worn or place.index not in self._slots:
                        self._memory.rows[target] = [1] * self._memory.block_size
                        self._world.note("what was stored was worn")
                        self._say(f"finds what belongs into block {target} not whole")
                        return self._on_event(Loaded(load.number, count, 0.0001, 0.0001))
                    rows = self._slots[place.index]
                    self._world.note("loaded from host memory")
                self._memory.rows[target] = list(rows)
            self._on_event(Loaded(load.number, len(load.places), 0.0001, 0.0001))

        if hangs:
            self._hung = end
            return
        self._process.later(self._rng.uniform(*LATE_S[self._process.role]), end)

    def _spill(self, spill: Spill) -> None:
        if not self._has_disk:
            self._later(Spilled(spill.segment, "the disk tier was given up"))
            return
        if self._rng.random() < FULL:
            self._world.note("the disk tier was full")
            self._has_disk = False
            self._later(Spilled(spill.segment, "No space left on device"))
            return

        self._spilling = spill

        def end() -> None:
            self._spilling = None
            self._segments[spill.segment] = [list(self._slots[slot.index]) for slot in spill.slots]
            self._on_event(Spilled(spill.segment))

        self._process.later(self._rng.uniform(*LATE_S[self._process.role]), end)

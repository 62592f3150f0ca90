"""The tiers below the device: a host tier, and below it a disk tier, as an index of block identities. Pure.

    device cache --evicted: Save--> host --the oldest, ahead of time: Spill--> disk --segment dropped--> forgotten
                 --kept: Store---->
                 <----TierLoad----       <--------------TierLoad--------------

Whole blocks only. They are found by identity, which chains tokens, namespace and model: a tenant finds in a tier what
it finds on the device, its own. A block that is loaded stays in its tier, so that evicting it again costs no copy.

A `Save` is carried out before the device block is written again: what the index knows is there, or will be before
anybody looks. Stores, loads and spills take their time; what they read is pinned, or held, and what a store has not
written yet nobody finds. What is stored is kept for somebody (`engine.kv.tiers.stashes`), and has a digest: if it
turns out not to be whole when it is loaded, it is lost, like a torn block on disk. The engine never waits for the
disk: the oldest blocks of the host tier are written ahead, and when that falls behind they are lost to the disk tier.

A disk that fails once, above all for being full, is given up, files and all, for the life of the process; one that does
not answer is too, but its files stay, for the next life to find.
"""

from collections.abc import Iterable, Iterator, Sequence

from engine import identity
from engine.kv.tiers.commands import (
    DiskHung,
    Loaded,
    OnDisk,
    Place,
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
from engine.kv.tiers.cost import TierCost, TierCounts
from engine.kv.tiers.disk_index import DiskIndex, segment_bytes
from engine.kv.tiers.host_index import HostIndex
from engine.types import BlockId

SEGMENT_BLOCKS = 16
"""Blocks of one file, at most a quarter of the host tier."""
AHEAD_SEGMENTS = 8
"""Segments written ahead, at most half of the host tier."""


class Tiers:
    """Mutable state, all of it: the two indexes, `cost`, `counts`, loads, stores and the spill under way, and what
    the shell is to be told. Owner: the engine thread."""

    def __init__(self, host_blocks: int, block_bytes: int, disk_bytes: int = 0) -> None:
        """`disk_bytes` 0: no disk tier. Raises ValueError for a disk tier without a host tier of four blocks."""
        if disk_bytes and host_blocks < 4:
            raise ValueError("a disk tier is filled from a host tier of at least four blocks")
        self.host = HostIndex(host_blocks)
        self.disk: DiskIndex | None = DiskIndex(disk_bytes) if disk_bytes else None
        self.block_bytes = block_bytes
        self.cost = TierCost()
        self.counts = TierCounts()
        self.disk_error = ""
        """The reason why the disk tier was given up."""
        self._segment_blocks = min(SEGMENT_BLOCKS, max(1, host_blocks // 4))
        self._ahead_blocks = min(AHEAD_SEGMENTS * self._segment_blocks, host_blocks // 2)
        self._loads: dict[int, TierLoad] = {}
        self._stores: dict[int, Store] = {}
        self._storing: dict[bytes, int] = {}
        """The number of each block's store, by identity."""
        self._spill: Spill | None = None
        self._numbers = 0
        self._saving: list[bytes] = []
        self._commands: list[TierCommand] = []
        self._forgotten: list[bytes] = []
        self._sunk: list[bytes] = []

    def __contains__(self, ident: bytes) -> bool:
        return ident in self.host or self._is_on_disk(ident)

    def tier(self, ident: bytes) -> str:
        """Return the upper one of the tiers that have a block; empty where none has it."""
        return "host" if ident in self.host else "disk" if self._is_on_disk(ident) else ""

    @property
    def blocks(self) -> dict[str, int]:
        """Return the number of blocks in each tier; a block may be in both."""
        return {"host": len(self.host), "disk": 0 if self.disk is None else len(self.disk)}

    @property
    def disk_blocks(self) -> int:
        """Return about how many blocks the disk tier can hold."""
        return 0 if self.disk is None else self.disk.limit_bytes // self.block_bytes

    # down

    def demote(self, ident: bytes, block: BlockId, namespace: bytes = b"") -> bool:
        """A device block is evicted: keep its content, if there is room. False: it is in no tier."""
        if ident in self.host:
            self.host.touch(ident)
            return True
        slot = self._put(ident, namespace)
        if slot is None:
            return self._is_on_disk(ident)
        # Until the shell has copied it, nobody else may have the slot.
        self._saving.append(ident)
        self._commands.append(Save(block, slot))
        self.counts.saved_blocks += 1
        self._spill_ahead()
        return True

    def keep(
        self, identities: Sequence[bytes], blocks: Sequence[BlockId], namespace: bytes = b""
    ) -> set[int] | None:
        """Pin these in host memory until `unkeep`, and copy down those that are not there from the device blocks, which
        must be held until all of the returned stores have ended. None where there is no room: nothing has changed."""
        here = [ident for ident in identities if ident in self.host]
        for ident in here:
            self.host.pin(ident)
        new = [pair for pair in zip(identities, blocks, strict=True) if pair[0] not in self.host]
        if len(new) > self.host.room:
            self.unkeep(here)
            return None
        if new:
            slots = [self._put(ident, namespace) for ident, _ in new]
            self._numbers += 1
            idents, sources = zip(*new, strict=True)
            store = Store(self._numbers, idents, sources, tuple(slot for slot in slots if slot))
            self._stores[store.number] = store
            self._storing.update(dict.fromkeys(idents, store.number))
            self._commands.append(store)
        return {self._storing[ident] for ident in identities if ident in self._storing}

    def unkeep(self, identities: Iterable[bytes]) -> None:
        self._forget([ident for ident in identities if self.host.unpin(ident)])

    def adopt(self, segments: Iterable[tuple[int, int, Sequence[bytes]]]) -> None:
        """Take over what an earlier life left on disk: (number, bytes, identities), the oldest first."""
        assert self.disk is not None
        for number, nbytes, identities in segments:
            segment, dropped, _ = self.disk.reserve(nbytes, number)
            self._commands += [TierDrop(one) for one in dropped]
            if segment is None:
                self._commands.append(TierDrop(number))
            else:
                self.disk.written(segment, identities)

    def disable_disk(self, error: str) -> None:
        """Give the disk tier up for good: a cache must not be what keeps a disk full."""
        if self.disk is None:
            return
        segments, identities = self.disk.clear()
        self.disk, self.disk_error = None, error
        self._commands += [TierDrop(segment) for segment in segments]
        self._forget(identities)

    # up

    def find(self, parent: bytes, tokens: Sequence[int], start: int, limit: int, block_size: int) -> list[bytes]:
        """The identities of the whole blocks of `tokens[start:limit]` after `parent` that are in a tier, up to the
        first that is in none."""
        found: list[bytes] = []
        for at in range(start, limit - block_size + 1, block_size):
            parent = identity.extend(parent, tokens[at : at + block_size])
            if not self.can_load(parent):
                break
            found.append(parent)
        return found

    def can_load(self, ident: bytes) -> bool:
        """Return True for a block that is in a tier, and written."""
        return ident in self and ident not in self._storing

    def quicker(self, identities: Sequence[bytes], block_size: int, tokens_per_s: float) -> int:
        """Return how many of the first of these blocks are loaded sooner than computed at `tokens_per_s`."""
        return self.cost.quicker([ident not in self.host for ident in identities], block_size / tokens_per_s)

    def are_quicker(self, identities: Sequence[bytes], blocks: int, block_size: int, tokens_per_s: float) -> bool:
        """Return True if all of these are loaded sooner than `blocks` blocks are computed."""
        on_disk = [ident not in self.host for ident in identities]
        return self.cost.are_quicker(on_disk, blocks * block_size / tokens_per_s)

    def is_worthwhile(self, identities: Sequence[bytes], blocks: int, block_size: int, tokens_per_s: float) -> bool:
        """Return what `are_quicker` does. False counts as a load that was refused."""
        on_disk = [ident not in self.host for ident in identities]
        is_worthwhile = self.cost.is_worthwhile(on_disk, blocks * block_size / tokens_per_s)
        self.counts.refused += not is_worthwhile
        return is_worthwhile

    def worthwhile(self, identities: Sequence[bytes], block_size: int, tokens_per_s: float) -> int:
        """Return what `quicker` does. Fewer than all count as a load that was refused."""
        on_disk = [ident not in self.host for ident in identities]
        count = self.cost.worthwhile(on_disk, block_size / tokens_per_s)
        self.counts.refused += count < len(on_disk)
        return count

    def pin(self, identities: Sequence[bytes]) -> tuple[Place, ...]:
        """Keep these where they are until `unpin`."""
        return tuple(map(self._pin, identities))

    def unpin(self, places: Iterable[Place], identities: Iterable[bytes]) -> None:
        for place, ident in zip(places, identities, strict=True):
            if not isinstance(place, OnDisk):
                self.unkeep([ident])
            elif self.disk is not None:
                self.disk.unpin(place.segment)

    def load(self, places: tuple[Place, ...], identities: Sequence[bytes], targets: Sequence[BlockId]) -> int:
        """Fill device blocks from pinned places, which are unpinned when it is done; returns the load's number."""
        self._numbers += 1
        load = TierLoad(self._numbers, tuple(identities), places, tuple(targets))
        self._loads[load.number] = load
        self._commands.append(load)
        return load.number

    # what the shell is told, and tells

    def take_commands(self) -> list[TierCommand]:
        """Return what is to be carried out in order, the saves among it at once: from now on their content is relied
        on."""
        for ident in self._saving:
            self.host.unpin(ident)
        self._saving.clear()
        taken, self._commands = self._commands, []
        return taken

    def take_forgotten(self) -> list[bytes]:
        """Identities that left their last tier since the last call; some may be back."""
        taken, self._forgotten = self._forgotten, []
        return taken

    def take_sunk(self) -> list[bytes]:
        """Return identities that left host memory for the disk alone since the last call; some may be back, or gone."""
        taken, self._sunk = self._sunk, []
        return taken

    def handle(self, event: TierEvent) -> None:
        match event:
            case Stored():
                self._stored(event)
            case Loaded():
                self._loaded(event)
            case Spilled(segment, error):
                assert self._spill is not None and self._spill.segment == segment
                spill, self._spill = self._spill, None
                self._spilled(spill, error)
            case DiskHung(error):
                self.counts.hung_calls += 1
                self.disable_disk(error)

    def _stored(self, event: Stored) -> None:
        store = self._stores.pop(event.number)
        for ident in store.identities:
            del self._storing[ident]
            if event.error:
                self.host.spoil(ident)
        if not event.error:
            self.counts.saved_blocks += len(store.identities)
            self._spill_ahead()

    def _loaded(self, event: Loaded) -> None:
        load = self._loads.pop(event.number)
        whole = load.places[: event.blocks]
        disk_blocks = sum(isinstance(place, OnDisk) for place in whole)
        self.cost.measured(len(whole) - disk_blocks, event.host_s, disk_blocks, event.disk_s)
        self.counts.loaded(len(whole) - disk_blocks, event.host_s, disk_blocks, event.disk_s)
        if event.blocks < len(load.places):
            broken = load.places[event.blocks]
            self.counts.broken_blocks += 1
            if isinstance(broken, TierSlot):
                self.host.spoil(load.identities[event.blocks])
            else:
                self._drop(broken.segment)
        self.unpin(load.places, load.identities)

    def _spill_ahead(self) -> None:
        """Keep the oldest of the host tier on disk as well: they can give way without loss."""
        if self.disk is None or self._spill is not None or self.host.free >= self._ahead_blocks:
            return
        oldest = self.host.oldest(self._ahead_blocks)
        unwritten = [ident for ident in oldest if ident not in self.disk.places][: self._segment_blocks]
        if len(unwritten) < self._segment_blocks:
            return
        nbytes = segment_bytes(len(unwritten), self.block_bytes)
        # What was written ahead makes no room for what is: on a disk with room for less they would take turns for ever.
        segment, dropped, forgotten = self.disk.reserve(nbytes, spared=oldest)
        self._commands += [TierDrop(one) for one in dropped]
        self.counts.evicted["disk"] += len(forgotten)
        self._forget(forgotten)
        if segment is None:
            return
        slots = tuple(self.host.pin(ident) for ident in unwritten)
        self._spill = Spill(segment, tuple(unwritten), slots)
        self._commands.append(self._spill)

    def _spilled(self, spill: Spill, error: str) -> None:
        older = [ident for ident in self.host.oldest(self._ahead_blocks) if self._is_on_disk(ident)]
        gone = [ident for ident in reversed(spill.identities) if self.host.unpin(ident, first=True)]
        self.host.put_first(older)  # they were written ahead before, and give way before
        if error:
            self.disable_disk(error)
        elif gone:
            self._drop(spill.segment)  # it was not whole when it was written, either
        elif self.disk is not None:  # else it was given up meanwhile
            self.disk.written(spill.segment, spill.identities)
            self.counts.spilled_blocks += len(spill.identities)
        self._forget(gone)
        self._spill_ahead()

    def _drop(self, segment: int) -> None:
        if self.disk is not None and self.disk.has(segment):
            self._forget(self.disk.remove(segment))
            self._commands.append(TierDrop(segment))

    def _put(self, ident: bytes, namespace: bytes) -> TierSlot | None:
        """A pinned slot for a block that has none; None where all are pinned."""
        slot, forgotten = self.host.put(ident, namespace)
        if forgotten is not None:
            self.counts.evicted["host"] += 1
            self._forget([forgotten])
        return None if slot is None else self.host.pin(ident)

    def _pin(self, ident: bytes) -> Place:
        if ident in self.host:
            return self.host.pin(ident)
        assert self.disk is not None
        return self.disk.pin(ident)

    def _is_on_disk(self, ident: bytes) -> bool:
        return self.disk is not None and ident in self.disk.places

    def _forget(self, identities: Iterable[bytes]) -> None:
        """Note that each of these is in one tier fewer."""
        for ident in identities:
            if ident not in self:
                self._forgotten.append(ident)
            elif ident not in self.host:
                self._sunk.append(ident)

    def check(self) -> None:
        """Recompute the invariants of both indexes and of what is under way."""
        self.host.check()
        if self.disk is not None:
            self.disk.check()
        self.check_under_way()

    def check_parts(self) -> Iterator[int]:
        """Do so a part at a time, and yield how many blocks each was; between two, anything may change."""
        yield from self.host.check_parts()
        if self.disk is not None:
            yield from self.disk.check_parts()
        self.check_under_way()

    def check_under_way(self) -> None:
        """Recompute that nothing else has the slots that loads, stores and the spill use."""
        for load in self._loads.values():
            for place, ident in zip(load.places, load.identities, strict=True):
                assert isinstance(place, OnDisk) or self.host.slot(ident) == place, "a slot that is read is reused"
        for store in self._stores.values():
            assert all(self._storing[ident] == store.number for ident in store.identities)
            for ident, slot in zip(store.identities, store.slots, strict=True):
                assert self.host.slot(ident) == slot, "a slot that is written is reused"
        assert sum(len(store.identities) for store in self._stores.values()) == len(self._storing)
        if self._spill is not None:
            for ident, slot in zip(self._spill.identities, self._spill.slots, strict=True):
                assert self.host.slot(ident) == slot, "a slot that is written out is reused"

    def __repr__(self) -> str:
        return f"Tiers({self.host!r}, {self.disk!r}, {len(self._loads)} loads)"

"""Moves the bytes of the lower tiers. Saves are made at once, by the engine's own thread, before the device blocks that
they copy are written again: one copy in memory each. All else happens in a thread of its own, with calls that release
the GIL; the engine never waits for the disk. Stores go first: somebody waits for the blocks that they read. What was
stored has a digest, of the bytes on the device where the CPU sees them, which is compared when it is loaded.
"""

import itertools
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from engine.kv.segments import SegmentFolder, block_digest
from engine.kv.tier_io import (
    Drop,
    Load,
    Loaded,
    OnDisk,
    Place,
    Save,
    Slot,
    Spill,
    Spilled,
    Store,
    Stored,
    TierCommand,
    TierEvent,
    TiersDied,
)
from engine.types import BlockId

log = logging.getLogger(__name__)

NO_DIGEST = -1
"""No block has it: what was not stored whole is never loaded as if it were."""
_STOP, _STORE, _LOAD, _DROP, _SPILL = range(5)
_URGENCY = {Store: _STORE, Load: _LOAD, Drop: _DROP, Spill: _SPILL}


class DeviceMemory(Protocol):
    """Fulfilled by `engine.kv.paged.KVTensors`, on any device."""

    @property
    def memory(self) -> Tensor:
        """uint8 `[blocks, block_bytes]`."""

    def block(self, block: BlockId) -> memoryview:
        """Its bytes; only where `memory` is on the CPU."""


class HostMemory:
    """`slots` blocks of this process's memory; locked where a GPU copies into it, else taken as it is written."""

    def __init__(self, slots: int, block_bytes: int, *, pinned: bool = False) -> None:
        self.memory = torch.empty(slots, block_bytes, dtype=torch.uint8, pin_memory=pinned)

    def block(self, slot: Slot) -> memoryview:
        return self.memory[slot.index].numpy().data


class TierMover:
    """`save` and `submit` are the engine thread's; `on_event` is called in the mover's own. Without one: `run_once`."""

    def __init__(
        self,
        device: DeviceMemory,
        host: HostMemory,
        folder: SegmentFolder | None,
        on_event: Callable[[TierEvent | TiersDied], None],
    ) -> None:
        self._device = device
        self._host = host
        self._folder = folder
        self._staging: HostMemory | None = None
        if device.memory.device.type != "cpu":
            self._staging = HostMemory(1, device.memory.shape[1], pinned=True)
        self._on_event = on_event
        self._digests: dict[Slot, int] = {}
        """Of the slots that were stored. A slot is pinned, or it is nobody's: no two threads change one at once."""
        self._queue: queue.PriorityQueue[tuple[int, int, TierCommand | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread: threading.Thread | None = None

    def save(self, commands: Iterable[TierCommand]) -> None:
        """Make the copies among the commands, before anybody hears that their device blocks are handed out anew."""
        for command in commands:
            if isinstance(command, Save):
                self._digests.pop(command.slot, None)
                self._host.memory[command.slot.index].copy_(self._device.memory[command.block])

    def submit(self, commands: Iterable[TierCommand]) -> None:
        """Queue the rest; never blocks."""
        for command in commands:
            if not isinstance(command, Save):
                self._queue.put((_URGENCY[type(command)], next(self._order), command))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._main, name="tiers", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after what it is at. Raises RuntimeError if it does not end: the memory must stay then."""
        self._queue.put((_STOP, next(self._order), None))
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise RuntimeError(f"the disk tier's thread did not end within {timeout_s} s")
        if self._folder is not None:
            self._folder.close()

    def run_once(self) -> bool:
        """Do what is queued; False if there was nothing."""
        worked = False
        while not self._queue.empty():
            _, _, command = self._queue.get()
            if command is not None:
                self._do(command)
                worked = True
        return worked

    def _main(self) -> None:
        try:
            while (command := self._queue.get()[2]) is not None:
                self._do(command)
        except Exception:
            self._on_event(TiersDied(traceback.format_exc()))

    def _do(self, command: TierCommand) -> None:
        match command:
            case Store():
                self._on_event(self._store(command))
            case Load():
                self._on_event(self._load(command))
            case Spill(segment, identities, slots):
                try:
                    assert self._folder is not None
                    self._folder.write(segment, identities, [self._host.block(slot) for slot in slots])
                except OSError as error:
                    log.warning("the disk tier is given up: %s", error)
                    self._on_event(Spilled(segment, str(error)))
                else:
                    self._on_event(Spilled(segment))
            case Drop(segment):
                try:
                    assert self._folder is not None
                    self._folder.drop(segment)
                except OSError as error:  # the next life finds it, and takes it over
                    log.warning("segment %d of the disk tier stays where it is: %s", segment, error)

    def _store(self, store: Store) -> Stored:
        started_s = time.perf_counter()
        try:
            for ident, block, slot in zip(store.identities, store.blocks, store.slots, strict=True):
                self._host.memory[slot.index].copy_(self._device.memory[block])
                seen = self._host.block(slot) if self._staging else self._device.block(block)
                self._digests[slot] = block_digest(seen, ident)
        except RuntimeError as error:  # torch's, of a device that would not be read
            log.warning("KV blocks could not be stored: %s", error)
            self._digests.update(dict.fromkeys(store.slots, NO_DIGEST))
            return Stored(store.number, 0, 0.0, str(error))
        return Stored(store.number, len(store.blocks), time.perf_counter() - started_s)

    def _load(self, load: Load) -> Loaded:
        seconds = {Slot: 0.0, OnDisk: 0.0}
        for count, (ident, place, target) in enumerate(
            zip(load.identities, load.places, load.targets, strict=True)
        ):
            started_s = time.perf_counter()
            if not self._fill(target, ident, place):
                return Loaded(load.number, count, seconds[Slot], seconds[OnDisk])
            seconds[type(place)] += time.perf_counter() - started_s
        return Loaded(load.number, len(load.places), seconds[Slot], seconds[OnDisk])

    def _fill(self, target: BlockId, ident: bytes, place: Place) -> bool:
        """False: there is no such block, or it is not whole."""
        if isinstance(place, Slot):
            return self._lift(place, ident, target)
        return self._read(place, ident, target)

    def _lift(self, slot: Slot, ident: bytes, target: BlockId) -> bool:
        self._device.memory[target].copy_(self._host.memory[slot.index])
        if slot not in self._digests:
            return True
        seen = self._host.block(slot) if self._staging else self._device.block(target)
        return block_digest(seen, ident) == self._digests[slot]

    def _read(self, place: OnDisk, ident: bytes, target: BlockId) -> bool:
        if self._folder is None:
            return False
        if self._staging is None:
            into = self._device.block(target)
            return self._folder.read(place.segment, place.at, ident, into)
        whole = self._folder.read(place.segment, place.at, ident, self._staging.block(Slot(0)))
        if whole:
            self._device.memory[target].copy_(self._staging.memory[0])
        return whole

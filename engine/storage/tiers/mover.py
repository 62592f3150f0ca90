"""Moves the bytes of the lower tiers. Saves are made at once, by the engine's own thread, before the device blocks that
they copy are written again: one copy in memory each. All else happens in a thread of its own, with calls that release
the GIL; the engine never waits for the disk. Stores go first: somebody waits for the blocks that they read. What was
stored has a digest, of the bytes on the device where the CPU sees them, which is compared when it is loaded.

A disk may never answer, as one behind a network. Who sees that by `beat` abandons the thread: another one goes on with
what is queued, without the disk. The old one is left in its call, and changes nothing that others see if it comes back:
what it reads goes into a buffer of its own first, and what it writes is a file with digests.
"""

import itertools
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

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
    TiersDied,
    TierSlot,
)
from engine.storage.paged import PoolPart
from engine.storage.tiers.segments import SegmentFolder, block_digest
from engine.types import BlockId

log = logging.getLogger(__name__)

NO_DIGEST = (1 << 64) - 1
"""No block has it but by chance: what was not stored whole is never loaded as if it were."""
_STOP, _STORE, _LOAD, _DROP, _SPILL = range(5)
_URGENCY = {Store: _STORE, TierLoad: _LOAD, TierDrop: _DROP, Spill: _SPILL}


class HostMemory:
    """`slots` blocks of this process's memory; locked where a GPU copies into it, else taken as it is written."""

    def __init__(self, slots: int, block_bytes: int, *, pinned: bool = False) -> None:
        self.memory = torch.empty(slots, block_bytes, dtype=torch.uint8, pin_memory=pinned)

    def block(self, slot: TierSlot) -> memoryview:
        return self.memory[slot.index].numpy().data


class _Copies:
    """Copies that are over when the block of `with` ends. A GPU makes them beside the steps that are queued there, on a
    stream of their own: they need not wait for a step, since none under way writes what is copied, or reads what is
    copied to."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Callable[[Tensor, Tensor], None]:
        return self._copy

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)


class TierMover:
    """`save` and `submit` are the engine thread's; `on_event` is called in the mover's own. Without one: `run_once`.

    `device`: the worker's pool, or those of its tensor-parallel ranks, of which this process has mapped the others'. A
    block is whole in the lower tiers, as one of a worker with one pool. No rank has a part in its copies: a step that
    has ended at rank 0 has written its rows at all of them, and one that reads a block is told to them later."""

    def __init__(
        self,
        device: Sequence[PoolPart],
        host: HostMemory,
        folder: SegmentFolder | None,
        on_event: Callable[[TierEvent | TiersDied], None],
    ) -> None:
        self._device = device
        self._host = host
        self._folder = folder
        self._once = list({part.start: part for part in reversed(device)}.values())[::-1]
        """Without pools that have the same heads as one before them."""
        own = device[0].memory.device
        self._is_cpu = own.type == "cpu"
        self._save_copies, self._copies = (_Copies(own) for _ in range(2))
        """The engine thread's, and those of this mover's own."""
        block_bytes = max(part.start + part.memory.shape[1] for part in device)
        self._staging = HostMemory(1, block_bytes, pinned=not self._is_cpu)
        self._on_event = on_event
        self._digests: dict[TierSlot, int] = {}
        """The digest of what was stored in each slot. A slot is pinned, or it is nobody's: no two threads change one at
        once."""
        self._queue: queue.PriorityQueue[tuple[int, int, TierCommand | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Held by the thread while it changes what others see, and by whoever abandons it."""
        self._under_way: TierCommand | None = None
        self._loaded = Loaded(0, 0, 0.0, 0.0)
        """The progress of the load under way."""
        self._beats = 0

    @property
    def beat(self) -> int | None:
        """Changes with every command and every block that is moved; None while there is nothing to do."""
        return None if self._under_way is None else self._beats

    def save(self, commands: Iterable[TierCommand]) -> None:
        """Make the copies among the commands before anybody hears that their device blocks are handed out anew."""
        with self._save_copies as copy:
            for command in commands:
                if isinstance(command, Save):
                    self._digests.pop(command.slot, None)
                    self._copy_out(copy, command.block, command.slot)

    def submit(self, commands: Iterable[TierCommand]) -> None:
        """Queue the rest; never blocks."""
        for command in commands:
            if not isinstance(command, Save):
                self._queue.put((_URGENCY[type(command)], next(self._order), command))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._main, name="tiers", daemon=True)
        self._thread.start()

    def abandon(self, beat: int | None, why: str) -> None:
        """Give the disk up if the thread is stuck in it at `beat`, and answer what is under way with what is there.
        Raises RuntimeError where it is stuck in a copy of memory, which nobody can leave."""
        with self._lock:
            if beat != self.beat:
                return  # it has just come back
            answer: TierEvent | None = None
            match self._under_way:
                case _ if self._folder is None:  # 1. There is no disk that it could be stuck in.
                    raise RuntimeError(f"the tier thread is stuck, and not in the disk: {why}")
                case Spill(segment):  # 2. A segment that may be half written counts as not written.
                    answer = Spilled(segment, why)
                case TierLoad(_, _, places, _) if isinstance(places[self._loaded.blocks], OnDisk):
                    answer = self._loaded  # 3. The blocks before the one that does not come are in place.
                case TierLoad() | Store():  # 4. It is at a block in memory.
                    raise RuntimeError(f"the tier thread is stuck in one copy: {why}")
                case TierDrop():  # 5. Nobody waits for an answer.
                    pass
            log.warning("the disk tier does not answer, and is given up: %s", why)
            self._under_way, self._folder = None, None
            self._on_event(DiskHung(why))
            if answer is not None:
                self._on_event(answer)
            self.start()

    @property
    def _is_abandoned(self) -> bool:
        return self._thread not in (None, threading.current_thread())

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
            while not self._is_abandoned and (command := self._queue.get()[2]) is not None:
                self._beats += 1
                self._under_way = command
                self._do(command)
                self._answer(None)
        except Exception:
            self._answer(TiersDied(traceback.format_exc()))

    def _answer(self, event: TierEvent | TiersDied | None) -> None:
        """The command under way is over, and this is to be said of it."""
        with self._lock:
            if self._is_abandoned:
                return
            self._under_way = None
            self._beats += 1
            if event is not None:
                self._on_event(event)

    def _do(self, command: TierCommand) -> None:
        match command:
            case Store():
                self._answer(self._store(command))
            case TierLoad():
                self._answer(self._load(command))
            case Spill():
                self._answer(self._spill(command))
            case TierDrop(segment) if self._folder is not None:
                try:
                    self._folder.drop(segment)
                except OSError as error:  # the next life finds it, and takes it over
                    log.warning("segment %d of the disk tier stays where it is: %s", segment, error)

    def _store(self, store: Store) -> Stored:
        started_s = time.perf_counter()
        try:
            for ident, block, slot in zip(store.identities, store.blocks, store.slots, strict=True):
                with self._copies as copy:
                    self._copy_out(copy, block, slot)
                self._digests[slot] = self._digest(block, slot, ident)
                self._beats += 1
        except RuntimeError as error:  # torch's, of a device that would not be read
            log.warning("KV blocks could not be stored: %s", error)
            self._digests.update(dict.fromkeys(store.slots, NO_DIGEST))
            return Stored(store.number, 0, 0.0, str(error))
        return Stored(store.number, len(store.blocks), time.perf_counter() - started_s)

    def _digest(self, block: BlockId, slot: TierSlot, ident: bytes) -> int:
        """The digest of a block that has just been copied, one way or the other."""
        if not self._is_cpu:
            return block_digest(ident, self._host.block(slot))
        return block_digest(ident, *(part.memory[block].numpy().data for part in self._once))

    def _copy_out(self, copy: Callable[[Tensor, Tensor], None], block: BlockId, slot: TierSlot) -> None:
        for piece, there in _pieces(self._host.memory[slot.index], self._once, block):
            copy(piece, there)

    def _copy_in(self, whole: Tensor, target: BlockId) -> None:
        with self._copies as copy:
            for piece, there in _pieces(whole, self._device, target):
                copy(there, piece)

    def _spill(self, spill: Spill) -> Spilled:
        if self._folder is None:
            return Spilled(spill.segment, "the disk tier was given up")
        try:
            blocks = [self._host.block(slot) for slot in spill.slots]
            digests = [self._digests.get(slot) for slot in spill.slots]
            self._folder.write(spill.segment, spill.identities, blocks, self._has_moved, digests)
        except OSError as error:
            log.warning("the disk tier is given up: %s", error)
            return Spilled(spill.segment, str(error))
        return Spilled(spill.segment)

    def _has_moved(self) -> None:
        """A part of the command under way is done."""
        with self._lock:
            if not self._is_abandoned:
                self._beats += 1

    def _load(self, load: TierLoad) -> Loaded:
        seconds = {TierSlot: 0.0, OnDisk: 0.0}
        loaded = Loaded(load.number, 0, 0.0, 0.0)
        for count, (ident, place, target) in enumerate(
            zip(load.identities, load.places, load.targets, strict=True), start=1
        ):
            with self._lock:
                if self._is_abandoned:
                    break
                self._loaded = loaded
                self._beats += 1
            started_s = time.perf_counter()
            if not self._fill(target, ident, place):
                break
            seconds[type(place)] += time.perf_counter() - started_s
            loaded = Loaded(load.number, count, seconds[TierSlot], seconds[OnDisk])
        return loaded

    def _fill(self, target: BlockId, ident: bytes, place: Place) -> bool:
        """Return False where there is no such block, or it is not whole. Two cases:

        1. It is in host memory: one copy, and where it was stored, its digest is compared.
        2. It is on disk: read into a buffer of this thread first, since whoever abandons the thread gives the device
           block to others.
        """
        if isinstance(place, TierSlot):  # 1.
            self._copy_in(self._host.memory[place.index], target)
            return place not in self._digests or self._digest(target, place, ident) == self._digests[place]
        folder, staging = self._folder, self._staging  # 2.
        if folder is None or not folder.read(place.segment, place.at, ident, staging.block(TierSlot(0))):
            return False
        with self._lock:
            if self._is_abandoned:
                return False
            self._copy_in(staging.memory[0], target)
        return True


def _pieces(whole: Tensor, parts: Iterable[PoolPart], block: BlockId) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pieces of a block's bytes, `whole`, each with its place in a pool."""
    for start, memory in parts:
        yield whole[start : start + memory.shape[1]], memory[block]

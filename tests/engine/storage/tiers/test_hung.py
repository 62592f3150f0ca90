"""A disk tier whose disk does not answer: it is left alone, and everything else goes on."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine.kv.tiers.commands import (
    DiskHung,
    Loaded,
    OnDisk,
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
from engine.kv.tiers.tiers import Tiers
from engine.storage.paged import PoolPart
from engine.storage.tiers import segments
from engine.storage.tiers.mover import HostMemory, TierMover
from engine.storage.tiers.segments import SegmentFolder
from engine.types import BlockId
from tests.engine.storage.tiers.test_segments import BLOCK_BYTES, KIND, Device, _content, _ident
from transfer.liveness import Watchdog

STUCK_S, SOON_S = 0.3, 10.0
IDENTS = (_ident(0), _ident(1))


class LateFolder(SegmentFolder):
    """Every call waits until `answer` is set, and then does what it was asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, KIND, BLOCK_BYTES)
        self.answer = threading.Event()
        self.answer.set()
        self.waits = 0

    def _wait(self) -> None:
        self.waits += not self.answer.is_set()
        assert self.answer.wait(SOON_S)

    def read(self, number: int, at: int, identity: bytes, into: memoryview) -> bool:
        self._wait()
        return super().read(number, at, identity, into)

    def write(
        self,
        number: int,
        identities: Sequence[bytes],
        blocks: Sequence[memoryview],
        has_moved: Callable[[], None] = lambda: None,
        digests: Sequence[int | None] = (),
    ) -> None:
        self._wait()
        super().write(number, identities, blocks, has_moved, digests)

    def drop(self, number: int) -> None:
        self._wait()
        super().drop(number)


class Bench:
    """A mover with its thread over two device blocks, two slots that are filled, and segment 0 with their content."""

    def __init__(self, path: Path) -> None:
        self.device = Device()
        self.events: list[TierEvent | TiersDied] = []
        host = HostMemory(2, BLOCK_BYTES)
        for at in range(2):
            host.block(TierSlot(at))[:] = _content(at)
        self.folder = LateFolder(path)
        self.watchdog = Watchdog(STUCK_S)
        self.mover = TierMover([PoolPart(0, self.device.memory)], host, self.folder, self.events.append)
        self.mover.start()
        self.do(Spill(0, IDENTS, (TierSlot(0), TierSlot(1))), Spilled(0))

    def do(self, command: TierCommand, *want: TierEvent) -> None:
        """Submit a command and wait until it is answered by `want`."""
        self.events.clear()
        self.mover.submit([command])
        _soon(lambda: len(self.events) >= len(want))
        assert self.events == list(want)

    def hang(self, *commands: TierCommand) -> None:
        """Submit commands and wait until the watchdog says that the thread is stuck in the first of them; then abandon
        the thread."""
        self.events.clear()
        self.mover.submit(commands)
        began_s = time.monotonic()
        _soon(self.is_stuck)
        assert time.monotonic() - began_s >= STUCK_S and not self.events
        self.mover.abandon(self.mover.beat, "it hangs")

    def is_stuck(self) -> bool:
        return self.watchdog.is_stuck(self.mover.beat, time.monotonic())

    def load(self, number: int, *places: TierSlot | OnDisk) -> TierLoad:
        targets = tuple(BlockId(at) for at in range(len(places)))
        return TierLoad(number, IDENTS[: len(places)], places, targets)

    def content(self, block: int) -> bytes:
        return bytes(self.device.block(BlockId(block)))


def _soon(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.folder.answer.set()
    was_given_up = bench.mover._folder is None
    bench.mover.stop()
    if was_given_up:
        bench.folder.close()


def test_a_file_that_does_not_open_ends_the_disk_tier_and_no_load(bench: Bench, tmp_path: Path) -> None:
    """Guards requests against a file system that hangs, here a file whose opening blocks in the kernel: what was there
    is told, the rest is not waited for, host memory goes on, and the disk is asked for nothing more."""
    (file,) = tmp_path.glob("*.segment")
    file.unlink()
    os.mkfifo(file)
    spill = bench.mover._spill
    bench.mover._spill = lambda command: (time.sleep(0.1), spill(command))[1]  # type: ignore[method-assign, func-returns-value]
    bench.hang(bench.load(1, TierSlot(0), OnDisk(0, 1)), Spill(1, IDENTS, (TierSlot(0), TierSlot(1))))
    time.sleep(0.02)
    while len(bench.events) < 3:
        assert not bench.is_stuck(), "the next thread is not the old one"
    hung, loaded, spilled = bench.events
    assert hung == DiskHung("it hangs") and spilled == Spilled(1, "the disk tier was given up")
    assert isinstance(loaded, Loaded) and (loaded.number, loaded.blocks) == (1, 1)
    assert bench.content(0) == _content(0)
    bench.do(bench.load(2, OnDisk(0, 0)), Loaded(2, 0, 0.0, 0.0))
    bench.do(TierDrop(0))
    bench.events.clear()
    bench.mover.submit([bench.load(3, TierSlot(0), TierSlot(1))])
    _soon(lambda: bool(bench.events))
    (loaded,) = bench.events
    assert isinstance(loaded, Loaded) and loaded.blocks == 2 and bench.content(1) == _content(1)
    # Only while somebody waits in the call that opens it for reading does this succeed.
    os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))


@pytest.mark.parametrize("kind", ["load", "spill", "drop"])
def test_a_call_that_comes_back_late_changes_nothing(bench: Bench, kind: str) -> None:
    """Guards blocks that are somebody else's by then: the bytes were right, and come too late."""
    command = {
        "load": bench.load(1, OnDisk(0, 0), OnDisk(0, 1)),
        "spill": Spill(1, IDENTS, (TierSlot(0), TierSlot(1))),
        "drop": TierDrop(0),
    }[kind]
    (old,) = [thread for thread in threading.enumerate() if thread is bench.mover._thread]
    bench.folder.answer.clear()
    bench.hang(command)
    told = {"load": [Loaded(1, 0, 0.0, 0.0)], "spill": [Spilled(1, "it hangs")], "drop": []}[kind]
    assert bench.events == [DiskHung("it hangs"), *told]
    before = [bench.content(at) for at in range(2)]
    bench.folder.answer.set()
    old.join(SOON_S)
    assert bench.folder.waits == 1 and not old.is_alive()
    assert [bench.content(at) for at in range(2)] == before
    assert bench.events == [DiskHung("it hangs"), *told]
    assert bench.mover.beat is None


def test_who_is_left_between_two_blocks_writes_no_more(bench: Bench) -> None:
    """Guards the next block of its load, from host memory: it is somebody else's by then."""
    there, go = threading.Event(), threading.Event()
    fill = bench.mover._fill
    bench.mover._fill = lambda *rest: (fill(*rest), there.set(), go.wait(SOON_S))[0]  # type: ignore[method-assign, func-returns-value]
    old = bench.mover._thread
    assert old is not None
    before = bench.content(1)
    assert before != _content(1)
    bench.hang(bench.load(1, OnDisk(0, 0), TierSlot(1)))
    assert there.is_set()
    go.set()
    old.join(SOON_S)
    assert not old.is_alive() and bench.content(1) == before
    assert bench.events == [DiskHung("it hangs"), Loaded(1, 0, 0.0, 0.0)]


def test_a_thread_that_moves_again_is_left_alone(bench: Bench) -> None:
    """Guards the worker: its disk answers just after the watchdog has judged, and a copy in memory comes next."""
    there, go = threading.Event(), threading.Event()
    store = bench.mover._store
    bench.mover._store = lambda command: (there.set(), go.wait(SOON_S), store(command))[2]  # type: ignore[method-assign]
    bench.folder.answer.clear()
    bench.events.clear()
    bench.mover.submit([bench.load(1, OnDisk(0, 0))])
    _soon(lambda: bench.folder.waits == 1)
    judged = bench.mover.beat
    bench.mover.submit([Store(1, IDENTS[:1], (BlockId(1),), (TierSlot(0),))])
    bench.folder.answer.set()
    assert there.wait(SOON_S)
    bench.mover.abandon(judged, "it hangs")
    go.set()
    _soon(lambda: len(bench.events) == 2)
    loaded, stored = bench.events
    assert isinstance(loaded, Loaded) and loaded.blocks == 1
    assert isinstance(stored, Stored) and stored.blocks == 1 and bench.mover._folder is bench.folder


def test_a_slow_disk_is_no_hung_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a disk tier whose segments take longer than the watchdog waits: every write that comes back is a beat."""
    beats: list[int | None] = []
    write = os.write

    def seen(file: int, part: memoryview) -> int:
        if threading.current_thread() is bench.mover._thread:
            beats.append(bench.mover.beat)
        return write(file, part)

    monkeypatch.setattr(segments.os, "write", seen)
    bench.do(Spill(1, IDENTS, (TierSlot(0), TierSlot(1))), Spilled(1))
    assert len(beats) == 3 and len(set(beats)) == 3, "the header, and two blocks"


def test_who_is_stuck_in_a_copy_cannot_be_left(bench: Bench) -> None:
    """Guards device blocks that are still being written: the worker must end."""
    there, go = threading.Event(), threading.Event()
    bench.mover._fill = lambda *rest: there.set() or go.wait(SOON_S)  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(RuntimeError, match="stuck in one copy"):
        bench.hang(bench.load(1, TierSlot(0)))
    assert there.is_set()
    go.set()


def test_what_the_index_knew_of_the_disk_is_forgotten() -> None:
    """Guards the pins: a spill and a load under way end after the disk has, in whatever order."""
    tiers = Tiers(8, BLOCK_BYTES, disk_bytes=10**6)
    idents = [_ident(number) for number in range(24)]
    spill: Spill | None = None
    for ident in idents:
        tiers.demote(ident, BlockId(0))
        for command in tiers.take_commands():
            if isinstance(command, Spill):
                spill = command
                if ident is not idents[-1]:
                    tiers.handle(Spilled(command.segment))
    assert spill is not None and tiers.disk is not None and tiers._spill is not None
    found = [ident for ident in idents if ident not in tiers.host and ident in tiers][:2]
    number = tiers.load(tiers.pin(found), found, [BlockId(0), BlockId(1)])
    tiers.handle(DiskHung("it hangs"))
    assert tiers.disk is None
    tiers.check()
    tiers.handle(Spilled(spill.segment, "it hangs"))
    tiers.handle(Loaded(number, 1, 0.0, 0.1))
    tiers.check()
    assert tiers.disk_error == "it hangs" and tiers.counts.hung_calls == 1
    assert not tiers.host._pins and set(found) <= set(tiers.take_forgotten())

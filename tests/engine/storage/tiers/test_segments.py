"""The files of the disk tier on real file systems: whole ones are found, torn ones dropped, a full disk ends the
tier."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.kv.tiers.commands import (
    Loaded,
    OnDisk,
    Spill,
    Spilled,
    TierEvent,
    TierLoad,
    TiersDied,
    TierSlot,
)
from engine.kv.tiers.tiers import Tiers
from engine.storage.paged import PoolPart
from engine.storage.tiers.mover import HostMemory, TierMover
from engine.storage.tiers.segments import SegmentFolder
from engine.types import BlockId

BLOCK_BYTES = 3000
KIND = b"k" * 16


def _ident(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _content(number: int) -> memoryview:
    return memoryview(bytes((number + at) % 251 for at in range(BLOCK_BYTES)))


def _open(path: Path, kind: bytes = KIND) -> SegmentFolder:
    return SegmentFolder(path, kind, BLOCK_BYTES)


def _write(folder: SegmentFolder, number: int, blocks: int = 3) -> list[bytes]:
    idents = [_ident(100 * number + n) for n in range(blocks)]
    folder.write(number, idents, [_content(100 * number + n) for n in range(blocks)])
    return idents


def _reads(folder: SegmentFolder, number: int, at: int) -> bool:
    into = bytearray(BLOCK_BYTES)
    whole = folder.read(number, at, _ident(100 * number + at), memoryview(into))
    assert not whole or into == _content(100 * number + at)
    return whole


def test_what_was_written_is_found_by_the_next_life(tmp_path: Path) -> None:
    folder = _open(tmp_path / "w")
    written = [_write(folder, n) for n in range(3)]
    folder.close()
    again = _open(tmp_path / "w")
    found, torn = again.scan()
    assert [(n, list(idents)) for n, _, idents in found] == list(enumerate(written)) and torn == 0
    assert all(_reads(again, n, at) for n in range(3) for at in range(3))
    again.drop(1)
    again.drop(1)
    assert not _reads(again, 1, 0) and _reads(again, 2, 0)
    assert sum(nbytes for _, nbytes, _ in found) == 3 * (4096 + 3 * BLOCK_BYTES)
    assert (tmp_path / "w").stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "w").iterdir())
    again.close()


@pytest.mark.parametrize("kept_bytes", [0, 1, 47, 48, 100, 4096, 4097, 4096 + 3 * BLOCK_BYTES - 1])
def test_a_torn_file_is_dropped_when_the_folder_is_opened(tmp_path: Path, kept_bytes: int) -> None:
    folder = _open(tmp_path)
    _write(folder, 0)
    _write(folder, 1)
    folder.close()
    os.truncate(tmp_path / f"{0:012d}.segment", kept_bytes)
    again = _open(tmp_path)
    found, torn = again.scan()
    assert [n for n, _, _ in found] == [1] and torn == 1
    assert not (tmp_path / f"{0:012d}.segment").exists()
    again.close()


@pytest.mark.parametrize("at", range(0, 4096 + 3 * BLOCK_BYTES, 397))
def test_a_changed_byte_is_never_read(tmp_path: Path, at: int) -> None:
    """In the header the file is dropped, in a block the block is not given out; what is not read does not count."""
    folder = _open(tmp_path)
    _write(folder, 0)
    folder.close()
    path = tmp_path / f"{0:012d}.segment"
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)
    again = _open(tmp_path)
    found, torn = again.scan()
    entries = 48 + 3 * 24
    assert (torn == 1) == (at < entries) and len(found) == 1 - torn
    if found:
        hurt = (at - 4096) // BLOCK_BYTES if at >= 4096 else None
        assert [_reads(again, 0, n) for n in range(3)] == [n != hurt for n in range(3)]
    again.close()


def test_files_of_another_model_are_dropped(tmp_path: Path) -> None:
    folder = _open(tmp_path)
    _write(folder, 0)
    folder.close()
    other = _open(tmp_path, b"x" * 16)
    assert other.scan() == ([], 1)
    other.close()


def test_a_block_is_never_given_out_for_another(tmp_path: Path) -> None:
    folder = _open(tmp_path)
    _write(folder, 0)
    assert not folder.read(0, 1, _ident(2), memoryview(bytearray(BLOCK_BYTES)))
    folder.close()


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    folder = _open(tmp_path)
    with pytest.raises(OSError, match="unavailable"):
        _open(tmp_path)
    folder.close()
    _open(tmp_path).close()


WRITER = """
import sys
from pathlib import Path
from engine.storage.tiers.segments import SegmentFolder
from tests.engine.storage.tiers.test_segments import BLOCK_BYTES, KIND, _content, _ident
folder = SegmentFolder(Path(sys.argv[1]), KIND, BLOCK_BYTES)
for number in range(10**6):
    idents = [_ident(100 * number + n) for n in range(40)]
    folder.write(number, idents, [_content(100 * number + n) for n in range(40)])
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_nothing_that_is_wrong(tmp_path: Path) -> None:
    """Killed at any moment: what it had finished is whole, what it had begun is gone."""
    halves = 0
    for life in range(4):
        path = tmp_path / str(life)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < 3:
            pass
        deadline_s = time.monotonic() + 20
        while not any(path.glob("*.writing")) and time.monotonic() < deadline_s:
            pass
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        halves += any(path.glob("*.writing"))
        folder = _open(path)
        found, _ = folder.scan()
        assert len(found) >= 4 and not any(path.glob("*.writing"))
        assert all(_reads(folder, n, at) for n, _, _ in found for at in range(40))
        folder.close()
    assert halves, "no life was ended while it wrote"


class Device:
    """Two blocks of memory."""

    def __init__(self) -> None:
        self.memory = torch.zeros(2, BLOCK_BYTES, dtype=torch.uint8)

    def block(self, block: BlockId) -> memoryview:
        return self.memory[block].numpy().data


def _spill(mover: TierMover, events: list[TierEvent | TiersDied], segment: int) -> Spilled:
    idents = tuple(_ident(100 * segment + n) for n in range(2))
    mover.submit([Spill(segment, idents, (TierSlot(0), TierSlot(1)))])
    mover.run_once()
    spilled = events.pop()
    assert isinstance(spilled, Spilled)
    return spilled


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, where this process may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(path)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_told_and_leaves_no_half_segment(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _open(small_disk)
    events: list[TierEvent | TiersDied] = []
    host = HostMemory(2, BLOCK_BYTES)
    for at in range(2):
        host.block(TierSlot(at))[:] = _content(at)
    mover = TierMover([PoolPart(0, Device().memory)], host, folder, events.append)
    errors = [_spill(mover, events, segment).error for segment in range(8)]
    assert errors[:3] == ["", "", ""] and "No space left" in errors[-1]
    assert "disk tier is given up" in caplog.text
    assert not any(small_disk.glob("*.writing"))
    mover.submit([TierLoad(1, (_ident(1),), (OnDisk(0, 1),), (BlockId(1),))])
    mover.run_once()
    assert isinstance(events[-1], Loaded) and events[-1].blocks == 1
    folder.close()


LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
from engine.storage.tiers.segments import SegmentFolder
from tests.engine.storage.tiers.test_segments import BLOCK_BYTES, KIND, _write
folder = SegmentFolder(Path(sys.argv[1]), KIND, BLOCK_BYTES)
_write(folder, 0, blocks=1)
try:
    _write(folder, 1, blocks=3)
except OSError as error:
    print(error)
"""


def test_a_file_that_may_not_grow_is_no_segment(tmp_path: Path) -> None:
    """Where no file system can be mounted: the limit on a process's files cuts the write in its middle."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "File too large" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{0:012d}.segment", "lock"]


def test_a_failed_disk_is_given_up_files_and_all() -> None:
    """Guards a cache that keeps a disk full: its segments are dropped, and what was only there is told to be gone."""
    tiers = Tiers(8, BLOCK_BYTES, disk_bytes=10**6)
    for number in range(7):
        assert tiers.demote(_ident(number), BlockId(0))
    spills = [c for c in tiers.take_commands() if isinstance(c, Spill)]
    assert not spills, "nothing is spilled that was not saved"
    for number in range(7, 40):
        tiers.demote(_ident(number), BlockId(0))
        for command in tiers.take_commands():
            if isinstance(command, Spill):
                spills.append(command)
                tiers.handle(Spilled(command.segment, "No space left on device" if number > 30 else ""))
        tiers.check()
    assert tiers.disk is None and tiers.disk_error == "No space left on device"
    assert tiers.blocks == {"host": 8, "disk": 0}
    gone = set(tiers.take_forgotten())
    assert gone == {_ident(n) for n in range(40)} - set(tiers.host._slots)

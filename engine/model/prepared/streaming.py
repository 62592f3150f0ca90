"""Reads files to tensors in one pass: every byte is read once, into a small ring of buffers, and from there it is
copied to its place on the device and hashed.

    reading thread    file ─▶ buffers 0 1 2 3      waits until what was copied from a buffer has arrived
    calling thread              └▶ copies to the device are queued, then the digest takes the bytes

A GPU's copies run by themselves, out of pinned buffers, while this thread hashes and the other reads on. Nothing holds
more of the model than the ring. One thread reads, from beginning to end: it is what the system's own reading ahead is
made for, and faster from a disk than two or four that share a file.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from typing import NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from engine.model.config import ModelError, Progress
from engine.model.prepared.shards import Shard, ShardIndex, Stamp, check_stamp
from engine.storage.paged import TORCH_DTYPES

PIECE_BYTES = 4 << 20
"""A ring that stays in the processor's caches: larger pieces were read and hashed more slowly."""
PIECES = 4

Read = Callable[[int, list[memoryview], int], int]
"""`os.preadv`: descriptor, buffers, offset; how many bytes came."""


class Copies(Protocol):
    """Brings bytes from a buffer to the device. Fulfilled by `HostCopies` and `PinnedCopies`."""

    pinned: bool
    """True where buffers must be pinned memory."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes, or queue the copy."""

    def mark(self) -> Callable[[], None]:
        """Return what waits until all copies so far have been made; it may be called from any thread."""


class HostCopies:
    """Copies to memory of this process, made at once."""

    pinned = False

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Callable[[], None]:
        return _nothing


class PinnedCopies:
    """Copies to a GPU, made by its copy engine on the calling thread's stream."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.current_stream(self._device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)

        def arrive() -> None:
            # A thread's device is number 0 unless it says otherwise, and being asked there would cost memory there.
            with torch.cuda.device(self._device):
                event.synchronize()

        return arrive


def _nothing() -> None:
    pass


class StreamedPieces(NamedTuple):
    """Tensors by name, and the digests of their files by name: none where the files were not hashed."""

    tensors: dict[str, Tensor]
    digests: dict[str, str]


def stream(
    index: ShardIndex,
    device: torch.device,
    progress: Progress | None = None,
    *,
    hashed: bool = True,
    is_known: bool = False,
    copies: Copies | None = None,
    read: Read = os.preadv,
    piece_bytes: int = PIECE_BYTES,
) -> StreamedPieces:
    """Load every weight of `index` to `device`, and digest its files. `is_known`: the digests will be held against
    earlier ones. `progress` hears of bytes of files.

    Raises ModelError naming a file that cannot be read, is shorter than it was, or has changed.
    """
    kinds = {name: TORCH_DTYPES.get(kind, torch.uint8) for name, kind in index.others.items()}
    dtype = TORCH_DTYPES[index.dtype]
    weights = {
        name: torch.empty(shape, dtype=kinds.get(name, dtype), device=device) for name, shape in index.shapes.items()
    }
    targets = {name: weight.view(-1).view(torch.uint8) for name, weight in weights.items()}
    by = copies or (PinnedCopies(device) if device.type == "cuda" else HostCopies())
    digests, done = dict[str, str](), 0
    with ExitStack() as stack:
        files = [_OpenFile(shard, read, is_known, stack) for shard in index.shards]
        pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        stack.callback(pool.shutdown, cancel_futures=True)
        starts = ((file, start) for file in files for start in range(0, file.size_bytes, piece_bytes))
        ahead: deque[tuple[_OpenFile, int, int, Tensor, Future[None]]] = deque()

        def read_next(buffer: Tensor, is_free: Callable[[], None]) -> None:
            for file, start in islice(starts, 1):
                end = min(start + piece_bytes, file.size_bytes)
                ahead.append((file, start, end, buffer, pool.submit(file.fill, start, end, buffer, is_free)))

        size = min(piece_bytes, max((file.size_bytes for file in files), default=0))
        for _ in range(PIECES):
            read_next(torch.empty(size, dtype=torch.uint8, pin_memory=by.pinned), _nothing)
        while ahead:
            file, start, end, buffer, filled = ahead.popleft()
            filled.result()
            for part in file.shard.within(start, end):
                target = targets[part.weight][part.at_bytes : part.at_bytes + part.size_bytes]
                first = part.offset_bytes - start
                by.copy(target, buffer[first : first + part.size_bytes])
            is_free = by.mark()
            if hashed:
                file.digest.update(buffer[: end - start].numpy().data)
            if hashed and end == file.size_bytes:
                digests[file.shard.name] = file.digest.hexdigest()
            read_next(buffer, is_free)
            done += end - start
            if progress is not None:
                progress(done, index.file_bytes)
        by.mark()()
        for file in files:
            file.check()
    return StreamedPieces(weights, digests)


class _OpenFile:
    """A shard that is being read; `stack` closes it. Raises ModelError where it is not what it was."""

    def __init__(self, shard: Shard, read: Read, is_known: bool, stack: ExitStack) -> None:
        self.shard = shard
        self.digest = xxhash.xxh3_128()
        self._read_into = read
        path = shard.stamp.path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(path, f"cannot be read: {error.strerror}") from error
        stack.callback(os.close, self._file)
        self._opened = Stamp.of(path, self._file)
        self.size_bytes = self._opened.size_bytes
        check_stamp(shard.stamp, self._opened, is_known)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def fill(self, start: int, end: int, buffer: Tensor, is_free: Callable[[], None]) -> None:
        """Read the bytes `start` to `end` to the beginning of `buffer`, when `is_free` has waited until nothing is
        copied from it any more."""
        is_free()
        into, at, path = buffer[: end - start].numpy().data, 0, self.shard.stamp.path
        while at < len(into):
            try:
                count = self._read_into(self._file, [into[at:]], start + at)
            except OSError as error:
                raise ModelError(path, f"cannot be read: {error.strerror}") from error
            if count == 0:
                raise ModelError(path, f"ends at byte {start + at}: cut short while it was read")
            at += count

    def check(self) -> None:
        """Raise ModelError where the file is no longer what was opened."""
        now = Stamp.of(self.shard.stamp.path, self._file)
        if (now.size_bytes, now.mtime_ns) != (self._opened.size_bytes, self._opened.mtime_ns):
            raise ModelError(now.path, "was written to while it was read")

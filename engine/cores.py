"""Cores that lie idle, lent for a while.

Every worker has compute threads of its own, as many as its share of the host. While one of them has no step to run, its
cores would do nothing; so those that are at work share them. Who is at work stands in a small file that all workers of
a host map:

    <temporary folder>/headrace-cores-<uid>     a slot per worker: its threads, and 1 while it runs a step

Nobody waits for anybody. A worker at work looks at most once a millisecond, between two calls of its kernels, and takes
what was free at two looks in a row; a worker that has a step to run just begins, and the others give way at their next
call. A slot is held by a lock that ends with its process; what an ended worker left in it counts until the next one
begins. Only kernels whose bits do not depend on the number of threads may use this.
"""

import fcntl
import logging
import mmap
import os
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

SLOTS = 128
_SLOT_BYTES = 2
LOOK_S = 0.001


class Cores:
    """A slot of `path`. Raises OSError where there is no such file to be had, or no slot left."""

    def __init__(self, path: Path, threads: int, most: int | None = None) -> None:
        """`most` threads are never exceeded; by default, the cores that this process may run on."""
        self._most = most or len(os.sched_getaffinity(0))
        self._own = threads
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                raise PermissionError(f"{path} is not a file of this user's")
            # Not a hole, which a full disk could not fill: writing to the mapping would end the process.
            os.posix_fallocate(self._file, 0, SLOTS * _SLOT_BYTES)
            self._slot = self._claim()
            self._map = mmap.mmap(self._file, SLOTS * _SLOT_BYTES)
        except BaseException:
            os.close(self._file)
            raise
        # Mutable: steps under way in this process, what is lent to it, what the latest look found, and when it was.
        self._lock = threading.Lock()
        self._steps = 0
        self._lent = self._seen = 0
        self._looked_s = 0.0
        self._write(threads, busy=False)

    def threads(self) -> int:
        """Return the number of threads for the call at hand: this worker's own, and its part of those that nobody
        uses."""
        now = time.monotonic()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            seen = self._free()
            self._lent, self._seen = min(seen, self._seen), seen
        return min(self._most, self._own + self._lent)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Mark this worker as running a step."""
        with self._lock:
            self._steps += 1
            self._write(self._own, busy=True)
        try:
            yield
        finally:
            with self._lock:
                self._steps -= 1
                self._write(self._own, busy=self._steps > 0)

    def close(self) -> None:
        self._write(0, busy=False)
        self._map.close()
        os.close(self._file)

    def _free(self) -> int:
        slots = self._map[:].rstrip(b"\0")
        threads, busy = slots[0::_SLOT_BYTES], slots[1::_SLOT_BYTES]
        idle = sum(n for n, at_work in zip(threads, busy.ljust(len(threads), b"\0"), strict=True) if not at_work)
        return idle // max(1, sum(busy))

    def _claim(self) -> int:
        """The first slot that nobody holds. Others that nobody holds are cleared: those workers' cores are shared out
        anew."""
        found, mine = os.pread(self._file, SLOTS * _SLOT_BYTES, 0), None
        for slot in range(SLOTS):
            at = slot * _SLOT_BYTES
            if mine is not None and not any(found[at : at + _SLOT_BYTES]):
                continue
            try:
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, slot))
            except OSError:
                continue
            if mine is None:
                mine = slot
                continue
            os.pwrite(self._file, bytes(_SLOT_BYTES), at)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, slot))
        if mine is None:
            raise OSError(f"more than {SLOTS} workers on this host")
        return mine

    def _write(self, threads: int, busy: bool) -> None:
        at = self._slot * _SLOT_BYTES
        self._map[at : at + _SLOT_BYTES] = bytes((min(threads, 255), busy))


def _lock(kind: int, at: int) -> bytes:
    """struct flock, for one byte; belongs to the open file, not to the process as `lockf`'s do."""
    return struct.pack("hhqqi", kind, os.SEEK_SET, at, 1, 0)


@cache
def process_cores(threads: int) -> Cores | None:
    """Claim this process's slot in this host's file; None where it cannot have one."""
    try:
        return Cores(Path(tempfile.gettempdir()) / f"headrace-cores-{os.getuid()}", threads)
    except OSError as error:
        log.info("idle cores stay idle: %s", error)
        return None

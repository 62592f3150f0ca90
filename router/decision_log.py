"""The file of decisions: one JSON object a line, each complete in itself (`router/core/decisions.py`).

Encoded and written in a thread. What cannot be written, because the disk is full, slow or gone, is dropped and counted;
the router goes on. A line is in the file as a whole or not at all, but where the process is killed within a write: the
next router cuts that piece off. Numbers are exact: a float is written with as many digits as tell it from all others.

At `most_bytes` the file becomes NAME.1, in the place of the one before, and begins anew: there are never more than two.
"""

import json
import logging
import os
import stat
import zlib
from collections.abc import Callable
from contextlib import suppress

import msgspec

from router.background import CLOSE_S, BackgroundQueue
from router.core.decisions import VERSION, Decision

FLUSH_BYTES = 1 << 20
_CHECKSUM = b',"crc32":'
_TAIL_BYTES = 1 << 16

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class BrokenLineError(ValueError):
    """A line is no decision; the message says why."""


def line_of(decision: Decision) -> bytes:
    """Return a decision as a line, with its end and the checksum of what stands before that."""
    data = _encode(decision)
    # What is no finite number is null in JSON, and would come back as nothing; Python's own words for them are read.
    if data.count(b"null") > (decision.choice is None):
        data = json.dumps(msgspec.to_builtins(decision), separators=(",", ":")).encode()
    return b"%b%b%d}\n" % (data[:-1], _CHECKSUM, zlib.crc32(data))


def decision_of(line: bytes) -> Decision:
    """Return the decision of a line. Raises BrokenLineError, also for one that was changed after it was written."""
    body, found, checksum = line.rstrip(b"\n").rpartition(_CHECKSUM)
    try:
        version = msgspec.json.decode(line.replace(b"NaN", b"0").replace(b"Infinity", b"0"), type=_Versioned).version
    except (msgspec.DecodeError, RecursionError) as error:
        raise BrokenLineError(f"it is no decision: {error}") from error
    if version != VERSION:
        raise BrokenLineError(f"it is of version {version}; this program reads version {VERSION}")
    data = body + b"}"
    if not found or checksum != b"%d}" % zlib.crc32(data):
        raise BrokenLineError("it is not as it was written: its checksum differs")
    try:
        if b"NaN" in data or b"Infinity" in data:
            return msgspec.convert(json.loads(data), Decision)
        return msgspec.json.decode(data, type=Decision)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BrokenLineError(f"it is no decision: {error}") from error


class _Versioned(msgspec.Struct):
    version: int


class DecisionLog:
    """Owner: the router's event loop, which calls `put`; all else is its thread's."""

    # Mutable state, of the thread: the open file and its size, the lines not written yet, and whether the last write
    # failed.

    def __init__(
        self, path: str, most_bytes: int, wall_offset_s: float, counted: Callable[[int, int], None]
    ) -> None:
        """`wall_offset_s` makes the time of day of the router's clock; `counted` is told of lines written and dropped,
        from either thread."""
        self._path, self._most_bytes = path, most_bytes
        self._wall_offset_s = wall_offset_s
        self._counted = counted
        self._file: int | None = None
        self._size = 0
        self._is_regular = True
        self._lines: list[bytes] = []
        self._bytes = 0
        self._failed = False
        self._queue = BackgroundQueue("decision log", self._take, self._flush)

    def put(self, decision: Decision) -> None:
        """Have a decision written. Never waits and never raises."""
        if not self._queue.put(decision, decision.views):
            self._counted(0, 1)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Write what waits, for at most `limit_s`, and end."""
        self._queue.close(limit_s)

    # ---- in the thread

    def _take(self, decision: Decision) -> None:
        try:
            line = line_of(msgspec.structs.replace(decision, at_s=decision.at_s + self._wall_offset_s))
            if self._file is None:
                self._open()
            if self._is_regular and self._size + self._bytes + len(line) > self._most_bytes:
                self._flush()
                self._rotate()
        except Exception as error:
            self._drop(1, error)
            return
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        lines, data = len(self._lines), b"".join(self._lines)
        self._lines.clear()
        self._bytes = 0
        if not lines:
            return
        try:
            if self._file is None:
                self._open()
            _write(self._file, data)
        except OSError as error:
            self._drop(lines, error)
            self._let_go()
            return
        self._size += len(data)
        self._failed = False
        self._counted(lines, 0)

    def _rotate(self) -> None:
        """Begin the file anew. Raises OSError."""
        if self._size:
            self._let_go()
            os.replace(self._path, f"{self._path}.1")
        if self._file is None:
            self._open()

    def _open(self) -> None:
        """Open the file behind its last whole line. Raises OSError."""
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._is_regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        self._size = 0
        if self._is_regular:
            self._size = _whole_lines_bytes(self._file)
            os.ftruncate(self._file, self._size)

    def _let_go(self) -> None:
        """Close the file, without the pieces of lines that a failed write has left."""
        if self._file is None:
            return
        with suppress(OSError):
            if self._is_regular:
                os.ftruncate(self._file, self._size)
        os.close(self._file)
        self._file = None

    def _drop(self, lines: int, error: Exception) -> None:
        self._counted(0, lines)
        if not self._failed:
            log.error("decisions are not written to %s: %s", self._path, error)
        self._failed = True


def _write(file: int | None, data: bytes) -> None:
    """Write all of `data`. Raises OSError."""
    assert file is not None
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _whole_lines_bytes(file: int) -> int:
    """Return where the last whole line ends."""
    end = os.fstat(file).st_size
    while end:
        begin = max(0, end - _TAIL_BYTES)
        at = os.pread(file, end - begin, begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0

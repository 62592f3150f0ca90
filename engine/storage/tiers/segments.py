"""The files of the disk tier: one for each segment of KV blocks.

    [ magic 8 | kind 16 | block bytes 8 | blocks 8 | digest of this header 8 | entries | padding to a page ]
    [ block 0 | block 1 | ... ]                                 an entry: identity 16, digest 8

Integers are little-endian; digests are XXH3-64, a block's over its bytes and its identity. `kind` stands for all that
the bytes depend on besides the tokens: model, dtype, layout, arithmetic. A file is written beside its name and
renamed, and not flushed: it is a cache. What a crash leaves half-written is found by its size, its header or a
block's digest, and dropped. The folder belongs to one process at a time, by a lock that ends with it, and is readable
by its user alone.
"""

import fcntl
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from engine.identity import IDENTITY_BYTES
from engine.kv.tiers.disk_index import ENTRY_BYTES, FIXED_BYTES, header_bytes, segment_bytes

MAGIC = b"HRKVSEG1"
_FIXED = struct.Struct(f"<8s{IDENTITY_BYTES}sQQQ")
_ENTRY = struct.Struct(f"<{IDENTITY_BYTES}sQ")
assert _FIXED.size == FIXED_BYTES and _ENTRY.size == ENTRY_BYTES


class SegmentFolder:
    """Raises OSError where the folder cannot be made, or another process holds it."""

    def __init__(self, folder: Path, kind: bytes, block_bytes: int) -> None:
        """`kind` is 16 bytes."""
        self._folder = folder
        self._kind = kind
        self._block_bytes = block_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise

    def scan(self) -> tuple[list[tuple[int, int, tuple[bytes, ...]]], int]:
        """Return what an earlier life has left: (number, bytes of the file, identities), the oldest first; and how many
        files were torn or of another kind, which are gone now."""
        found, torn = [], 0
        for path in self._files("*.writing"):
            path.unlink(missing_ok=True)
            torn += 1
        for path in self._files("*.segment"):
            identities = self._whole(path)
            if identities is None:
                path.unlink(missing_ok=True)
                torn += 1
            else:
                found.append((int(path.stem), path.stat().st_size, identities))
        return found, torn

    def write(
        self,
        number: int,
        identities: Sequence[bytes],
        blocks: Sequence[memoryview],
        has_moved: Callable[[], None] = lambda: None,
        digests: Sequence[int | None] = (),
    ) -> None:
        """A new segment; `has_moved` is called after every write that has come back. `digests`: those that are known of
        the blocks: one that has changed since is not whole when it is read. Raises OSError, and then there is no trace
        of the segment."""
        path = self._path(number)
        unfinished = path.with_suffix(".writing")
        header = self._header(identities, blocks, digests or [None] * len(blocks))
        try:
            file = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                for part in (memoryview(header), *blocks):
                    while part:
                        part = part[os.write(file, part) :]
                        has_moved()
            finally:
                os.close(file)
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def read(self, number: int, at: int, identity: bytes, into: memoryview) -> bool:
        """The segment's block number `at` into `into`; False if it is not there, not whole, or not `identity`."""
        try:
            file = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            entry = os.pread(file, ENTRY_BYTES, FIXED_BYTES + at * ENTRY_BYTES)
            (blocks,) = struct.unpack("<Q", os.pread(file, 8, FIXED_BYTES - 16))
            start, got = header_bytes(blocks) + at * self._block_bytes, 0
            while got < len(into):
                count = os.preadv(file, [into[got:]], start + got)
                if count == 0:
                    return False
                got += count
        except (OSError, struct.error, OverflowError):  # the last: no file has room for so many blocks
            return False
        finally:
            os.close(file)
        return entry == _ENTRY.pack(identity, block_digest(identity, into))

    def drop(self, number: int) -> None:
        """Raises OSError where the disk will not have it; a segment that is not there is no error."""
        self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}.segment"

    def _files(self, pattern: str) -> Iterator[Path]:
        return iter(sorted(path for path in self._folder.glob(pattern) if path.stem.isdigit()))

    def _header(
        self, identities: Sequence[bytes], blocks: Sequence[memoryview], digests: Sequence[int | None]
    ) -> bytes:
        entries = b"".join(
            _ENTRY.pack(ident, block_digest(ident, block) if digest is None else digest)
            for ident, block, digest in zip(identities, blocks, digests, strict=True)
        )
        fixed = (MAGIC, self._kind, self._block_bytes, len(identities))
        digest = xxhash.xxh3_64_intdigest(_FIXED.pack(*fixed, 0) + entries)
        return (_FIXED.pack(*fixed, digest) + entries).ljust(header_bytes(len(identities)), b"\0")

    def _whole(self, path: Path) -> tuple[bytes, ...] | None:
        """The identities in a file, if its header and its size are right."""
        try:
            with path.open("rb") as file:
                start = file.read(FIXED_BYTES)
                magic, kind, block_bytes, blocks, digest = _FIXED.unpack(start)
                if (magic, kind, block_bytes) != (MAGIC, self._kind, self._block_bytes):
                    return None
                if path.stat().st_size != segment_bytes(blocks, block_bytes):
                    return None
                entries = file.read(blocks * ENTRY_BYTES)
        except (OSError, struct.error):
            return None
        if xxhash.xxh3_64_intdigest(_FIXED.pack(magic, kind, block_bytes, blocks, 0) + entries) != digest:
            return None
        return tuple(ident for ident, _ in _ENTRY.iter_unpack(entries))


def block_digest(identity: bytes, *pieces: memoryview) -> int:
    """XXH3-64 of a block's bytes, which may lie in several pieces, bound to what they are."""
    whole = xxhash.xxh3_64()
    for piece in pieces:
        whole.update(piece)
    whole.update(identity)
    return whole.intdigest()

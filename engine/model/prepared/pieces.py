"""Files made to be mapped: named pieces that start on a page each, and beside each file an index of what lies where.

    <stem>.bin, <stem>.json

A prepared model's weights, its codes, and what is derived from them (packed weights, panels) are such files. The index
has a digest of every piece, as it was written (`engine.model.prepared.checked` holds them against the file).
"""

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from engine.model.config import ModelError, read_prepared

ALIGN_BYTES = 4096


class PieceEntry(msgspec.Struct, frozen=True):
    """`form` tells the reader of the bytes what they are: a dtype's name, or a description of its own. `digest` is
    XXH3 of 128 bits over them."""

    offset_bytes: int
    size_bytes: int
    shape: tuple[int, ...]
    form: bytes
    digest: str


class PieceIndex(msgspec.Struct, frozen=True):
    """`size_bytes` is that of the file; a file of another size was cut short. `digest` is over all else here."""

    size_bytes: int
    pieces: dict[str, PieceEntry]
    digest: str = ""

    def sealed(self) -> "PieceIndex":
        """Return the same with its digest."""
        said = msgspec.json.encode([self.size_bytes, self.pieces])
        return msgspec.structs.replace(self, digest=xxhash.xxh3_128_hexdigest(said))


class Made(NamedTuple):
    """A piece to write. `raw` is its bytes in parts, of which one at a time is asked for and held."""

    name: str
    shape: tuple[int, ...]
    form: bytes
    raw: Iterable[memoryview]


class Mapped(NamedTuple):
    """A piece of a mapped file."""

    shape: tuple[int, ...]
    form: bytes
    raw: memoryview


def write_pieces(path: Path, pieces: Iterable[Made]) -> PieceIndex:
    """Write the file `path` and its index, one piece after the other as they come."""
    offset, entries = 0, dict[str, PieceEntry]()
    with path.open("wb") as file:
        for made in pieces:
            start = offset = offset + file.write(b"\0" * (-offset % ALIGN_BYTES))
            digest = xxhash.xxh3_128()
            for part in made.raw:
                offset += file.write(part)
                digest.update(part)
            entries[made.name] = PieceEntry(start, offset - start, made.shape, made.form, digest.hexdigest())
        # A rename may reach the disk before the bytes do; zeros for weights would go unnoticed ever after.
        file.flush()
        os.fsync(file.fileno())
    index = PieceIndex(offset, entries).sealed()
    path.with_suffix(".json").write_bytes(msgspec.json.encode(index))
    return index


def load_index(path: Path) -> PieceIndex:
    """Read the index of the file `path`, held against the file. Raises ModelError."""
    index = read_prepared(path.with_suffix(".json"), PieceIndex)
    if index.sealed() != index:
        raise ModelError(path.with_suffix(".json"), "holds other bytes than were written")
    if (size := path.stat().st_size if path.exists() else 0) != index.size_bytes:
        raise ModelError(path, f"has {size} bytes and should have {index.size_bytes}")
    for name, one in index.pieces.items():
        if not 0 <= one.offset_bytes <= one.offset_bytes + one.size_bytes <= size:
            raise ModelError(path, f"{name} does not lie within the file's {size} bytes")
    return index


def map_pieces(path: Path) -> dict[str, Mapped]:
    """Map the pieces of the file `path` by name, in pages shared with every process that maps it. They are private once
    written to, and never to be written: PyTorch takes no others without a warning. Raises ModelError and OSError."""
    index = load_index(path)
    if not index.size_bytes:
        if index.pieces:
            raise ModelError(path, "is empty, and its index names pieces")
        return {}
    with path.open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return {
        name: Mapped(entry.shape, entry.form, mapped[entry.offset_bytes : entry.offset_bytes + entry.size_bytes])
        for name, entry in index.pieces.items()
    }


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that a file stands for, against every process of this host."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

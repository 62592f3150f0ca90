"""A file made to be mapped: pieces that start on a page each, and beside it an index of what lies where.

    <stem>.bin, <stem>.json
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from engine.model.config import ModelError

ALIGN_BYTES = 4096


class Index(msgspec.Struct, frozen=True):
    """`size_bytes` is that of the file; a file of another size was cut short."""

    size_bytes: int


class Piece(msgspec.Struct, frozen=True):
    """`form` tells the reader of the bytes what they are: a dtype's name, or a description of its own."""

    offset_bytes: int
    size_bytes: int
    shape: tuple[int, ...]
    form: bytes

    @property
    def span(self) -> slice:
        return slice(self.offset_bytes, self.offset_bytes + self.size_bytes)


class PieceIndex(Index, frozen=True):
    pieces: dict[str, Piece]


class Made(NamedTuple):
    """A piece to write; `raw` is a view of its bytes."""

    name: str
    shape: tuple[int, ...]
    form: bytes
    raw: memoryview


_AnyIndex = TypeVar("_AnyIndex", bound=Index)


def load_index(path: Path, kind: type[_AnyIndex]) -> _AnyIndex:
    """The index of the file `path`, held against the file. Raises ModelError."""
    try:
        index = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=kind)
        size = path.stat().st_size
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(path.parent, f"not a prepared model: {error}") from error
    if size != index.size_bytes:
        raise ModelError(path, f"has {size} bytes and should have {index.size_bytes}")
    return index


def write_pieces(path: Path, pieces: Iterable[Made]) -> PieceIndex:
    """Write the file `path` and its index, one piece after the other as they come."""
    offset, entries = 0, dict[str, Piece]()
    with path.open("wb") as file:
        for made in pieces:
            offset += file.write(b"\0" * (-offset % ALIGN_BYTES))
            entries[made.name] = Piece(offset, made.raw.nbytes, made.shape, made.form)
            offset += file.write(made.raw)
        # A rename may reach the disk before the bytes do; zeros for weights would go unnoticed ever after.
        file.flush()
        os.fsync(file.fileno())
    index = PieceIndex(offset, entries)
    path.with_suffix(".json").write_bytes(msgspec.json.encode(index))
    return index

"""A file made to be mapped: pieces that start on a page each, and beside it an index of what lies where.

    <stem>.bin, <stem>.json
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that a file stands for, against every process of this host."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_once(path: Path, pieces: Callable[[], Iterable[Made]]) -> None:
    """Write a file derived from the prepared model in whose folder it lies, unless it is there. Raises OSError."""
    if path.exists():
        return
    with locked(path.parent.with_name(f"{path.parent.name}.lock")):
        if path.exists():
            return
        partial = path.with_suffix(".partial")
        try:
            write_pieces(partial, pieces())
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)


def make_folder_once(
    target: Path, is_whole: Callable[[Path], bool], fill: Callable[[Path], None]
) -> None:
    """Have `fill` write a folder, unless a whole one is there. It appears by one rename. Raises OSError, and what
    `fill` raises."""
    if is_whole(target):
        return
    with locked(target.with_name(f"{target.name}.lock")):
        if is_whole(target):
            return
        partial = target.with_name(f"{target.name}.partial")
        for rubbish in (partial, target):  # nobody else is at work: we hold the lock
            if rubbish.exists():
                shutil.rmtree(rubbish)
        partial.mkdir()
        try:
            fill(partial)
            partial.rename(target)
        finally:
            if partial.exists():
                shutil.rmtree(partial)

"""Weights by reference: which bytes of whose files make each weight, and what those files hold.

    <prepared model>/shards.json     what lies where, written when the model is prepared
    <prepared model>/contents.json   the digest of each shard, written by the first load that has read them all

A digest is XXH3 of 128 bits over a whole file, header included: what `xxhsum -H2` prints of it.
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from engine.model.config import ModelError, read_prepared
from engine.model.prepared.pieces import load_index, locked

NUMBERS = ("float32", "float16", "bfloat16")
SHARDS_FILE = "shards.json"
CONTENTS_FILE = "contents.json"

log = logging.getLogger(__name__)


class Stamp(msgspec.Struct, frozen=True):
    """The identity of a file, as far as it can be told without reading it."""

    path: str
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @staticmethod
    def of(path: str | Path, file: int | None = None) -> "Stamp":
        """Take the stamp of a file; `file` is a descriptor of the file, where it is open. Raises OSError."""
        found = os.stat(path if file is None else file)
        return Stamp(str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


class Stretch(msgspec.Struct, frozen=True):
    """`size_bytes` of a file from `offset_bytes` on are those of a weight from `at_bytes` on: a weight of several
    tensors has one for each, whose rows lie under each other."""

    weight: str
    at_bytes: int
    offset_bytes: int
    size_bytes: int


class Shard(msgspec.Struct, frozen=True):
    """A file, and what of it is wanted, in the order of the file."""

    stamp: Stamp
    stretches: tuple[Stretch, ...]

    @property
    def name(self) -> str:
        return Path(self.stamp.path).name

    def within(self, start: int, end: int) -> Iterator[Stretch]:
        """Yield what of the file's bytes `start` to `end` is wanted."""
        for stretch in self.stretches:
            first = max(start, stretch.offset_bytes)
            last = min(end, stretch.offset_bytes + stretch.size_bytes)
            if first < last:
                at = stretch.at_bytes + first - stretch.offset_bytes
                yield Stretch(stretch.weight, at, first, last - first)


class ShardIndex(msgspec.Struct, frozen=True):
    """Every weight's shape, and the files that hold them, in the order in which they are read."""

    dtype: str
    shapes: dict[str, tuple[int, ...]]
    shards: tuple[Shard, ...]
    others: dict[str, str] = {}
    """The types of those that are not in `dtype`; of codes uint8."""

    @property
    def file_bytes(self) -> int:
        return sum(shard.stamp.size_bytes for shard in self.shards)

    @staticmethod
    def load(model_dir: Path) -> "ShardIndex":
        """Read it. Raises ModelError."""
        return read_prepared(model_dir / SHARDS_FILE, ShardIndex)

    def save(self, model_dir: Path) -> None:
        (model_dir / SHARDS_FILE).write_bytes(msgspec.json.encode(self))


def prepared_shards(files: Sequence[Path], dtype: str) -> ShardIndex:
    """Describe a prepared model's own files as the shards of all their pieces. Raises ModelError."""
    shapes, others, shards = dict[str, tuple[int, ...]](), dict[str, str](), list[Shard]()
    for path in files:
        pieces = load_index(path).pieces
        stretches = tuple(Stretch(name, 0, piece.offset_bytes, piece.size_bytes) for name, piece in pieces.items())
        shards.append(Shard(Stamp.of(path), stretches))
        shapes |= {name: piece.shape for name, piece in pieces.items()}
        said = {name: piece.form.decode() for name, piece in pieces.items()}
        kinds = {name: kind if kind in NUMBERS else "uint8" for name, kind in said.items()}
        others |= {name: kind for name, kind in kinds.items() if kind != dtype}
    return ShardIndex(dtype, shapes, tuple(shards), others)


def by_reference(model_dir: Path) -> bool:
    """Return True where the prepared model leaves its weights where they were found."""
    return (model_dir / SHARDS_FILE).exists()


def check_stamp(was: Stamp, now: Stamp, is_known: bool) -> None:
    """Raise ModelError for a file that another has taken the place of since the model was prepared. One whose digest
    `is_known` may have been copied or linked since: its bytes decide, when they have been read."""
    if now.size_bytes != was.size_bytes:
        problem = f"has {now.size_bytes} bytes, and had {was.size_bytes} when the model was prepared"
        raise ModelError(was.path, problem)
    if now != was and not is_known:
        raise ModelError(was.path, "has changed since the model was prepared; start again to prepare it anew")


def contents(model_dir: Path) -> dict[str, str]:
    """Return the digests of the shards by name; none before the first load. Raises ModelError."""
    path = model_dir / CONTENTS_FILE
    return read_prepared(path, dict[str, str]) if path.exists() else {}


def agree(model_dir: Path, index: ShardIndex, found: dict[str, str]) -> None:
    """Hold what a load has read against what the first one has; the first one's is kept. Raises ModelError naming a
    shard that differs."""
    with locked(model_dir.with_name(f"{model_dir.name}.lock")):
        if not (known := contents(model_dir)):
            partial = model_dir / f"{CONTENTS_FILE}.{os.getpid()}"
            try:
                partial.write_bytes(msgspec.json.encode(found))
                partial.rename(model_dir / CONTENTS_FILE)
            except OSError as error:
                partial.unlink(missing_ok=True)
                log.warning("digests of the weights are not kept, so no later load is held against them: %s", error)
            return
    for shard in index.shards:
        was, now = known.get(shard.name), found[shard.name]
        if was != now:
            problem = f"holds other bytes than when it was first loaded: XXH3 {now}, and was {was}"
            raise ModelError(shard.stamp.path, problem)


def fingerprint_of(prepared: str, found: dict[str, str]) -> str:
    """Return a prepared model's fingerprint with the digests of its weights, as far as they are known: `<prepared>`,
    which covers all but them, or `<prepared>-<weights>`."""
    if not found:
        return prepared
    said = "\n".join(f"{found[name]} {name}" for name in sorted(found))
    return f"{prepared}-{hashlib.blake2b(said.encode(), digest_size=16).hexdigest()}"

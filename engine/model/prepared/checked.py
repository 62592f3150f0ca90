"""Whether a prepared model still holds the bytes that were written: read once on each host after each of its starts.

    <cache>/<key>/digests.json   the digest of each file that was written with the folder, and which of them have pieces
    <stem>.json                  beside each file of pieces: a digest of each piece (a tensor), and of the index itself
    <cache>/<key>.checked        of which files that was found true since which boot: their size, times and inode

A digest is XXH3 of 128 bits. Whoever opens a model first after a boot reads it all, and says so in the record; a folder
with a file of another size, time or inode than the record has is read again. What is found bad is made again: the
folder where its source is known (`engine.model.prepared.cache`), and by `make_once` what was derived from the folder.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import xxhash

from engine.messages import guarded
from engine.model.config import ModelError, Progress, read_prepared
from engine.model.prepared.pieces import Made, load_index, locked, write_pieces
from engine.model.prepared.shards import Stamp

DIGESTS_FILE = "digests.json"
READ_BYTES = 4 << 20
BOOTS = 8
"""The boots that a record tells of: a cache on a network's disk is used by several hosts."""

log = logging.getLogger(__name__)


_read_record = guarded(msgspec.json.Decoder(dict[str, dict[str, Stamp]]).decode)


class Seal(msgspec.Struct, frozen=True):
    """What a folder was written with: digests of files, and the names of those whose digests are in an index."""

    files: dict[str, str]
    pieces: tuple[str, ...]


def seal(folder: Path) -> None:
    """Write down what `folder` holds, once all of it is written."""
    found = sorted(folder.iterdir())
    files = {path.name: file_digest(path) for path in found if path.suffix != ".bin"}
    pieces = tuple(path.name for path in found if path.suffix == ".bin")
    (folder / DIGESTS_FILE).write_bytes(msgspec.json.encode(Seal(files, pieces)))


def _sealed(folder: Path) -> Seal:
    """Raises ModelError where it cannot be told what `folder` was written with, or that lies elsewhere."""
    told = read_prepared(folder / DIGESTS_FILE, Seal)
    for name in (*told.files, *told.pieces):
        if name in ("", "..") or "\0" in name or Path(name).name != name:
            raise ModelError(folder / DIGESTS_FILE, f"{name!r} is no file of its folder")
    return told


def sealed_files(folder: Path) -> list[Path]:
    """List what `folder` was written with. Raises ModelError where that cannot be told."""
    told = _sealed(folder)
    return [folder / name for name in (DIGESTS_FILE, *told.files, *told.pieces)]


def check_folder(folder: Path, progress: Progress | None = None) -> int:
    """Read all that `folder` was written with; return its bytes. Raises ModelError naming a file that is missing or
    holds other bytes, and OSError. `progress` hears of bytes read."""
    told = _sealed(folder)
    total, done = sum(_size(path) for path in sealed_files(folder)), 0
    for name, digest in told.files.items():
        if (found := file_digest(folder / name)) != digest:
            raise ModelError(folder / name, f"holds other bytes than were written: XXH3 {found}, and was {digest}")
        done += _size(folder / name)
    for name in told.pieces:
        for read in _checked_pieces(folder / name):
            done += read
            if progress is not None:
                progress(done, total)
    return total


def check_once(folder: Path, progress: Progress | None = None) -> None:
    """Check a folder unless that was done since this host booted. Raises as `check_folder` does."""
    record = CheckRecord(folder)
    if record.knows(sealed_files(folder)):
        return
    with _locked_if_possible(folder):
        check_locked(folder, progress)


def check_locked(folder: Path, progress: Progress | None = None) -> None:
    """Do the same where the folder's lock is held."""
    record = CheckRecord(folder)
    if record.knows(files := sealed_files(folder)):
        return
    began_s = time.monotonic()
    size = check_folder(folder, progress)
    took_s = time.monotonic() - began_s
    rate = size / max(took_s, 1e-9)
    log.info("%s is sound: %.2f GB in %.1f s, %.2f GB/s", folder.name, size / 1e9, took_s, rate / 1e9)
    record.note(files)


def check_pieces(path: Path) -> int:
    """Read a file of pieces; return its bytes. Raises ModelError naming the piece that holds other bytes than were
    written, and OSError."""
    return sum(_checked_pieces(path))


def make_once(path: Path, pieces: Callable[[], Iterable[Made]]) -> None:
    """Write a file of pieces derived from the prepared model in whose folder it lies, unless it is there and sound.
    Raises OSError, and ModelError for one that is not and cannot be made again."""
    record, both = CheckRecord(path.parent), [path, path.with_suffix(".json")]
    if record.knows(both):
        return
    with _locked_if_possible(path.parent):
        if path.exists():
            try:
                if not record.knows(both):
                    check_pieces(path)
                    record.note(both)
                return
            except ModelError as error:
                log.warning("%s; it is made again", error)
        partial = path.with_suffix(".partial")
        try:
            write_pieces(partial, pieces())
            partial.rename(path)
            record.note(both)
        finally:
            partial.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    """Return the digest of a whole file. Raises ModelError for one that is missing, and OSError."""
    digest = xxhash.xxh3_128()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


class CheckRecord:
    """Which files of a folder were found sound since this host booted, kept beside it."""

    def __init__(self, folder: Path, boot: str = "") -> None:
        self._path = folder.with_name(f"{folder.name}.checked")
        self._boot = boot or _boot()

    def knows(self, files: Sequence[Path]) -> bool:
        """Return True if all of these files are there and as they were when they were found sound."""
        known = self._read().get(self._boot, {})
        try:
            return all(known.get(path.name) == Stamp.of(path) for path in files)
        except OSError:
            return False

    def note(self, files: Sequence[Path]) -> None:
        """Note that these files are sound. Where that cannot be written, the next process reads them again."""
        known = self._read()
        now = known.pop(self._boot, {})
        boots = {**dict(list(known.items())[1 - BOOTS :]), self._boot: now}
        partial = self._path.with_suffix(".checked-partial")
        try:
            now.update({path.name: Stamp.of(path) for path in files})
            partial.write_bytes(msgspec.json.encode(boots))
            partial.rename(self._path)
        except OSError as error:
            log.info("%s: not noted (%s): whoever comes next reads the model again", self._path, error.strerror)

    def _read(self) -> dict[str, dict[str, Stamp]]:
        try:
            return _read_record(self._path.read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}


def _checked_pieces(path: Path) -> Iterator[int]:
    """Read a file piece by piece, and yield the bytes of each block read."""
    index = load_index(path)
    with path.open("rb", buffering=0) as file:
        for name, piece in index.pieces.items():
            file.seek(piece.offset_bytes)
            digest, left = xxhash.xxh3_128(), piece.size_bytes
            while left and (block := file.read(min(left, READ_BYTES))):
                digest.update(block)
                left -= len(block)
                yield len(block)
            if (found := digest.hexdigest()) != piece.digest:
                problem = f"{name} holds other bytes than were written: XXH3 {found}, and was {piece.digest}"
                raise ModelError(path, problem)


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                yield block
    except FileNotFoundError as error:
        raise ModelError(path, "is missing") from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def _locked_if_possible(folder: Path) -> Iterator[None]:
    """Hold a folder's lock. Where the lock's file cannot be opened, nobody can write beside it either."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder.with_name(f"{folder.name}.lock")))
        except OSError as error:
            log.debug("%s is read without its lock: %s", folder, error)
        yield


def _boot() -> str:
    """Return the random name of this boot of the host."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else "this boot"

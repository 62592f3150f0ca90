"""A prepared model that leaves its weights where they are: for a Hugging Face directory that holds every one of them
in the type that the engine computes in, and workers that copy them to a device rather than map them.

    <cache>/<key>/    config.json, shards.json, tokenizer.json, chat_template.jinja, text.json; contents.json in time

`key` is a digest of the stamps of the directory's files, so that nothing of them is read to find the folder, and its
headers and text to make it. What the weights are, the first worker that loads them says
(`engine.model.prepared.shards`).
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from engine.model.config import CONFIG_FILE, ModelConfig, ModelError
from engine.model.files.hf_model import HFModel
from engine.model.files.safetensors_reader import STORED, SafetensorsFile
from engine.model.prepared.pieces import make_folder_once
from engine.model.prepared.shards import Shard, ShardIndex, Stamp, Stretch
from engine.model.prepared.weights import check_shape, prepared_weights


def refer(path: Path, parts: Sequence[Path], dtype: str, version: int, cache: Path) -> Path | None:
    """The folder of a directory whose files are `parts`, made if it is not there yet; None where a weight is stored in
    another type than `dtype`. Raises ModelError naming a missing or misshapen tensor, and OSError."""
    stamps = {str(part): Stamp.of(part.absolute()) for part in parts}
    key = msgspec.json.encode([list(stamps.values()), dtype, version])
    target = cache / hashlib.blake2b(key, digest_size=16, person=b"by reference").hexdigest()
    if _is_whole(target):
        return target
    source = HFModel(path)
    index = shard_index(source, dtype, stamps)
    if index is None:
        return None
    text = source.text()
    said = f"{_described(path, parts, source.shards)} {dtype} {version} by reference"
    config = msgspec.structs.replace(
        source.config,
        dtype=dtype,
        fingerprint=hashlib.blake2b(said.encode(), digest_size=16).hexdigest(),
    )

    def fill(folder: Path) -> None:
        index.save(folder)
        (folder / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
        text.save(folder)

    make_folder_once(target, _is_whole, fill)
    return target


def shard_index(source: HFModel, dtype: str, stamps: dict[str, Stamp]) -> ShardIndex | None:
    """Where every weight lies; None where one is stored in another type than `dtype`. Raises ModelError."""
    shapes: dict[str, tuple[int, ...]] = {}
    stretches: dict[str, list[Stretch]] = {}
    for key, weight, layer in prepared_weights(source):
        at_bytes, shapes[key] = 0, weight.shape(source.config)
        for piece in weight.sources:
            name = source.tensor_name(piece, layer)
            stored = source.stored(name)
            check_shape(source, name, stored.shape, weight, piece)
            if STORED.get(stored.dtype) != dtype:
                return None
            found = Stretch(key, at_bytes, stored.offset_bytes, stored.size_bytes)
            stretches.setdefault(str(stored.path), []).append(found)
            at_bytes += stored.size_bytes
    return ShardIndex(
        dtype,
        shapes,
        tuple(
            Shard(
                stamps[str(file.path)],
                tuple(sorted(stretches.get(str(file.path), ()), key=lambda one: one.offset_bytes)),
            )
            for file in source.shards
        ),
    )


def _described(path: Path, parts: Sequence[Path], shards: Sequence[SafetensorsFile]) -> str:
    """A digest of all but the weights, the same on every host: the directory's name, its small files, and the shards'
    names, sizes and headers."""
    headers = {file.path: file.header for file in shards}
    digest = xxhash.xxh3_128(path.resolve().name.encode())
    for part in parts:
        digest.update(f"\0{part.name}\0{part.stat().st_size}\0".encode())
        digest.update(headers[part] if part in headers else part.read_bytes())
    return str(digest.hexdigest())


def _is_whole(target: Path) -> bool:
    if not target.exists():
        return False
    try:
        ShardIndex.load(target)
        ModelConfig.load(target)
    except ModelError:
        return False
    return True

"""A prepared model's record of weights that it leaves where they are: which bytes of a Hugging Face directory make each
weight, and a description of the directory without them.

It takes a directory that holds every weight in the type that the engine computes in, and workers that copy them to a
device rather than map them. Of its files only headers and text are read. What the weights are, the first worker that
loads them says (`engine.model.prepared.shards`).
"""

from collections.abc import Sequence
from pathlib import Path

import xxhash

from engine.model.files.checkpoint import STORED
from engine.model.files.hf_model import HFModel
from engine.model.prepared.shards import Shard, ShardIndex, Stamp, Stretch
from engine.model.prepared.weights import check_shape, pieces_of, prepared_weights


def shard_index(source: HFModel, dtype: str, stamps: dict[Path, Stamp]) -> ShardIndex | None:
    """Return where every weight lies; None where one is stored in another type than `dtype`, in codes,
    or transposed. Raises ModelError naming a missing or misshapen tensor."""
    if source.is_quantized:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    stretches: dict[Path, list[Stretch]] = {file.path: [] for file in source.shards}
    for key, weight, layer in prepared_weights(source):
        at_bytes, shapes[key] = 0, weight.shape(source.config)
        if any(piece.of_all for piece in weight.sources):
            return None
        for piece, expert in pieces_of(source, weight):
            name = source.tensor_name(piece, layer, expert)
            stored = source.stored(name)
            check_shape(source, name, stored.shape, weight, piece)
            if STORED.get(stored.dtype) != dtype:
                return None
            stretches[stored.path].append(Stretch(key, at_bytes, stored.offset_bytes, stored.size_bytes))
            at_bytes += stored.size_bytes
    source.check_all_read()
    shards = [
        Shard(stamps[path], tuple(sorted(found, key=lambda one: one.offset_bytes)))
        for path, found in stretches.items()
    ]
    return ShardIndex(dtype, shapes, tuple(shards))


def described(source: HFModel, parts: Sequence[Path]) -> str:
    """Return a digest of all but the weights, the same on every host: the directory's name, its small files, and the
    shards' names, sizes and headers."""
    headers = {file.path: file.header for file in source.shards}
    digest = xxhash.xxh3_128(source.path.resolve().name.encode())
    for part in parts:
        digest.update(f"\0{part.name}\0{part.stat().st_size}\0".encode())
        digest.update(headers[part] if part in headers else part.read_bytes())
    return str(digest.hexdigest())

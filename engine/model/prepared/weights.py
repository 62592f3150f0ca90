"""The prepared weights: one file laid out for mapping, and an index of what lies where.

Every tensor starts on a page and is stored as the engine multiplies it (q, k and v in one matrix, gate and up in
another), so a worker maps the file and copies nothing; all workers of a host share its pages.
"""

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from engine.model.codes import Codes, stack
from engine.model.config import ModelConfig, ModelError, Progress
from engine.model.families import Source, Weight, layer_key
from engine.model.files.checkpoint import Checkpoint, as_dtype, halves_from_pairs
from engine.model.prepared.pieces import ALIGN_BYTES, Index, load_index

WEIGHTS_FILE = "weights.bin"
INDEX_FILE = "weights.json"

SLAB_VALUES = 1 << 20
"""What is rounded at once: rounding takes a few times its memory."""


class Entry(msgspec.Struct, frozen=True):
    offset_bytes: int
    shape: tuple[int, ...]


class WeightIndex(Index, frozen=True):
    dtype: str
    tensors: dict[str, Entry]

    @staticmethod
    def load(model_dir: Path) -> "WeightIndex":
        """Read the index and hold the weights file against it. Raises ModelError."""
        return load_index(model_dir / WEIGHTS_FILE, WeightIndex)


def write_weights(
    source: Checkpoint, dtype: str, folder: Path, progress: Progress | None = None
) -> None:
    """Convert every weight of `source` into `folder`. `progress` hears of the bytes written so far, and of all. Raises
    ModelError naming a missing or misshapen tensor."""
    config, tensors, offset = source.config, dict[str, Entry](), 0
    weights = prepared_weights(source)
    width = 4 if dtype == "float32" else 2
    size = sum(prod(weight.shape(config)) * width for _, weight, _ in weights)
    with (folder / WEIGHTS_FILE).open("wb") as file:
        for key, weight, layer in weights:
            if progress is not None:
                progress(offset, size)
            offset += file.write(b"\0" * (-offset % ALIGN_BYTES))
            tensors[key] = Entry(offset, weight.shape(config))
            for piece in weight.sources:
                name = source.tensor_name(piece, layer)
                values = source.read(name)
                check_shape(source, name, values.shape, weight, piece)
                if source.rope_pairs and piece.rope_heads:
                    values = halves_from_pairs(values, int(getattr(config, piece.rope_heads)))
                # By slabs of rows, so that no more than the one tensor is held in 32 bits.
                for first in range(0, len(values), slab := slab_rows(values.shape)):
                    rounded = as_dtype(values[first : first + slab], dtype, source.path, name)
                    offset += file.write(np.ascontiguousarray(rounded).data)
        # A rename may reach the disk before the bytes do; zeros for weights would go unnoticed ever after.
        file.flush()
        os.fsync(file.fileno())
    if progress is not None:
        progress(size, size)
    index = WeightIndex(offset, dtype, tensors)
    (folder / INDEX_FILE).write_bytes(msgspec.json.encode(index))


def check_shape(
    source: Checkpoint, name: str, shape: tuple[int, ...], weight: Weight, piece: Source
) -> None:
    """Raises ModelError for a tensor of another shape than its part of a prepared weight has."""
    wanted = (int(getattr(source.config, piece.rows)), *weight.shape(source.config)[1:])
    if shape != wanted:
        raise ModelError(source.path, f"tensor {name} has shape {shape}, expected {wanted}")


def slab_rows(shape: tuple[int, ...]) -> int:
    """How many rows are rounded at once."""
    return max(1, SLAB_VALUES // max(1, prod(shape[1:])))


def prepared_codes(source: Checkpoint) -> Iterator[tuple[str, Codes]]:
    """The codes of those weights whose sources all have them, of the same bits: what widens to the very bits that
    `write_weights` writes in 32 bits, and has checked."""
    for key, weight, layer in prepared_weights(source):
        found = [_codes(source, piece, layer) for piece in weight.sources]
        parts = [part for part in found if part is not None]
        if len(parts) == len(found) and (whole := stack(parts)) is not None:
            yield key, whole


def _codes(source: Checkpoint, piece: Source, layer: int) -> Codes | None:
    codes = source.codes(source.tensor_name(piece, layer))
    if codes is None or not (source.rope_pairs and piece.rope_heads):
        return codes
    heads = int(getattr(source.config, piece.rope_heads))
    return Codes(
        halves_from_pairs(codes.codes, heads),
        halves_from_pairs(codes.scales, heads),
        None if codes.offsets is None else halves_from_pairs(codes.offsets, heads),
        codes.bits,
    )


def prepared_weights(source: Checkpoint) -> list[tuple[str, Weight, int]]:
    """What a prepared model has of this one: the name in its index, what it is, of which layer."""
    config: ModelConfig = source.config
    found = [(weight.name, weight, 0) for weight in source.family.weights if weight.present(config)]
    for layer in range(config.layers):
        found += [
            (layer_key(layer, weight.name), weight, layer)
            for weight in source.family.layer_weights
            if weight.present(config)
        ]
    return found

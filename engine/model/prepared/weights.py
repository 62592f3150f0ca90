"""The prepared weights: every weight as the engine multiplies it (q, k and v in one matrix, gate and up in another), a
piece of one file. A worker maps it and copies nothing; all workers of a host share its pages.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from engine.model.codes import Codes, stack
from engine.model.config import ModelError, Progress
from engine.model.families import Source, Weight, layer_key
from engine.model.files.checkpoint import Checkpoint, as_dtype, halves_from_pairs
from engine.model.prepared.pieces import Made, write_pieces

WEIGHTS_FILE = "weights.bin"

SLAB_VALUES = 1 << 20
"""The number of values that are rounded at once: rounding takes a few times their memory."""


def write_weights(source: Checkpoint, dtype: str, folder: Path, progress: Progress | None = None) -> None:
    """Convert every weight of `source` into `folder`. `progress` hears of the bytes of weights done so far, and of all.
    Raises ModelError naming a missing or misshapen tensor."""
    weights = [(key, weight, layer, weight.shape(source.config)) for key, weight, layer in prepared_weights(source)]
    width = 4 if dtype == "float32" else 2
    size = sum(prod(shape) * width for *_, shape in weights)

    def pieces() -> Iterator[Made]:
        done = 0
        for key, weight, layer, shape in weights:
            if progress is not None:
                progress(done, size)
            yield Made(key, shape, dtype.encode(), _slabs(source, weight, layer, dtype))
            done += prod(shape) * width

    write_pieces(folder / WEIGHTS_FILE, pieces())
    if progress is not None:
        progress(size, size)


def _slabs(source: Checkpoint, weight: Weight, layer: int, dtype: str) -> Iterator[memoryview]:
    """Yield a weight's bytes by slabs of rows, so that no more than one tensor is held in 32 bits."""
    for piece in weight.sources:
        name = source.tensor_name(piece, layer)
        values = source.read(name)
        check_shape(source, name, values.shape, weight, piece)
        if source.rope_pairs and piece.rope_heads:
            values = halves_from_pairs(values, int(getattr(source.config, piece.rope_heads)))
        if source.folds_norms and piece.is_norm and source.config.norm_offset:
            # As Hugging Face has it: a weight near one would lose bits in the type of 16.
            values = values - np.float32(source.config.norm_offset)
        rows = max(1, SLAB_VALUES // max(1, prod(values.shape[1:])))
        for first in range(0, len(values), rows):
            yield np.ascontiguousarray(as_dtype(values[first : first + rows], dtype, source.path, name)).data


def check_shape(source: Checkpoint, name: str, shape: tuple[int, ...], weight: Weight, piece: Source) -> None:
    """Raise ModelError for a tensor of another shape than its part of a prepared weight has."""
    wanted = (int(getattr(source.config, piece.rows)), *weight.shape(source.config)[1:])
    if shape != wanted:
        raise ModelError(source.path, f"tensor {name} has shape {shape}, expected {wanted}")


def prepared_codes(source: Checkpoint) -> Iterator[tuple[str, Codes]]:
    """Yield the codes of those weights whose sources all have them, of the same bits: what widens to the very bits that
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
    offsets = None if codes.offsets is None else halves_from_pairs(codes.offsets, heads)
    return Codes(halves_from_pairs(codes.codes, heads), halves_from_pairs(codes.scales, heads), offsets, codes.bits)


def prepared_weights(source: Checkpoint) -> list[tuple[str, Weight, int]]:
    """List what a prepared model has of this one: the name in its index, what it is, of which layer."""
    family, config = source.family, source.config
    once = [(weight.name, weight, 0) for weight in family.weights if weight.present(config)]
    of_layers = [weight for weight in family.layer_weights if weight.present(config)]
    return once + [(layer_key(n, weight.name), weight, n) for n in range(config.layers) for weight in of_layers]

"""The prepared weights: every weight as the engine multiplies it (q, k and v in one matrix, gate and up in another), a
piece of one file. A worker maps it and copies nothing; all workers of a host share its pages.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from engine.model.codes import Codes, FloatArray, stack
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
    """Yield a weight's bytes by slabs of rows, so that no more than one tensor is held in 32 bits, and of codes no
    more than a slab."""
    for piece, expert in pieces_of(source, weight):
        name = source.tensor_name(piece, layer, expert)
        for values in _rows_of(source, weight, piece, layer, expert):
            yield np.ascontiguousarray(as_dtype(values, dtype, source.path, name)).data


def _rows_of(source: Checkpoint, weight: Weight, piece: Source, layer: int, expert: int) -> Iterator[FloatArray]:
    """Yield a tensor's values by slabs of rows. What it holds goes with it, before another tensor is read."""
    name = source.tensor_name(piece, layer, expert)
    if (codes := _codes(source, weight, piece, layer, expert)) is not None:
        check_shape(source, name, codes.codes.shape, weight, piece)
        rows = max(1, SLAB_VALUES // codes.codes.shape[1])
        yield from (codes.rows(at, at + rows).widen() for at in range(0, len(codes.codes), rows))
        return
    values = source.read_expert(piece, layer, expert) if weight.each_expert else source.read(name)
    check_shape(source, name, values.shape, weight, piece)
    if source.rope_pairs and piece.rope_heads:
        values = halves_from_pairs(values, int(getattr(source.config, piece.rope_heads)))
    if source.folds_norms and piece.is_norm and source.config.norm_offset:
        # As Hugging Face has it: a weight near one would lose bits in the type of 16.
        values = values - np.float32(source.config.norm_offset)
    rows = max(1, SLAB_VALUES // max(1, prod(values.shape[1:])))
    yield from (values[at : at + rows] for at in range(0, len(values), rows))


def pieces_of(source: Checkpoint, weight: Weight) -> list[tuple[Source, int]]:
    """List what a weight is made of, in its order: its sources, of each expert where there is one for each."""
    experts = source.config.expert_count if weight.each_expert else 1
    return [(piece, expert) for expert in range(experts) for piece in weight.sources]


def check_shape(source: Checkpoint, name: str, shape: tuple[int, ...], weight: Weight, piece: Source) -> None:
    """Raise ModelError for a tensor of another shape than its part of a prepared weight has."""
    wanted = (int(getattr(source.config, piece.rows)), *weight.columns_of(source.config))
    if shape != wanted:
        raise ModelError(source.path, f"tensor {name} has shape {shape}, expected {wanted}")


def prepared_codes(source: Checkpoint) -> Iterator[tuple[str, Codes]]:
    """Yield the codes of those weights whose sources all have them: what widens to the very bits that
    `write_weights` writes in 32 bits, and has checked."""
    for key, weight, layer in prepared_weights(source):
        found = [_codes(source, weight, piece, layer, expert) for piece, expert in pieces_of(source, weight)]
        parts = [part for part in found if part is not None]
        if len(parts) == len(found) and (whole := stack(parts)) is not None:
            yield key, whole


def _codes(source: Checkpoint, weight: Weight, piece: Source, layer: int, expert: int) -> Codes | None:
    if weight.each_expert:
        return source.expert_codes(piece, layer, expert)
    codes = source.codes(source.tensor_name(piece, layer))
    if codes is None or not (source.rope_pairs and piece.rope_heads):
        return codes
    heads = int(getattr(source.config, piece.rope_heads))
    offsets = None if codes.offsets is None else halves_from_pairs(codes.offsets, heads)
    return Codes(halves_from_pairs(codes.codes, heads), halves_from_pairs(codes.scales, heads), offsets, codes.form)


def prepared_weights(source: Checkpoint) -> list[tuple[str, Weight, int]]:
    """List what a prepared model has of this one: the name in its index, what it is, of which layer."""
    family, config = source.family, source.config
    once = [(weight.name, weight, 0) for weight in family.weights if weight.present(config)]
    return once + [
        (layer_key(layer, weight.name), weight, layer)
        for layer in range(config.layers)
        for weight in family.layer_weights
        if weight.present(config, layer)
    ]

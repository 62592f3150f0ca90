"""The prepared weights: every weight as the engine multiplies it (q, k and v in one matrix, gate and up in another).

    weights.bin   what is stored as numbers: each weight in the type that its file has, or in the 16 bits asked for
    codes.bin     what is stored as codes, as codes (`engine.model.prepared.codes_file`)

Nothing is kept twice, and nothing is widened but what has no smaller form. Files are read by slabs of rows, so that no
tensor is held whole. A worker maps the files and copies nothing; all workers of a host share their pages.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import cast

import numpy as np

from engine.model.codes import Codes, FloatArray, Form, common_form, recoded
from engine.model.config import ModelError, Progress
from engine.model.families import Source, Weight, layer_key
from engine.model.files.checkpoint import Checkpoint, as_dtype, halves_from_pairs
from engine.model.files.stored import FORMS, StoredRows
from engine.model.prepared.codes_file import CodedMatrix, write_codes
from engine.model.prepared.pieces import Made, write_pieces

WEIGHTS_FILE = "weights.bin"

SLAB_VALUES = 1 << 20
"""The number of values that are unpacked or rounded at once: that takes a few times their memory."""

WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


def write_weights(source: Checkpoint, dtype: str, folder: Path, progress: Progress | None = None) -> None:
    """Convert every weight of `source` into `folder`. `progress` hears of values done so far, and of all, in bytes of
    `dtype`. Raises ModelError naming a missing or misshapen tensor, one that is no number or that nothing reads."""
    weights = [
        (key, weight, layer, stored_kind(source, weight, layer, dtype))
        for key, weight, layer in prepared_weights(source)
    ]
    source.check_all_read()
    width = WIDTHS[dtype]
    size, done = sum(prod(weight.shape(source.config)) * width for _, weight, *_ in weights), 0

    def tell(weight: Weight | None) -> None:
        nonlocal done
        if progress is not None:
            progress(done, size)
        if weight is not None:
            done += prod(weight.shape(source.config)) * width

    def coded() -> Iterator[CodedMatrix]:
        for key, weight, layer, kind in weights:
            if kind in FORMS:
                tell(weight)
                *counts, rows, columns = weight.shape(source.config)
                yield CodedMatrix(key, (prod(counts) * rows, columns), kind, _codes(source, weight, layer, kind, dtype))

    def plain() -> Iterator[Made]:
        for key, weight, layer, kind in weights:
            if kind not in FORMS:
                tell(weight)
                yield Made(key, weight.shape(source.config), kind.encode(), _slabs(source, weight, layer, kind))

    write_codes(folder, coded())
    write_pieces(folder / WEIGHTS_FILE, plain())
    tell(None)


def stored_kind(source: Checkpoint, weight: Weight, layer: int, dtype: str) -> str:
    """Return what a weight is kept as in a model in `dtype`: the form of its codes, or the type of its numbers. Reads
    headers and scales alone. Raises ModelError naming a missing or misshapen tensor."""
    kinds = {rows.kind for *_, rows in _pieces(source, weight, layer)}
    if weight.columns and kinds <= set(FORMS) and (form := common_form(kinds)) is not None:
        return form
    if dtype != "float32":
        return dtype
    return kinds.pop() if len(kinds) == 1 and kinds <= set(WIDTHS) else "float32"


def _slabs(source: Checkpoint, weight: Weight, layer: int, dtype: str) -> Iterator[memoryview]:
    """Yield a weight's bytes by slabs of rows."""
    for name, unit, rows in _pieces(source, weight, layer):
        for first, end in _cuts(rows.shape, unit):
            yield np.ascontiguousarray(as_dtype(rows.values(first, end), dtype, source.file_of(name), name)).data


def _codes(source: Checkpoint, weight: Weight, layer: int, form: str, dtype: str) -> Iterator[Codes]:
    """Yield a weight's codes by slabs of rows; values that do not fit `dtype` are refused here as others are."""
    for name, unit, rows in _pieces(source, weight, layer):
        for first, end in _cuts(rows.shape, unit):
            codes = recoded(rows.codes(first, end), cast(Form, form))
            if dtype == "float16":
                as_dtype(codes.widen(), dtype, source.file_of(name), name)
            yield codes


def _cuts(shape: tuple[int, ...], unit: int) -> Iterator[tuple[int, int]]:
    rows = max(1, SLAB_VALUES // max(1, prod(shape[1:])) // unit) * unit
    yield from ((at, min(at + rows, shape[0])) for at in range(0, shape[0], rows))


def _pieces(source: Checkpoint, weight: Weight, layer: int) -> Iterator[tuple[str, int, StoredRows]]:
    """Yield the tensors of a weight: name, the rows that must be read together, and the rows as the engine has them."""
    for piece, expert in pieces_of(source, weight):
        name = source.tensor_name(piece, layer, expert)
        rows = source.find(piece, layer, expert if weight.each_expert else None)
        check_shape(source, name, rows.shape, weight, piece)
        unit = 1
        if source.rope_pairs and piece.rope_heads:
            unit = rows.shape[0] // int(getattr(source.config, piece.rope_heads))
            rows = _in_halves(rows, unit)
        if source.folds_norms and piece.is_norm and source.config.norm_offset:
            rows = _unfolded(rows, source.config.norm_offset)
        yield name, unit, rows


def _in_halves(rows: StoredRows, head: int) -> StoredRows:
    """Return rows that are stored as rotary pairs in heads of `head` rows, read by whole heads, as two halves."""

    def read(first: int, end: int) -> FloatArray | Codes:
        found, heads = rows.read(first, end), (end - first) // head
        if not isinstance(found, Codes):
            return halves_from_pairs(found, heads)
        offsets = None if found.offsets is None else halves_from_pairs(found.offsets, heads)
        codes, scales = halves_from_pairs(found.codes, heads), halves_from_pairs(found.scales, heads)
        return Codes(codes, scales, offsets, found.form)

    return StoredRows(rows.shape, rows.kind, read)


def _unfolded(rows: StoredRows, offset: float) -> StoredRows:
    """Return a norm's weight as Hugging Face has it: one near one would lose bits in the type of 16."""
    return StoredRows(rows.shape, "float32", lambda first, end: rows.values(first, end) - np.float32(offset))


def pieces_of(source: Checkpoint, weight: Weight) -> list[tuple[Source, int]]:
    """List what a weight is made of, in its order: its sources, of each expert where there is one for each."""
    experts = source.config.expert_count if weight.each_expert else 1
    return [(piece, expert) for expert in range(experts) for piece in weight.sources]


def check_shape(source: Checkpoint, name: str, shape: tuple[int, ...], weight: Weight, piece: Source) -> None:
    """Raise ModelError for a tensor of another shape than its part of a prepared weight has."""
    wanted = (int(getattr(source.config, piece.rows)), *weight.columns_of(source.config))
    if shape != wanted:
        raise ModelError(source.file_of(name), f"tensor {name} has shape {shape}, expected {wanted}")


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

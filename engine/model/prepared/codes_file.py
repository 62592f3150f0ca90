"""The files in which a prepared folder keeps the codes of quantized weights, by the names that the weights have in it.

    codes.bin, codes.json     per matrix `<name>.codes`, `<name>.scales` and perhaps `<name>.offsets`

The form of the codes (`engine.model.codes.Form`) is that of the first piece. They lie row by row as a GPU multiplies
them (`kernels.coded_weight`): two 4-bit codes share a byte, those of columns j (low half) and j + 16 of a group of 32.
The rows of experts lie below each other.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from engine.model.codes import GROUP, Codes, FloatArray
from engine.model.config import ModelError
from engine.model.files.stored import FORMS
from engine.model.prepared.pieces import Made, PieceIndex, load_index, map_pieces, write_pieces
from kernels.coded_weight import CodedWeight
from kernels.panels import Kind

CODES_FILE = "codes.bin"


class CodedMatrix(NamedTuple):
    """A matrix of `shape` to write, the rows of experts below each other: its rows in parts, of which one at a time is
    asked for and held."""

    name: str
    shape: tuple[int, int]
    form: str
    parts: Iterable[Codes]


def write_codes(folder: Path, matrices: Iterable[CodedMatrix]) -> None:
    """Store codes in `folder`, which gets no file where there are none."""
    path = folder / CODES_FILE
    if not write_pieces(path, _pieces(matrices)).pieces:
        path.unlink()
        path.with_suffix(".json").unlink()


def _pieces(matrices: Iterable[CodedMatrix]) -> Iterator[Made]:
    for name, (rows, columns), form, parts in matrices:
        scales, offsets = list[FloatArray](), list[FloatArray]()
        width = columns // 2 if form == "q4" else columns
        yield Made(f"{name}.codes", (rows, width), form.encode(), _codes(parts, scales, offsets))
        yield _factors(f"{name}.scales", rows, scales)
        if offsets:
            yield _factors(f"{name}.offsets", rows, offsets)


def _codes(parts: Iterable[Codes], scales: list[FloatArray], offsets: list[FloatArray]) -> Iterator[memoryview]:
    """Yield the bytes of codes; what they are multiplied with, and less of it, is kept for the pieces behind them."""
    for part in parts:
        scales.append(part.scales)
        if part.offsets is not None:
            offsets.append(part.offsets)
        codes = part.codes
        if part.form == "q4":
            pairs = codes.reshape(*part.scales.shape, 2, GROUP // 2)
            codes = pairs[..., 0, :] | pairs[..., 1, :] << 4
        yield np.ascontiguousarray(codes).view(np.uint8).data


def _factors(name: str, rows: int, parts: list[FloatArray]) -> Made:
    columns = sum(part.size for part in parts) // rows
    return Made(name, (rows, columns), b"float32", [np.ascontiguousarray(part).data for part in parts])


def coded_weights(pieces: Mapping[str, Tensor], forms: Mapping[str, str]) -> dict[str, CodedWeight]:
    """Put the matrices together from their pieces, on whatever device: bytes of codes, and factors. Raises ValueError
    where they do not fit together."""
    found = {}
    for name, form in forms.items():
        codes, offsets = pieces[f"{name}.codes"], pieces.get(f"{name}.offsets")
        codes = codes if form in ("q4", "f8") else codes.view(torch.int8)
        found[name] = CodedWeight(cast(Kind, form), codes, pieces[f"{name}.scales"], offsets)
    return found


def coded_forms(index: PieceIndex, path: Path) -> dict[str, str]:
    """Return the form of each matrix of a file. Raises ModelError."""
    found = {
        name.removesuffix(".codes"): piece.form.decode(errors="replace")
        for name, piece in index.pieces.items()
        if name.endswith(".codes")
    }
    for name, form in found.items():
        if form not in FORMS:
            raise ModelError(path, f"{name}: there are no codes of form {form!r}")
    return found


def map_codes(folder: Path) -> dict[str, CodedWeight]:
    """Map the codes of a prepared folder by name; none where it has no such file. Raises ModelError."""
    if not (path := folder / CODES_FILE).exists():
        return {}
    pieces = {}
    for name, piece in map_pieces(path).items():
        dtype = torch.float32 if piece.form == b"float32" else torch.uint8
        try:
            pieces[name] = torch.frombuffer(piece.raw, dtype=dtype).view(piece.shape)
        except (RuntimeError, ValueError) as error:
            raise ModelError(path, f"{name}: {len(piece.raw)} bytes are no {piece.shape}: {error}") from error
    return coded_weights(pieces, coded_forms(load_index(path), path))

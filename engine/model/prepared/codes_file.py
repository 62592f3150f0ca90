"""The files in which a prepared folder keeps the codes of quantized weights, by the names that the weights have in it.

    codes.bin, codes.json     per matrix `<name>.codes`, `<name>.scales` and perhaps `<name>.offsets`

The form of the codes (`engine.model.codes.Form`) is that of the first piece. Two 4-bit codes share a byte: those of
columns j (low half) and j + 16 of a group of 32.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast, get_args

import numpy as np
from numpy.typing import NDArray

from engine.model.codes import GROUP, WITH_OFFSETS, Codes, FloatArray, Form, nibbles
from engine.model.config import ModelError
from engine.model.prepared.pieces import Made, map_pieces, write_pieces

CODES_FILE = "codes.bin"

_FORMS = get_args(Form)


def write_codes(folder: Path, matrices: Iterable[tuple[str, Codes]]) -> None:
    """Store codes in `folder`, which gets no file where there are none."""
    path = folder / CODES_FILE
    if not write_pieces(path, _pieces(matrices)).pieces:
        path.unlink()
        path.with_suffix(".json").unlink()


def _pieces(matrices: Iterable[tuple[str, Codes]]) -> Iterator[Made]:
    for name, matrix in matrices:
        codes = matrix.codes
        if matrix.form == "q4":
            pairs = codes.reshape(*matrix.scales.shape, 2, GROUP // 2)
            codes = pairs[..., 0, :] | pairs[..., 1, :] << 4
        yield _made(f"{name}.codes", codes.reshape(len(codes), -1).view(np.uint8), matrix.form)
        yield _made(f"{name}.scales", matrix.scales, "float32")
        if matrix.offsets is not None:
            yield _made(f"{name}.offsets", matrix.offsets, "float32")


def _made(name: str, values: NDArray[np.generic], form: str) -> Made:
    whole = np.ascontiguousarray(values)
    return Made(name, whole.shape, form.encode(), [whole.data])


class CodesFile:
    """The codes of a prepared folder, mapped; none where it has no such file. Raises ModelError if it was cut short."""

    def __init__(self, folder: Path) -> None:
        path = self._path = folder / CODES_FILE
        self._pieces = map_pieces(path) if path.exists() else {}

    def get(self, name: str) -> Codes | None:
        """Return a matrix by name, or None; 4-bit codes are unpacked into memory of their own. Raises ModelError."""
        if f"{name}.codes" not in self._pieces:
            return None
        shape, said, raw = self._pieces[f"{name}.codes"]
        if (form := said.decode()) not in _FORMS:
            raise ModelError(self._path, f"{name}: there are no codes of form {form!r}")
        codes: NDArray[np.uint8 | np.int8] = np.frombuffer(raw, np.uint8).reshape(shape)
        scales = self._floats(f"{name}.scales")
        offsets = self._floats(f"{name}.offsets") if form in WITH_OFFSETS else None
        if form == "q4":
            codes = nibbles(codes.view(np.uint8).reshape(*scales.shape, GROUP // 2)).reshape(len(codes), -1)
        elif form != "f8":
            codes = codes.view(np.int8)
        return Codes(codes, scales, offsets, cast(Form, form))

    def _floats(self, name: str) -> FloatArray:
        shape, _, raw = self._pieces[name]
        return np.frombuffer(raw, np.float32).reshape(shape)

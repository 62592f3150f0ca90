"""The files in which a prepared folder keeps the codes of quantized weights, by the names that the weights have in it.

    codes.bin, codes.json     per matrix `<name>.codes`, `<name>.scales` and, with 4 bits, `<name>.offsets`

Two 4-bit codes share a byte: those of columns j (low half) and j + 16 of a group of 32.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.model.codes import GROUP, Codes, nibbles
from engine.model.prepared.pieces import Made, map_pieces, write_pieces

CODES_FILE = "codes.bin"


def write_codes(folder: Path, matrices: Iterable[tuple[str, Codes]]) -> None:
    """Store codes in `folder`, which gets no file where there are none."""
    path = folder / CODES_FILE
    if not write_pieces(path, _pieces(matrices)).pieces:
        path.unlink()
        path.with_suffix(".json").unlink()


def _pieces(matrices: Iterable[tuple[str, Codes]]) -> Iterator[Made]:
    for name, matrix in matrices:
        codes = matrix.codes
        if matrix.bits == 4:
            pairs = codes.reshape(*matrix.scales.shape, 2, GROUP // 2)
            codes = pairs[..., 0, :] | pairs[..., 1, :] << 4
        yield _made(f"{name}.codes", codes.reshape(len(codes), -1))
        yield _made(f"{name}.scales", matrix.scales)
        if matrix.offsets is not None:
            yield _made(f"{name}.offsets", matrix.offsets)


def _made(name: str, values: NDArray[np.generic]) -> Made:
    whole = np.ascontiguousarray(values)
    return Made(name, whole.shape, whole.dtype.name.encode(), [whole.data])


class CodesFile:
    """The codes of a prepared folder, mapped; none where it has no such file. Raises ModelError if it was cut short."""

    def __init__(self, folder: Path) -> None:
        path = folder / CODES_FILE
        self._pieces = map_pieces(path) if path.exists() else {}

    def get(self, name: str) -> Codes | None:
        """Return a matrix by name, or None; 4-bit codes are unpacked into memory of their own."""
        if f"{name}.codes" not in self._pieces:
            return None
        codes, scales = self._array(f"{name}.codes"), self._array(f"{name}.scales").view(np.float32)
        if codes.dtype == np.int8:
            return Codes(codes.view(np.int8), scales, None, 8)
        pairs = codes.view(np.uint8).reshape(*scales.shape, GROUP // 2)
        offsets = self._array(f"{name}.offsets").view(np.float32)
        return Codes(nibbles(pairs).reshape(len(codes), -1), scales, offsets, 4)

    def _array(self, name: str) -> NDArray[np.generic]:
        shape, form, raw = self._pieces[name]
        return np.frombuffer(raw, form.decode()).reshape(shape)

"""Matrices of 8- and 4-bit floats with scales, as others store them, as `Codes` or widened, each value rounded once.

- FP8 (E4M3) times a scale of the tensor, of a row, or of a block of rows and columns. The bytes stay as they are.
- MXFP4: E2M1 times a power of two per 32 columns (OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1). Twice an
  E2M1 value is a whole number of -12 to 12, so these are signed bytes with half the scale.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.model.codes import E4M3, GROUP, Codes, FloatArray, nibbles
from engine.model.files.stored import StoredRows

Bytes = NDArray[np.uint8]

TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclass(frozen=True, slots=True, eq=False)
class Floats8:
    """`codes` `[rows, columns]`, and a scale for each block of `block` rows and columns, the last ones perhaps cut."""

    codes: Bytes
    scales: FloatArray
    block: tuple[int, int]

    def stored(self, check: Callable[[Bytes], None]) -> StoredRows:
        """Return the same in scales per row and 32 columns, or as values where a block does not fill these. `check`
        sees the codes that are read."""
        columns = self.codes.shape[1]
        fills = not columns % GROUP and (not self.block[1] % GROUP or self.scales.shape[1] == 1)
        groups = columns // GROUP
        each = groups if self.scales.shape[1] == 1 else self.block[1] // GROUP

        def codes(first: int, end: int) -> Codes:
            check(self.codes[first:end])
            by_row = self.scales[np.arange(first, end) // self.block[0]]
            by_group = np.ascontiguousarray(np.repeat(by_row, each, axis=1)[:, :groups])
            return Codes(self.codes[first:end], by_group, None, "f8")

        def values(first: int, end: int) -> FloatArray:
            check(self.codes[first:end])
            by_row = self.scales[np.arange(first, end) // self.block[0]]
            return E4M3[self.codes[first:end]] * by_row[:, np.arange(columns) // self.block[1]]

        shape = self.codes.shape
        return StoredRows(shape, "f8", codes) if fills else StoredRows(shape, "float32", values)


def stored_mxfp4(packed: Bytes, scales: Bytes, check: Callable[[Bytes], None]) -> StoredRows:
    """Return the rows of MXFP4, see `mxfp4`. `check` sees the scales that are read."""

    def read(first: int, end: int) -> Codes:
        check(scales[first:end])
        return mxfp4(packed[first:end], scales[first:end])

    return StoredRows((len(packed), 2 * packed.shape[1]), "q8", read)


def mxfp4(packed: Bytes, scales: Bytes) -> Codes:
    """Return the codes of MXFP4: `packed` `[rows, columns / 2]`, the even column in the low half of a byte, and biased
    exponents `scales` `[rows, columns / 32]`, of which 255 is no number."""
    pairs = nibbles(packed[..., None])[..., 0]
    return Codes(TWICE_E2M1[pairs.reshape(len(packed), -1)], half_powers(scales), None, "q8")


def half_powers(exponents: Bytes) -> FloatArray:
    """Return half the powers of two that biased exponents stand for; 255 is no number."""
    powers = np.ldexp(np.float32(0.5), exponents.astype(np.int32) - 127).astype(np.float32)
    powers[exponents == 255] = np.nan
    return powers

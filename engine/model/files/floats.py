"""Matrices of 8- and 4-bit floats with scales, as others store them, as `Codes` or widened, each value rounded once.

- FP8 (E4M3) times a scale of the tensor, of a row, or of a block of rows and columns. The bytes stay as they are.
- MXFP4: E2M1 times a power of two per 32 columns (OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1). Twice an
  E2M1 value is a whole number of -12 to 12, so these are signed bytes with half the scale.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.model.codes import E4M3, GROUP, Codes, FloatArray, nibbles

Bytes = NDArray[np.uint8]

TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclass(frozen=True, slots=True, eq=False)
class Floats8:
    """`codes` `[rows, columns]`, and a scale for each block of `block` rows and columns, the last ones perhaps cut."""

    codes: Bytes
    scales: FloatArray
    block: tuple[int, int]

    def as_codes(self) -> Codes | None:
        """Return the same in scales per row and 32 columns; None where a block does not fill these."""
        rows, columns = self.codes.shape
        if columns % GROUP or (self.block[1] % GROUP and self.scales.shape[1] > 1):
            return None
        by_row = np.repeat(self.scales, self.block[0], axis=0)[:rows]
        groups = columns // GROUP
        each = groups if self.scales.shape[1] == 1 else self.block[1] // GROUP
        return Codes(self.codes, np.ascontiguousarray(np.repeat(by_row, each, axis=1)[:, :groups]), None, "f8")

    def rows(self, first: int, end: int) -> FloatArray:
        """Return the values of some rows."""
        by_row = self.scales[np.arange(first, end) // self.block[0]]
        by_column = by_row[:, np.arange(self.codes.shape[1]) // self.block[1]]
        return E4M3[self.codes[first:end]] * by_column


def mxfp4(packed: Bytes, scales: Bytes) -> Codes:
    """Return the codes of MXFP4: `packed` `[rows, columns / 2]`, the even column in the low half of a byte, and biased
    exponents `scales` `[rows, columns / 32]`, of which 255 is no number."""
    pairs = nibbles(packed[..., None])[..., 0]
    codes = TWICE_E2M1[pairs.reshape(len(packed), -1)]
    return Codes(codes, np.ldexp(np.float32(0.5), scales.astype(np.int32) - 127).astype(np.float32), None, "q8")

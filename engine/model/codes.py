"""Quantized weights as their file has them: a code of 4 or 8 bits a value, and a scale per row and 32 columns.

`scale * code` is exact in 32 bits in every format taken here, so a value is rounded once at most, however it is
computed: a fused multiply-add gives the bits of a product and a sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

GROUP = 32


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A matrix `[rows, columns]`, `columns` a multiple of 32: `scale * code`, and `+ offset` where `bits` is 4.

    `codes` holds one a byte: uint8 of 0 to 15 (4 bits) or int8 (8 bits). `scales` and `offsets` are
    `[rows, columns / 32]`; `offsets` is there with 4 bits, and only then.
    """

    codes: NDArray[np.uint8 | np.int8]
    scales: FloatArray
    offsets: FloatArray | None
    bits: int

    def widen(self) -> FloatArray:
        """Return the values, `[rows, columns]`."""
        values = self.codes.astype(np.float32).reshape(*self.scales.shape, GROUP)
        values *= self.scales[..., None]
        if self.offsets is not None:
            values += self.offsets[..., None]
        return values.reshape(self.codes.shape)


def stack(parts: Sequence[Codes]) -> Codes | None:
    """Return the rows of all parts under each other; None where they differ in bits."""
    if len(parts) == 1:
        return parts[0]
    if len({part.bits for part in parts}) != 1:
        return None
    codes = np.concatenate([part.codes for part in parts])
    scales = np.concatenate([part.scales for part in parts])
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return Codes(codes, scales, np.concatenate(offsets) if offsets else None, parts[0].bits)


def nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Split bytes `[.., n]` to `[.., 2, n]`: their low halves, then their high ones."""
    found = np.empty((*raw.shape[:-1], 2, raw.shape[-1]), np.uint8)
    np.bitwise_and(raw, 0x0F, out=found[..., 0, :])
    np.right_shift(raw, 4, out=found[..., 1, :])
    return found

"""Quantized weights as their file has them: a code of 4 or 8 bits a value, and a scale per row and 32 or 16 columns.

Every form here widens to one rounding of the exact value, however it is computed: `scale * code` is a float32 without
rounding wherever an offset is added, so a fused multiply-add gives the bits of a product and a sum. Whoever makes codes
sees to that (`engine.model.files.integers` for what others have trained with wider scales).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

GROUP = 32

Form = Literal["q4", "q8", "a8", "h8", "x8", "f8"]
"""What a code is, and what stands beside it:

    q4   0 to 15 (uint8)    a scale and an offset per 32 columns     scale * code + offset
    q8   int8               a scale per 32 columns                   scale * code
    a8   int8               a scale and an offset per 32 columns     scale * code + offset
    h8   int8               a scale per 16 columns                   scale * code
    x8   int8               a scale and an offset per 16 columns     scale * code + offset
    f8   an 8-bit float     a scale per 32 columns                   scale * value of the code
"""

HALVED = ("h8", "x8")
WITH_OFFSETS = ("q4", "a8", "x8")


def _e4m3() -> FloatArray:
    """Return the values of all 8-bit floats of 4 exponent and 3 mantissa bits that are finite but for one NaN per sign
    (E4M3: Micikevicius et al. 2022, arXiv 2209.05433)."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[exponent * 8 + mantissa == 127] = np.nan
    return np.where(codes & 128, -values, values).astype(np.float32)


E4M3 = _e4m3()


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A matrix `[rows, columns]`, `columns` a multiple of 32; `codes` holds one a byte. `scales` and, where the form
    has them, `offsets` are `[rows, columns / 32]`, or `/ 16`."""

    codes: NDArray[np.uint8 | np.int8]
    scales: FloatArray
    offsets: FloatArray | None
    form: Form

    def widen(self) -> FloatArray:
        """Return the values, `[rows, columns]`."""
        values = E4M3[self.codes] if self.form == "f8" else self.codes.astype(np.float32)
        values = values.reshape(*self.scales.shape, GROUP // (2 if self.form in HALVED else 1))
        values *= self.scales[..., None]
        if self.offsets is not None:
            values += self.offsets[..., None]
        return values.reshape(self.codes.shape)

    def rows(self, first: int, end: int) -> "Codes":
        """Return the rows `first` to `end`, as views."""
        offsets = None if self.offsets is None else self.offsets[first:end]
        return Codes(self.codes[first:end], self.scales[first:end], offsets, self.form)


def common_form(forms: Collection[str]) -> Form | None:
    """Return the smallest form that has the values of all these exactly; None where there is none."""
    if len(set(forms)) == 1:
        return cast(Form, next(iter(forms)))
    if "f8" in forms:
        return None
    named: dict[tuple[bool, bool], Form] = {(False, False): "q8", (False, True): "a8", (True, False): "h8"}
    halved, offset = (any(form in kind for form in forms) for kind in (HALVED, WITH_OFFSETS))
    return named.get((halved, offset), "x8")


def recoded(part: Codes, form: Form) -> Codes:
    """Return the same values in a form that has them, see `common_form`."""
    if part.form == form:
        return part
    scales, offsets = part.scales, part.offsets
    if form in HALVED and part.form not in HALVED:
        scales = np.repeat(scales, 2, axis=1)
        offsets = None if offsets is None else np.repeat(offsets, 2, axis=1)
    if form in WITH_OFFSETS and offsets is None:
        offsets = np.full_like(scales, -0.0)  # what it is added to stays as it is, a zero with its sign
    return replace(part, codes=part.codes.view(np.int8), scales=scales, offsets=offsets, form=form)


def nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Split bytes `[.., n]` to `[.., 2, n]`: their low halves, then their high ones."""
    found = np.empty((*raw.shape[:-1], 2, raw.shape[-1]), np.uint8)
    np.bitwise_and(raw, 0x0F, out=found[..., 0, :])
    np.right_shift(raw, 4, out=found[..., 1, :])
    return found

"""Matrices of integer codes as others pack them into words: `(code - zero) * scale`, a scale and a zero per row and
group of columns.

Codes come here without a sign, 0 to 2^bits - 1, from four packings. What they stand for is made into `Codes` where that
can be done exactly, and else rounded once into 32 bits: an order of columns of its own (`order`), groups that are no
multiple of 32 columns, and 8-bit codes far from their zeros whose scales have too many bits for an offset.

The packings are those of compressed-tensors, GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.model.codes import GROUP, Codes, FloatArray, Form
from engine.model.files.stored import StoredRows

Words = NDArray[np.int32]
Bytes = NDArray[np.uint8]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each half byte of a word is of, the lowest first."""
_TINY = np.float32(2.0**-90)
"""Scales below are so near to the smallest numbers that products may lose bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Integers:
    """A matrix of `shape`, `scales` and `zeros` `[rows, groups]`. `unpack(first, end)` returns the codes of some rows.
    Column c is of group `order[c]`; without an order, of group `c // group`."""

    shape: tuple[int, int]
    unpack: Callable[[int, int], Bytes]
    scales: FloatArray
    zeros: NDArray[np.int16]
    bits: int
    group: int
    order: NDArray[np.int32] | None = None

    def stored(self) -> StoredRows:
        """Return the exact values in a form that stays small; widened where there is none."""
        form = self._form()
        return StoredRows(self.shape, "float32", self._values) if form is None else StoredRows(
            self.shape, form, lambda first, end: self._codes(form, first, end)
        )

    def _form(self) -> Form | None:
        columns = self.shape[1]
        if columns % GROUP or self.group % GROUP:
            return None
        if self.order is not None and not np.array_equal(self.order, np.arange(columns) // self.group):
            return None
        # 1. A code and an offset, where every product of a scale is exact.
        if self.bits <= 4 and _is_short(self.scales, self.bits + 1):
            return "q4"
        # 2. The difference of code and zero, where all fit a signed byte.
        least, most = -int(self.zeros.max()), (1 << self.bits) - 1 - int(self.zeros.min())
        if least >= -128 and most <= 127:
            return "q8"
        # 3. A signed code and an offset, as in 1.
        return "a8" if _is_short(self.scales, 9) else None

    def _codes(self, form: Form, first: int, end: int) -> Codes:
        of = np.arange(self.shape[1] // GROUP) // (self.group // GROUP)
        codes = self.unpack(first, end)
        scales: FloatArray = self.scales[first:end][:, of]
        zeros: NDArray[np.int16] = self.zeros[first:end][:, of]
        if form == "q4":
            return Codes(codes, scales, scales * -zeros.astype(np.float32), form)
        if form == "q8":
            apart = codes.reshape(*zeros.shape, GROUP).astype(np.int16) - zeros[..., None]
            return Codes(apart.astype(np.int8).reshape(codes.shape), scales, None, form)
        offsets = scales * (128 - zeros).astype(np.float32)
        return Codes((codes ^ np.uint8(128)).view(np.int8), scales, offsets, form)

    def _values(self, first: int, end: int) -> FloatArray:
        """Return the values of some rows, each rounded once."""
        of = np.arange(self.shape[1]) // self.group if self.order is None else self.order
        apart = self.unpack(first, end).astype(np.int16) - self.zeros[first:end][:, of]
        return apart.astype(np.float32) * self.scales[first:end][:, of]


def _is_short(scales: FloatArray, bits: int) -> bool:
    """Return True if every scale times a number of so many bits is a float32 without rounding."""
    last = np.uint32((1 << bits) - 1)
    return not np.any(scales.view(np.uint32) & last) and not np.any((np.abs(scales) < _TINY) & (scales != 0))


def unpack_words(words: Words, bits: int, count: int) -> Bytes:
    """Unpack `count` codes of 4 or 8 bits along the last axis, the lowest bits first."""
    each = 32 // bits
    found = np.empty((*words.shape[:-1], words.shape[-1] * each), np.uint8)
    for place in range(each):  # one after the other: nothing but words is held beside the codes
        found[..., place::each] = words >> bits * place & (1 << bits) - 1
    return found[..., :count]


def awq_rows(words: Words, first: int, end: int) -> Bytes:
    """Unpack the rows `first` to `end` of codes whose words `[columns, rows / 8]` hold eight of them."""
    start = first // 8
    return unpack_awq(words[:, start : -(-end // 8)].T)[first - 8 * start : end - 8 * start]


def unpack_awq(words: Words) -> Bytes:
    """Unpack eight interleaved 4-bit codes a word along the first axis."""
    found = np.empty((words.shape[0] * 8, *words.shape[1:]), np.uint8)
    for place, column in enumerate(AWQ_ORDER):
        found[column::8] = words >> 4 * place & 15
    return found

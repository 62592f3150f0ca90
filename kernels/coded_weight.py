"""Quantized weights as a GPU multiplies them: codes row by row, and factors per row and 32 or 16 columns.

The forms are those of `kernels.panels`: q4 (two codes a byte: of columns j, low, and j + 16 of a group of 32), q8 and
a8 (int8), h8 and x8 (int8, factors per 16 columns), f8 (E4M3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.panels import FACTORS, GROUP, Kind


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight `[rows, columns]`. `codes`: uint8 `[rows, columns / 2]` with 4 bits, else `[rows, columns]`, int8 or, of
    8-bit floats, uint8. `scales` and, where the kind has them, `offsets`: float32 `[rows, columns / 32]`, or `/ 16`."""

    kind: Kind
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        parts, factors = FACTORS.get(self.kind, (0, 0))
        rows, columns = self.codes.shape[0], self.codes.shape[1] * (2 if self.kind == "q4" else 1)
        dtype = torch.uint8 if self.kind in ("q4", "f8") else torch.int8
        if not parts or columns % GROUP or self.codes.dtype != dtype or (self.offsets is None) != (factors == 1):
            raise ValueError(f"{self.codes.dtype} {tuple(self.codes.shape)} are no {self.kind} codes")
        for item in (self.scales, self.offsets):
            wanted = (rows, columns // GROUP * parts)
            if item is not None and (tuple(item.shape) != wanted or item.dtype != torch.float32):
                raise ValueError(f"{self.kind} codes of {rows} x {columns} want float32 factors {wanted}")

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * (2 if self.kind == "q4" else 1)

    def widen(self, dtype: torch.dtype) -> Tensor:
        """Return the values `[rows, columns]`, each rounded once to 32 bits and then to `dtype`."""
        rows, columns = self.shape
        if self.kind == "q4":
            pairs = self.codes.view(rows, -1, GROUP // 2)
            codes = torch.cat([pairs & 15, pairs >> 4], -1)
        else:
            codes = self.codes.view(torch.float8_e4m3fn) if self.kind == "f8" else self.codes
        wide = codes.reshape(*self.scales.shape, -1).double() * self.scales.double()[..., None]
        if self.offsets is not None:
            wide = wide + self.offsets.double()[..., None]
        return wide.float().to(dtype).view(rows, columns)

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

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.offsets)
        return sum(int(part.nbytes) for part in parts if part is not None)

    def part(self, rows: slice, columns: slice = slice(None)) -> "CodedWeight":
        """Return some rows, and of them some columns, as views: what one rank of several has. Raises ValueError for
        columns that begin or end within a group of 32."""
        first, end, _ = columns.indices(self.shape[1])
        if first % GROUP or end % GROUP:
            raise ValueError(f"columns {first} to {end} cut a group of {GROUP}")
        each = GROUP // 2 if self.kind == "q4" else GROUP
        parts = FACTORS[self.kind][0]

        def cut(item: Tensor, per_group: int) -> Tensor:
            return item[rows, first // GROUP * per_group : end // GROUP * per_group]

        offsets = None if self.offsets is None else cut(self.offsets, parts)
        return CodedWeight(self.kind, cut(self.codes, each), cut(self.scales, parts), offsets)

    def unpacked(self) -> Tensor:
        """Return the codes `[rows, columns]`, one a byte."""
        if self.kind != "q4":
            return self.codes
        pairs = self.codes.unflatten(1, (-1, GROUP // 2))
        return torch.cat([pairs & 15, pairs >> 4], -1).flatten(1)

    def lookup(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of the rows of these numbers, as `widen` does: an embedding's. Where an offset is added,
        the product that it is added to is exact (`engine.model.codes`)."""
        offsets = None if self.offsets is None else self.offsets[rows]
        found = CodedWeight(self.kind, self.codes[rows], self.scales[rows], offsets)
        codes = found.unpacked()
        codes = codes.view(torch.float8_e4m3fn) if self.kind == "f8" else codes
        wide = codes.float().view(*found.scales.shape, -1).mul_(found.scales[..., None])
        if offsets is not None:
            wide += offsets[..., None]
        return wide.view(found.shape).to(dtype)

    def widen(self, dtype: torch.dtype) -> Tensor:
        """Return the values `[rows, columns]`, each rounded once to 32 bits and then to `dtype`."""
        rows, columns = self.shape
        codes = self.unpacked()
        codes = codes.view(torch.float8_e4m3fn) if self.kind == "f8" else codes
        wide = codes.reshape(*self.scales.shape, -1).double() * self.scales.double()[..., None]
        if self.offsets is not None:
            wide = wide + self.offsets.double()[..., None]
        return wide.float().to(dtype).view(rows, columns)


@dataclass(frozen=True, slots=True, eq=False)
class CodedStack:
    """Weights of one shape and kind, `[count, rows, columns]`: `weight` has the rows of one below those of another."""

    count: int
    weight: CodedWeight

    def __post_init__(self) -> None:
        if self.count < 1 or self.weight.shape[0] % self.count:
            raise ValueError(f"{self.weight.shape[0]} rows are not those of {self.count} matrices")

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, columns = self.weight.shape
        return self.count, rows // self.count, columns

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def widen(self, dtype: torch.dtype) -> Tensor:
        """Return the values `[count, rows, columns]`, as `CodedWeight.widen` does."""
        return self.weight.widen(dtype).view(self.shape)

"""Weights in panels of 64 rows, each as small as it can be without loss, as `kernels/cpu/panel.h` has them.

    f32   float32
    bf16  bfloat16, where every value is one
    q4    per row and 32 columns a float32 scale and offset; 4 bits    weight = scale * code + offset, rounded once
    q8    per row and 32 columns a float32 scale; int8 codes           weight = scale * code
    a8    as q8, with an offset per row and 32 columns                 weight = scale * code + offset, rounded once
    h8    as q8, with a scale per 16 columns                           weight = scale * code
    x8    as a8, with scale and offset per 16 columns                  weight = scale * code + offset, rounded once
    f8    per row and 32 columns a float32 scale; 8-bit floats (E4M3)  weight = scale * value of the code

The layout is the same on every machine; rows past the last are zeros.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import torch
from torch import Tensor

PANEL = 64
GROUP = 32
QUAD = 4
"""Columns of codes that are whole numbers, of which a row's lie together."""

Kind = Literal["f32", "bf16", "q8", "q4", "a8", "h8", "x8", "f8"]

FACTORS: dict[str, tuple[int, int]] = {
    "q8": (1, 1), "q4": (1, 2), "a8": (1, 2), "h8": (2, 1), "x8": (2, 2), "f8": (1, 1)
}
"""The number of parts into which 32 columns of each kind of codes are cut, and of factors that a row has in each."""

IntegerBits = Literal[0, 16, 23]
"""To how many bits rows are rounded that are multiplied by codes in integers; 0: products are of floats."""

WHOLE: frozenset[str] = frozenset({"q4", "q8", "a8", "h8", "x8"})
"""The kinds whose codes are whole numbers."""

VERSION = 3
"""The version of the layout."""


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A weight `[rows, columns]`; `raw` is uint8, contiguous, aligned to 64 bytes, and must not change. With `integer`,
    for kinds in `WHOLE`, its codes are multiplied in integers, by rows that are rounded to so many bits: another
    rounding, sooner (`kernels/cpu/integers.cpp`)."""

    rows: int
    columns: int
    kind: Kind
    raw: Tensor
    integer: IntegerBits = 0

    def __post_init__(self) -> None:
        size = panel_bytes(self.rows, self.columns, self.kind)
        if self.raw.dtype != torch.uint8 or self.raw.numel() != size or not self.raw.is_contiguous():
            raise ValueError(f"{self.kind} panels of {self.rows} x {self.columns} are {size} contiguous bytes")

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


@dataclass(frozen=True, slots=True, eq=False)
class PanelStack:
    """Weights of one shape and kind, `[count, rows, columns]`: the panels of one matrix after those of another. With
    `integer` as in `Panels`."""

    count: int
    rows: int
    columns: int
    kind: Kind
    raw: Tensor
    integer: IntegerBits = 0

    def __post_init__(self) -> None:
        size = self.count * panel_bytes(self.rows, self.columns, self.kind)
        if self.raw.dtype != torch.uint8 or self.raw.numel() != size or not self.raw.is_contiguous():
            raise ValueError(
                f"{self.kind} panels of {self.count} x {self.rows} x {self.columns} are {size} contiguous bytes"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.count, self.rows, self.columns

    def __getitem__(self, number: int) -> Panels:
        """Return one of the matrices, without copying it."""
        return Panels(self.rows, self.columns, self.kind, self.raw.view(self.count, -1)[number], self.integer)


def in_integers(weight: Panels | PanelStack, bits: IntegerBits) -> Panels | PanelStack:
    """Return the same panels, whose codes are multiplied in integers where they are whole numbers."""
    return replace(weight, integer=bits) if weight.kind in WHOLE else weight


def panel_bytes(rows: int, columns: int, kind: Kind) -> int:
    """Return the bytes that `raw` takes. Raises ValueError for codes whose columns are no multiple of 32."""
    per_column = {"f32": 4 * PANEL, "bf16": 2 * PANEL, "q4": PANEL // 2}.get(kind, PANEL)
    parts, factors = FACTORS.get(kind, (0, 0))
    per_group = 4 * PANEL * parts * factors
    if per_group and columns % GROUP:
        raise ValueError(f"codes in groups of {GROUP} columns do not fill {columns}")
    return ceil(rows / PANEL) * (columns * per_column + columns // GROUP * per_group)


def pack_plain(weight: Tensor) -> Panels:
    """Pack float32 `[rows, columns]` as bf16 where nothing is lost by it, else as f32."""
    return pack_as("bf16" if is_short(weight) else "f32", weight)


def is_short(weight: Tensor) -> bool:
    """Return True if every number is one of bfloat16."""
    return weight.dtype == torch.bfloat16 or torch.equal(weight.to(torch.bfloat16).float(), weight.float())


def pack_as(kind: Kind, weight: Tensor) -> Panels:
    """Pack numbers of any type `[rows, columns]` as bf16 or f32."""
    rows, columns = weight.shape
    by_column = _panels(weight.to(torch.bfloat16 if kind == "bf16" else torch.float32)).transpose(1, 2).contiguous()
    return Panels(rows, columns, kind, by_column.view(torch.uint8).view(-1))


def pack_stack(weights: Tensor) -> PanelStack:
    """Pack float32 `[count, rows, columns]`, all of them as bf16 or as f32; see `pack_plain`."""
    short = is_short(weights)
    parts = [pack_as("bf16" if short else "f32", weight).raw for weight in weights]
    count, rows, columns = weights.shape
    return PanelStack(count, rows, columns, "bf16" if short else "f32", torch.cat(parts))


def stacked(panels: Iterable[Panels]) -> PanelStack:
    """Put panels of one shape and kind behind each other. Raises ValueError where they differ."""
    matrices = list(panels)
    shapes = {(item.rows, item.columns, item.kind) for item in matrices}
    if len(shapes) != 1:
        raise ValueError(f"panels of {len(shapes)} shapes and kinds cannot be stacked")
    rows, columns, kind = shapes.pop()
    return PanelStack(len(matrices), rows, columns, kind, torch.cat([item.raw for item in matrices]))


def pack_codes(codes: Tensor, scales: Tensor, offsets: Tensor | None, kind: Kind) -> Panels:
    """Pack codes `[rows, columns]`, one a byte: int8, or uint8 for 4 bits (0 to 15) and for 8-bit floats. `scales` and,
    where the kind has them, `offsets`: float32 `[rows, columns / 32]`, or `/ 16`. Raises ValueError for anything
    else."""
    rows, columns = codes.shape
    parts, factors = FACTORS.get(kind, (0, 0))
    dtype = torch.uint8 if kind in ("q4", "f8") else torch.int8
    if not parts or codes.dtype != dtype or (offsets is not None) != (factors == 2):
        raise ValueError(f"no {kind} panels of {codes.dtype} codes, offsets {offsets is not None}")
    panel_bytes(rows, columns, kind)
    affine = [item for item in (scales, offsets) if item is not None]
    if any(item.shape != (rows, columns // GROUP * parts) for item in affine):
        raise ValueError(f"{kind} panels of {rows} x {columns} have factors of other shapes")
    together = QUAD if kind in WHOLE else 1
    by_group = _panels(codes).unflatten(2, (-1, GROUP // together, together))
    by_column = by_group.permute(0, 2, 3, 1, 4)  # [panels, groups, 8, 64, 4] or [panels, groups, 32, 64, 1]
    if kind == "q4":
        by_column = by_column[..., : PANEL // 2, :] | by_column[..., PANEL // 2 :, :] << 4
    # [panels, groups, parts, factors, 64]
    by_part = [_panels(item).transpose(1, 2).unflatten(1, (-1, parts)) for item in affine]
    numbers = torch.stack(by_part, 3).contiguous().view(torch.uint8).flatten(2)
    coded = by_column.contiguous().view(torch.uint8).flatten(2)
    return Panels(rows, columns, kind, torch.cat([numbers, coded], 2).view(-1))


def unpack(panels: Panels) -> Tensor:
    """Return the float32 weight `[rows, columns]` that these panels stand for."""
    count = ceil(panels.rows / PANEL)
    raw = panels.raw.view(count, -1)
    if panels.kind in ("f32", "bf16"):
        dtype = torch.float32 if panels.kind == "f32" else torch.bfloat16
        by_column = raw.view(dtype).view(count, panels.columns, PANEL).float()
        return by_column.transpose(1, 2).reshape(-1, panels.columns)[: panels.rows].contiguous()
    groups, (parts, factors) = panels.columns // GROUP, FACTORS[panels.kind]
    raw = raw.view(count, groups, -1)
    size = parts * factors * PANEL * 4
    affine = raw[..., :size].contiguous().view(torch.float32).view(count, groups, parts, factors, 1, PANEL).double()
    coded = raw[..., size:].contiguous()
    if panels.kind == "q4":
        halves = coded.view(count, groups, GROUP // QUAD, PANEL // 2, QUAD)
        coded = torch.cat([halves & 15, halves >> 4], 3)
    elif panels.kind == "f8":
        coded = coded.view(torch.float8_e4m3fn).double()
    else:
        coded = coded.view(torch.int8)
    together = QUAD if panels.kind in WHOLE else 1
    coded = coded.reshape(count, groups, GROUP // together, PANEL, together).transpose(3, 4)
    # In 64 bits the product is exact, and the sum is rounded once more where it becomes 32 bits.
    wide = affine[:, :, :, 0] * coded.reshape(count, groups, parts, -1, PANEL).double()
    if factors == 2:
        wide = wide + affine[:, :, :, 1]
    wide = wide.float().flatten(2, 3)
    return wide.permute(0, 3, 1, 2).reshape(-1, panels.columns)[: panels.rows].contiguous()


def _panels(matrix: Tensor) -> Tensor:
    """Cut `[rows, n]` into `[panels, 64, n]`, with zeros below the last row."""
    rows, columns = matrix.shape
    padded = matrix.new_zeros(ceil(rows / PANEL) * PANEL, columns)
    padded[:rows] = matrix
    return padded.view(-1, PANEL, columns)

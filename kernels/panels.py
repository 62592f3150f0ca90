"""Weights in panels of 64 rows, each as small as it can be without loss, as `kernels/cpu/linear.cpp` reads them.

    f32   float32
    bf16  bfloat16, where every value is one
    q8    per row and 32 columns a float32 scale; int8 codes           weight = scale * code
    q4    per row and 32 columns a float32 scale and offset; 4 bits    weight = scale * code + offset, rounded once

The layout is the same on every machine; rows past the last are zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch
from torch import Tensor

PANEL = 64
GROUP = 32

Kind = Literal["f32", "bf16", "q8", "q4"]

VERSION = 1
"""The version of the layout."""


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A weight `[rows, columns]`; `raw` is uint8, contiguous, aligned to 64 bytes, and must not change."""

    rows: int
    columns: int
    kind: Kind
    raw: Tensor

    def __post_init__(self) -> None:
        size = panel_bytes(self.rows, self.columns, self.kind)
        if self.raw.dtype != torch.uint8 or self.raw.numel() != size or not self.raw.is_contiguous():
            raise ValueError(f"{self.kind} panels of {self.rows} x {self.columns} are {size} contiguous bytes")


@dataclass(frozen=True, slots=True, eq=False)
class PanelStack:
    """Weights of one shape and kind, `[count, rows, columns]`: the panels of one matrix after those of another."""

    count: int
    rows: int
    columns: int
    kind: Kind
    raw: Tensor

    def __post_init__(self) -> None:
        size = self.count * panel_bytes(self.rows, self.columns, self.kind)
        if self.raw.dtype != torch.uint8 or self.raw.numel() != size or not self.raw.is_contiguous():
            raise ValueError(
                f"{self.kind} panels of {self.count} x {self.rows} x {self.columns} are {size} contiguous bytes"
            )

    def __getitem__(self, number: int) -> Panels:
        """Return one of the matrices, without copying it."""
        return Panels(self.rows, self.columns, self.kind, self.raw.view(self.count, -1)[number])


def panel_bytes(rows: int, columns: int, kind: Kind) -> int:
    """Return the bytes that `raw` takes. Raises ValueError for codes whose columns are no multiple of 32."""
    per_column = {"f32": 4 * PANEL, "bf16": 2 * PANEL, "q8": PANEL, "q4": PANEL // 2}[kind]
    per_group = {"f32": 0, "bf16": 0, "q8": 4 * PANEL, "q4": 8 * PANEL}[kind]
    if per_group and columns % GROUP:
        raise ValueError(f"codes in groups of {GROUP} columns do not fill {columns}")
    return ceil(rows / PANEL) * (columns * per_column + columns // GROUP * per_group)


def pack_plain(weight: Tensor) -> Panels:
    """Pack float32 `[rows, columns]` as bf16 where nothing is lost by it, else as f32."""
    return _pack_as("bf16" if torch.equal(weight.to(torch.bfloat16).float(), weight) else "f32", weight)


def _pack_as(kind: Kind, weight: Tensor) -> Panels:
    rows, columns = weight.shape
    by_column = _panels(weight.to(torch.bfloat16) if kind == "bf16" else weight).transpose(1, 2).contiguous()
    return Panels(rows, columns, kind, by_column.view(torch.uint8).view(-1))


def pack_stack(weights: Tensor) -> PanelStack:
    """Pack float32 `[count, rows, columns]`, all of them as bf16 or as f32; see `pack_plain`."""
    short = torch.equal(weights.to(torch.bfloat16).float(), weights)
    parts = [_pack_as("bf16" if short else "f32", weight).raw for weight in weights]
    count, rows, columns = weights.shape
    return PanelStack(count, rows, columns, "bf16" if short else "f32", torch.cat(parts))


def stacked(matrices: Sequence[Panels]) -> PanelStack:
    """Put panels of one shape and kind behind each other. Raises ValueError where they differ."""
    shapes = {(item.rows, item.columns, item.kind) for item in matrices}
    if len(shapes) != 1:
        raise ValueError(f"panels of {len(shapes)} shapes and kinds cannot be stacked")
    rows, columns, kind = shapes.pop()
    return PanelStack(len(matrices), rows, columns, kind, torch.cat([item.raw for item in matrices]))


def pack_codes(codes: Tensor, scales: Tensor, offsets: Tensor | None, bits: int) -> Panels:
    """Pack codes `[rows, columns]`: int8 with 8 bits, uint8 of 0 to 15 with 4; `scales` and, with 4 bits only,
    `offsets`: float32 `[rows, columns / 32]`. Raises ValueError for anything else."""
    rows, columns = codes.shape
    if (bits, codes.dtype, offsets is None) not in ((8, torch.int8, True), (4, torch.uint8, False)):
        raise ValueError(f"no panels of {bits}-bit {codes.dtype} codes, offsets {offsets is not None}")
    kind: Kind = "q8" if bits == 8 else "q4"
    panel_bytes(rows, columns, kind)
    by_column = _panels(codes).unflatten(2, (-1, GROUP)).permute(0, 2, 3, 1)  # [panels, groups, 32, 64]
    if bits == 4:
        by_column = by_column[..., : PANEL // 2] | by_column[..., PANEL // 2 :] << 4
    affine = [_panels(item).transpose(1, 2) for item in (scales, offsets) if item is not None]
    factors = torch.stack([item.contiguous() for item in affine], 2)  # [panels, groups, 1 or 2, 64]
    parts = [factors.view(torch.uint8).flatten(2), by_column.contiguous().view(torch.uint8).flatten(2)]
    return Panels(rows, columns, kind, torch.cat(parts, 2).view(-1))


def unpack(panels: Panels) -> Tensor:
    """Return the float32 weight `[rows, columns]` that these panels stand for."""
    count = ceil(panels.rows / PANEL)
    raw = panels.raw.view(count, -1)
    if panels.kind in ("f32", "bf16"):
        dtype = torch.float32 if panels.kind == "f32" else torch.bfloat16
        by_column = raw.view(dtype).view(count, panels.columns, PANEL).float()
        return by_column.transpose(1, 2).reshape(-1, panels.columns)[: panels.rows].contiguous()
    groups = panels.columns // GROUP
    raw = raw.view(count, groups, -1)
    factors = 1 if panels.kind == "q8" else 2
    affine = raw[..., : factors * PANEL * 4].contiguous().view(torch.float32).view(count, groups, factors, 1, PANEL)
    coded = raw[..., factors * PANEL * 4 :].contiguous()
    if panels.kind == "q8":
        wide = affine[:, :, 0] * coded.view(torch.int8).view(count, groups, GROUP, PANEL).float()
    else:
        halves = coded.view(count, groups, GROUP, PANEL // 2)
        codes = torch.cat([halves & 15, halves >> 4], -1).double()
        wide = (affine[:, :, 0].double() * codes + affine[:, :, 1].double()).float()
    return wide.permute(0, 3, 1, 2).reshape(-1, panels.columns)[: panels.rows].contiguous()


def _panels(matrix: Tensor) -> Tensor:
    """Cut `[rows, n]` into `[panels, 64, n]`, with zeros below the last row."""
    rows, columns = matrix.shape
    padded = matrix.new_zeros(ceil(rows / PANEL) * PANEL, columns)
    padded[:rows] = matrix
    return padded.view(-1, PANEL, columns)

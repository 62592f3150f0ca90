"""A rank's slices of a prepared model's weights (`engine.model.split`), as tensors and as codes."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from engine.model.codes import GROUP, HALVED, Codes
from engine.model.config import ModelConfig
from engine.model.split import Cut, Share, cut_of


class Slices:
    """Cuts weights of the model of `config` to what a rank has of them. What is whole, and what is one range of rows,
    stays where it is mapped; columns, and rows of several matrices, are copied."""

    def __init__(self, config: ModelConfig, share: Share) -> None:
        self._config = config
        self.share = share

    @property
    def suffix(self) -> str:
        """What names the files of this rank beside those of the whole model."""
        return f"-{self.share.rank}of{self.share.ranks}"

    def cut(self, name: str) -> Cut:
        return cut_of(name, self._config, self.share)

    def tensor(self, name: str, weight: Tensor) -> Tensor:
        """`weight` is `[.., rows, columns]`, or `[.., rows]` where its rows are single values."""
        cut = self.cut(name)
        if cut.columns is not None:
            return weight[..., cut.columns.start : cut.columns.stop].contiguous()
        if cut.rows is None:
            return weight
        axis = self._row_axis(name, weight.dim())
        parts = [weight.narrow(axis, rows.start, len(rows)) for rows in cut.rows]
        return parts[0] if len(parts) == 1 and axis == 0 else torch.cat(parts, axis)

    def shape(self, name: str, weight: Tensor) -> tuple[int, ...]:
        return tuple(self.tensor(name, torch.empty(weight.shape, device="meta")).shape)

    def codes(self, name: str, codes: Codes, count: int = 1) -> Codes | None:
        """`codes` has the rows of `count` matrices under each other. None where a group of codes that share a scale
        would be cut."""
        cut = self.cut(name)
        if cut.columns is not None:
            return code_columns(codes, cut.columns)
        if cut.rows is None:
            return codes
        each = len(codes.codes) // count
        wanted = np.concatenate(
            [np.arange(rows.start, rows.stop) + at * each for at in range(count) for rows in cut.rows]
        )
        offsets = None if codes.offsets is None else codes.offsets[wanted]
        return Codes(codes.codes[wanted], codes.scales[wanted], offsets, codes.form)

    def _row_axis(self, name: str, dims: int) -> int:
        """Experts come first; a bias and a norm have no columns."""
        has_columns = not name.endswith("_bias") and dims > 1
        return dims - 2 if has_columns else dims - 1


def code_columns(codes: Codes, columns: range) -> Codes | None:
    """Return some columns of codes; None where a group that shares a scale would be cut."""
    if columns.start % GROUP or columns.stop % GROUP:
        return None
    group = GROUP // 2 if codes.form in HALVED else GROUP
    first, end = columns.start // group, columns.stop // group
    offsets = None if codes.offsets is None else np.ascontiguousarray(codes.offsets[:, first:end])
    return Codes(
        np.ascontiguousarray(codes.codes[:, columns.start : columns.stop]),
        np.ascontiguousarray(codes.scales[:, first:end]),
        offsets,
        codes.form,
    )


def sliced(weights: Mapping[str, Tensor], slices: Slices, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return a rank's slices of the weights that are `wanted` by name."""
    return {name: slices.tensor(name, weight) for name, weight in weights.items() if wanted(name)}


def part_bytes(weights: Mapping[str, Tensor], slices: Slices) -> int:
    """Return the bytes of a rank's slices of these weights."""
    return sum(math.prod(slices.shape(name, weight)) * weight.element_size() for name, weight in weights.items())

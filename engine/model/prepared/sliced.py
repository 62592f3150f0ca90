"""A rank's part of a prepared model's weights (`engine.model.split`), as they are kept."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.prepared.loading import PreparedWeights, Stored, is_of_experts, widened
from engine.model.split import Cut, Share, cut_of
from kernels.coded_weight import CodedWeight
from kernels.panels import GROUP


class PartWeights(PreparedWeights):
    """What a rank has of them. What is whole, and what is one range of rows, stays where it is mapped; columns, and
    rows of several matrices, are copied when they are asked for."""

    def __init__(self, model_dir: Path, share: Share) -> None:
        super().__init__(model_dir)
        self._share = share
        self._config = ModelConfig.load(model_dir)
        self._whole = PreparedWeights(model_dir)
        self.suffix = f"-{share.rank}of{share.ranks}"
        self.stored = _Parts(self._whole, self._config, share)

    def again(self, model_dir: Path) -> PreparedWeights:
        return PartWeights(model_dir, self._share)

    def shape(self, name: str) -> tuple[int, ...]:
        shape, cut = list(self._whole.shape(name)), cut_of(name, self._config, self._share)
        if cut.columns is not None:
            shape[-1] = len(cut.columns)
        elif cut.rows is not None:
            shape[_row_axis(name, len(shape))] = sum(map(len, cut.rows))
        return tuple(shape)


class _Parts(Mapping[str, Stored]):
    """Cuts a weight when it is asked for. Mutable state: the latest one, which is asked for slab by slab."""

    def __init__(self, whole: PreparedWeights, config: ModelConfig, share: Share) -> None:
        self._whole, self._config, self._share = whole, config, share
        self._latest: tuple[str, Stored] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole.stored)

    def __len__(self) -> int:
        return len(self._whole.stored)

    def __getitem__(self, name: str) -> Stored:
        if self._latest is None or self._latest[0] != name:
            self._latest = name, self._part(name)
        return self._latest[1]

    def _part(self, name: str) -> Stored:
        # The embedding of a tied model is its output matrix too: both are cut by vocabulary.
        cut, stored = cut_of(name, self._config, self._share), self._whole.stored[name]
        if isinstance(stored, Tensor):
            return _tensor(name, stored, cut)
        count = self._whole.shape(name)[0] if is_of_experts(name) else 1
        return _codes(stored, cut, count, self._whole.dtype)


def _tensor(name: str, weight: Tensor, cut: Cut) -> Tensor:
    """`weight` is `[.., rows, columns]`, or `[.., rows]` where its rows are single values."""
    if cut.columns is not None:
        return weight[..., cut.columns.start : cut.columns.stop].contiguous()
    if cut.rows is None:
        return weight
    axis = _row_axis(name, weight.dim())
    parts = [weight.narrow(axis, rows.start, len(rows)) for rows in cut.rows]
    return parts[0] if len(parts) == 1 and axis == 0 else torch.cat(parts, axis)


def _row_axis(name: str, dimensions: int) -> int:
    """Return the number of the dimension that counts rows: experts come first; a bias and a norm have no columns."""
    return dimensions - (2 if dimensions > 1 and not name.endswith("_bias") else 1)


def _codes(weight: CodedWeight, cut: Cut, count: int, dtype: torch.dtype) -> Stored:
    """`weight` has the rows of `count` matrices under each other. Where a group of codes that share a scale would be
    cut, its values are returned."""
    if cut.columns is not None:
        columns = slice(cut.columns.start, cut.columns.stop)
        if columns.start % GROUP or columns.stop % GROUP:
            values = widened(weight, dtype)[:, columns]
            return values.contiguous() if count == 1 else values.unflatten(0, (count, -1)).contiguous()
        part = weight.part(slice(None), columns)
        offsets = None if part.offsets is None else part.offsets.contiguous()
        return replace(part, codes=part.codes.contiguous(), scales=part.scales.contiguous(), offsets=offsets)
    if cut.rows is None:
        return weight
    if count == 1 and len(cut.rows) == 1:
        return weight.part(slice(cut.rows[0].start, cut.rows[0].stop))
    each = len(weight.codes) // count
    wanted = torch.cat([torch.arange(rows.start, rows.stop) + at * each for at in range(count) for rows in cut.rows])
    offsets = None if weight.offsets is None else weight.offsets[wanted]
    return replace(weight, codes=weight.codes[wanted], scales=weight.scales[wanted], offsets=offsets)

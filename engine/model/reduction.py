"""Sums over tensor-parallel ranks, as a model sees them, and the same sums in one process.

A product over columns that several ranks have is a sum of theirs, added in the order of the ranks: ((r0 + r1) + r2).
One process that computes its products in the same slices and adds them in the same order gives the same bits
(`engine.sum_slices`), which is what tests hold the ranks against.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.model.split import Share
from kernels.linear import Weight, linear


class Reduction(Protocol):
    """Fulfilled by `engine.ranks.sums.RankSums`, and for ranks with a device each by `engine.ranks.device_sums`. All
    ranks call the same in the same order, with equal shapes."""

    share: Share
    heads: tuple[int, int]
    """Heads, and KV heads, of the whole model."""

    def sum(self, x: Tensor) -> Tensor:
        """Write the sum of all ranks' `x`, contiguous, into it, in the order of the ranks, and return it."""

    def gathered(self, x: Tensor) -> Tensor:
        """Return the columns of all ranks' float32 `x` `[rows, own columns]` side by side at rank 0; `x` itself at the
        others."""


class ColumnSlices(NamedTuple):
    """A weight `[rows, columns]` as the ranks would have it, by columns."""

    parts: Sequence[Weight]
    widths: Sequence[int]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        pieces = x.split(list(self.widths), 1)
        total = add_in_order([linear(one.contiguous(), part) for one, part in zip(pieces, self.parts, strict=True)])
        return total if bias is None else total.add_(bias)


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return ((p0 + p1) + p2) .., in 32 bits, rounded once to the type of the parts; writes to no part."""
    if len(parts) == 1:
        return parts[0].clone()
    total = parts[0].float() + parts[1].float()
    for part in parts[2:]:
        total += part.float()
    return total.to(parts[0].dtype)


def embedded(ranks: Reduction, tokens: Tensor, lookup: Callable[[Tensor], Tensor], vocab: int) -> Tensor:
    """Return the rows of `tokens` of an embedding that is divided by vocabulary: each is with one rank. `lookup`
    returns rows of this one's."""
    own = ranks.share.even(vocab)
    at = tokens - own.start
    rows = lookup(at.clamp(0, len(own) - 1))
    rows.masked_fill_(((at < 0) | (at >= len(own))).unsqueeze(1), 0)
    return ranks.sum(rows)


class WholeNorm(NamedTuple):
    """An RMS norm over all heads, of which ranks have some: their squares are added up. `heads` of one row in all;
    `slices`: those that one process adds up as so many ranks would."""

    heads: int
    ranks: Reduction | None
    slices: int

    def __call__(self, x: Tensor, weight: Tensor, eps: float, head_dim: int) -> Tensor:
        """Return the norm of `x` `[rows, own heads * head_dim]` times `weight`, in its type."""
        wide = x.float()
        parts = [part.square().sum(-1, keepdim=True) for part in wide.chunk(min(self.slices, self.heads), 1)]
        squares = add_in_order(parts)
        if self.ranks is not None:
            rank, ranks = self.ranks.share
            if ranks > self.heads and rank and rank * self.heads // ranks == (rank - 1) * self.heads // ranks:
                squares.zero_()  # the rank before has the same head
            squares = self.ranks.sum(squares)
        factor = torch.rsqrt(squares / (self.heads * head_dim) + eps)
        return (wide * factor * weight.float()).to(x.dtype)

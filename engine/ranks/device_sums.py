"""Sums over tensor-parallel ranks that have a device each: parts are moved, and each rank adds them up itself, in 32
bits and in the order of the ranks: ((r0 + r1) + r2).

So the bits are the same on every rank, for every size of a batch, and those of `engine.ranks.sums`; an all-reduce of
NCCL's own picks its order by the size of a message. Three ways, of the same bits; by the second and third, an
`Exchange`, as NCCL is one, moves the parts:

    least   one kernel over memory that all devices map (`engine.ranks.one_shot`), where they can
    small   every rank sends its whole part to every other, and adds up all of it: one exchange
    large   rank r is sent everybody's r-th piece, adds up that one, and sends the sum to all: two exchanges, which move
            as many bytes as a ring would

All of it is work on the current stream, so it is recorded with a decode step and replayed with it. A rank's end is its
worker's, whose processes end together: nobody is left to wait for a part.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.model.reduction import add_in_order
from engine.model.split import Share
from engine.ranks.one_shot import OneShotSums

AT_ONCE_BYTES = 256 * 1024
"""Up to here a part is sent whole: one exchange less to wait for. Not measured on a card."""


class Exchange(Protocol):
    """Moves tensors between the ranks' devices."""

    def exchange(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        """Enqueue, on the current stream, what goes to each rank and comes from each: contiguous tensors, of which none
        is empty. Fulfilled over `transfer.nccl.exchange.NcclExchange`. Raises RankError."""


class DeviceSums:
    """Fulfils `engine.model.reduction.Reduction`. Has no state but that of what it is made with."""

    def __init__(
        self,
        share: Share,
        heads: tuple[int, int],
        vocab: int,
        link: Exchange,
        at_once_bytes: int = AT_ONCE_BYTES,
        one_shot: OneShotSums | None = None,
    ) -> None:
        self.share = share
        self.heads = heads
        self._columns = [Share(rank, share.ranks).even(vocab) for rank in range(share.ranks)]
        self._link = link
        self._at_once_bytes = at_once_bytes
        self._one_shot = one_shot
        self._others = [rank for rank in range(share.ranks) if rank != share.rank]

    def sum(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise ValueError("a sum over ranks is of contiguous rows")
        flat = x.view(-1)
        if self._one_shot is not None and x.nbytes <= self._one_shot.most_bytes:
            self._one_shot.sum(flat)
            return x
        if x.nbytes <= self._at_once_bytes:
            self._sum(flat, [flat] * self.share.ranks)
            return x
        ranks = self.share.ranks
        cuts = [Share(rank, ranks).even(len(flat)) for rank in range(ranks)]
        pieces = [flat[cut.start : cut.stop] for cut in cuts]
        own = pieces[self.share.rank]
        self._sum(own, pieces)
        self._link.exchange(
            [(rank, own) for rank in self._others if len(own)],
            [(rank, pieces[rank]) for rank in self._others if len(pieces[rank])],
        )
        return x

    def _sum(self, own: Tensor, pieces: Sequence[Tensor]) -> None:
        """Send each rank its piece, and write the sum of all ranks' parts of this one's into `own`."""
        parts = own.new_empty(self.share.ranks, len(own))
        parts[self.share.rank].copy_(own)
        self._link.exchange(
            [(rank, pieces[rank]) for rank in self._others if len(pieces[rank])],
            [(rank, parts[rank]) for rank in self._others if len(own)],
        )
        own.copy_(add_in_order(list(parts)))

    def gathered(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if not len(x):  # a step that draws nothing
            return x if self.share.rank else x.new_empty(0, self._columns[-1].stop)
        if self.share.rank:
            self._link.exchange([(0, x)], [])
            return x
        parts = [x, *(x.new_empty(len(x), len(columns)) for columns in self._columns[1:])]
        self._link.exchange([], [(rank, parts[rank]) for rank in self._others])
        return torch.cat(parts, 1)

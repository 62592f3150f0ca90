"""Puts received blocks in their places on a device: as `transfer.host.landing`, but with copies that a stream carries
out.

A transport calls `land` for some blocks once it may read where they are, and `landed` once that has ended on the
stream; what either enqueues has ended before the receive is reported, or its cancel confirmed. Digests are made on the
way of the copy, and come to the host behind it: when it has ended, they are there, and nothing waits for the copies
that follow. The numbers of a receive's blocks go to the device once.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.kv.layout import KVLayout
from transfer.digest import Verifier, combine
from transfer.gpu.device import Device, words_of
from transfer.handoff.commands import IncomingBlock, Rows
from transfer.handoff.negotiation import digest_shape, held_heads
from transfer.transport import BlockSlice


class DeviceLanding(Protocol):
    """Neither call raises, and neither waits. Both are made within the stream that carries out the copies."""

    wrong: int

    def land(self, first: int, source: Tensor, blocks: Tensor) -> None:
        """Enqueue the copy of blocks `first ..` of the receive, which are `source[blocks]`: int64 `[.., words]` of what
        travels of a block; `blocks` int32, on the device."""

    def landed(self) -> bool:
        """The copies of the oldest `land` have ended. True where it has enqueued more."""


class Numbers(NamedTuple):
    """What a receive says of its blocks, on the device, int32 `[n]` each: where they go, their valid tokens, and 0, 1
    and so on."""

    targets: Tensor
    tokens: Tensor
    order: Tensor


class _Landing(NamedTuple):
    """Some blocks on their way: they are `kept[places]`, and `digests` are on the host once their copy has ended."""

    blocks: Sequence[IncomingBlock]
    kept: Tensor
    places: Tensor
    numbers: Numbers
    digests: Tensor


class DeviceInPlace:
    """Equal layouts: blocks land where they stay, in `memory`, uint8 `[blocks, block_bytes]`. A subclass stores blocks
    that come as another `unit` than `layout`, where their digests fit. Raises ValueError if `unit` has heads that
    `layout` has not."""

    def __init__(
        self,
        device: Device,
        memory: Tensor,
        layout: KVLayout,
        unit: KVLayout,
        blocks: Sequence[IncomingBlock],
        verifier: Verifier,
    ) -> None:
        held_heads(unit, layout)
        self.wrong = 0
        self._device = device
        self._memory = memory
        self._layout = layout
        self._unit = unit
        self._blocks = blocks
        self._verifier = verifier
        self._numbers: Numbers | None = None
        self._pending: list[_Landing] = []

    def land(self, first: int, source: Tensor, blocks: Tensor) -> None:
        count = len(blocks)
        if self._numbers is None:
            told = [block.rows[0].target for block in self._blocks], [block.tokens for block in self._blocks]
            self._numbers = Numbers(*self._device.numbers(*told, range(len(self._blocks))))
        targets, tokens, order = self._numbers
        numbers = Numbers(targets[first : first + count], tokens[first : first + count], order[:count])
        by_head = source.unflatten(1, (self._unit.kv_heads, -1))
        target, places = self._target(by_head, blocks, numbers)
        digests = self._device.copy(by_head, target, blocks, places, digest_shape(self._unit), numbers.tokens)
        assert digests is not None
        some = self._blocks[first : first + count]
        kept = source if target is None else target
        self._pending.append(_Landing(some, kept, places, numbers, self._device.fetch(digests)))

    def landed(self) -> bool:
        some, kept, places, numbers, digests = self._pending.pop(0)
        pairs = zip(some, unsigned(digests), strict=True)
        self.wrong += sum(
            not self._verifier.fits(block, partial(combine, heads, block.tokens)) for block, heads in pairs
        )
        # Where one is wrong, the receive has failed: nothing more needs to be stored.
        return not self.wrong and self._store(some, kept, places, numbers)

    def _target(self, by_head: Tensor, places: Tensor, numbers: Numbers) -> tuple[Tensor | None, Tensor]:
        """Return where blocks, now at `by_head[places]`, are copied to while they are digested; None and `places`
        where they are digested only."""
        every = BlockSlice(0, self._layout.block_bytes, self._layout.block_bytes)
        pool = words_of(self._memory, every).unflatten(1, (self._layout.kv_heads, -1))
        return pool, numbers.targets

    def _store(self, blocks: Sequence[IncomingBlock], words: Tensor, places: Tensor, numbers: Numbers) -> bool:
        """Enqueue what brings `words[places]`, the blocks as they came, into the pool; False if they are there."""
        return False


class DeviceRepacked(DeviceInPlace):
    """Another size of blocks, or range of heads: into a private buffer, and then row by row into the pool."""

    def _target(self, by_head: Tensor, places: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
        return by_head.new_empty(len(places), *by_head.shape[1:]), numbers.order

    def _store(self, blocks: Sequence[IncomingBlock], words: Tensor, places: Tensor, numbers: Numbers) -> bool:
        for block, one in zip(blocks, words, strict=True):
            sources = planes(one.view(torch.uint8), self._unit)
            for rows in block.rows:
                store(self._memory, self._layout, self._unit, rows, sources)
        return True


def store(memory: Tensor, layout: KVLayout, unit: KVLayout, rows: Rows, sources: Sequence[Tensor]) -> None:
    """Enqueue the copy of `rows` of a block that came as `unit`, its planes `sources`, into a pool of `layout`."""
    block = memory[rows.target].view(layout.kv_heads, -1)[held_heads(unit, layout)]
    for source, target in zip(sources, planes(block, layout), strict=True):
        mine = target[:, :, :, rows.at : rows.at + rows.count]
        mine.copy_(source[:, :, :, rows.first : rows.first + rows.count], non_blocking=True)


def planes(heads: Tensor, layout: KVLayout) -> list[Tensor]:
    """Views `[heads, layers, 2, block_size, bytes]` of `heads`, uint8 `[heads, head_bytes]`: the rows and, behind them,
    the scales of 8-bit ones."""
    shape = (layout.layers, 2, layout.block_size)
    rows = layout.layers * 2 * layout.block_size
    return [
        heads[:, plane.offset : plane.offset + rows * plane.row_bytes].unflatten(-1, (*shape, -1))
        for plane in layout.planes
    ]


def unsigned(digests: Tensor) -> list[list[int]]:
    """Digests of a device, int64 `[n, heads]`, as they are combined. Where they are still there, waits for what makes
    them, and for all that its stream has to do."""
    found: list[list[int]] = digests.cpu().numpy().view(np.uint64).tolist()
    return found


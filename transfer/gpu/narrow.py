"""Blocks that travel in 8 bits, on a device: `transfer.host.repacked.convert` by the kernel of `kernels.block_convert`,
which reads blocks where they lie and writes codes and scales into the buffer that is sent, and the other way round."""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from engine.kv.layout import KVLayout
from engine.storage.paged import pool_views
from kernels.pool import KVPool
from transfer.gpu.device import Device
from transfer.gpu.landing import DeviceInPlace, Numbers, planes, store
from transfer.handoff.commands import IncomingBlock
from transfer.handoff.negotiation import digest_shape, held_heads

BLOCKS_PER_DIGEST = 32
"""Converted at a time to make digests of what will be sent."""


def as_pool(words: Tensor, form: KVLayout) -> KVPool:
    """int64 `[blocks, words]`, contiguous, as blocks of `form`. Raises ValueError where kernels cannot read those."""
    return KVPool(*pool_views(words.view(torch.uint8), form))


def heads_of(memory: Tensor, layout: KVLayout, form: KVLayout) -> KVPool:
    """The heads of `form` in blocks of `layout`, uint8 `[blocks, block_bytes]`. Raises ValueError where kernels cannot
    read those."""
    payload, _ = pool_views(memory, layout)
    return KVPool(payload[:, held_heads(form, layout)])


class DevicePacked:
    """The part that travels of the blocks of one send; converted when there is a place for it."""

    def __init__(self, device: Device, source: KVPool, form: KVLayout, blocks: Sequence[int]) -> None:
        self._device = device
        self._source = source
        self._form = form
        self._blocks = blocks

    def pack(self, first: int, words: Tensor) -> None:
        """Enqueue the conversion of blocks `first ..` into int64 `[blocks, words]`, on the current stream."""
        some = self._blocks[first : first + len(words)]
        sources, order = self._device.numbers(some, range(len(words)))
        self._device.convert(self._source, as_pool(words, self._form), sources, order)

    def digests(self, at: Sequence[int], tokens: Sequence[int]) -> list[Tensor]:
        """int64 `[n, heads]` a piece: of what will be sent of the blocks numbered `at`, with their valid tokens."""
        shape, found = digest_shape(self._form), []
        for first in range(0, len(at), BLOCKS_PER_DIGEST):
            numbers = at[first : first + BLOCKS_PER_DIGEST]
            some = [self._blocks[number] for number in numbers]
            words = torch.empty(
                len(some), self._form.block_bytes // 8, dtype=torch.int64, device=self._source.payload.device
            )
            of_these = tokens[first : first + BLOCKS_PER_DIGEST]
            sources, order, valid = self._device.numbers(some, range(len(some)), of_these)
            self._device.convert(self._source, as_pool(words, self._form), sources, order)
            by_head = words.unflatten(1, (self._form.kv_heads, -1))
            made = self._device.copy(by_head, None, order, order, shape, valid)
            assert made is not None
            found.append(made)
        return found


class DeviceWidened(DeviceInPlace):
    """Blocks that come in 8 bits: by one kernel where both have blocks of one size, by way of a private buffer
    elsewhere. Raises ValueError where kernels cannot read the pool's."""

    def _target(self, by_head: Tensor, places: Tensor, numbers: Numbers) -> tuple[None, Tensor]:
        return None, places

    def _store(self, blocks: Sequence[IncomingBlock], words: Tensor, places: Tensor, numbers: Numbers) -> bool:
        arrived = as_pool(words, self._unit)
        if self._unit.block_size == self._layout.block_size:
            target = heads_of(self._memory, self._layout, self._unit)
            self._device.convert(arrived, target, places, numbers.targets)
            return True
        wide = msgspec.structs.replace(self._unit, dtype=self._layout.dtype)
        buffer = words.new_empty(len(blocks), wide.block_bytes // 8)
        self._device.convert(arrived, as_pool(buffer, wide), places, numbers.order)
        for block, made in zip(blocks, buffer, strict=True):
            sources = planes(made.view(torch.uint8).view(wide.kv_heads, -1), wide)
            for rows in block.rows:
                store(self._memory, self._layout, wide, rows, sources)
        return True

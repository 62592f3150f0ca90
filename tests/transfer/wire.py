"""What tests need in order to drive a transport by hand: whole blocks, landed where the test says."""

import os
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.backends.gpu.pool import DeviceKV
from engine.kv.layout import KVLayout
from engine.storage.paged import PagedKV
from engine.types import BlockId, Incarnation
from transfer.config import NcclConfig, TransferConfig, nccl_environment
from transfer.gpu.device import flat, words_of
from transfer.host.loopback import LoopbackHub
from transfer.registry import open_transport
from transfer.transport import BlockSlice, Landing, Transport

WAYS = ("loopback", "shm", "tcp", "cuda_ipc", "nccl")
ON_DEVICE = ("cuda_ipc", "nccl")
GPU_VARIABLE = "HEADRACE_TEST_SHARE_GPU"
"""How two processes of a test share the one GPU over NCCL (`NcclConfig.share_gpu`); processes of a test inherit it."""
Pool = PagedKV | DeviceKV


def whole(layout: KVLayout) -> BlockSlice:
    return BlockSlice(0, layout.block_bytes, layout.block_bytes)


class Into:
    """A landing in blocks of a pool, or in `span` of each; `order` are the blocks that are said to be there."""

    def __init__(self, pool: PagedKV, targets: Sequence[int], span: BlockSlice | None = None) -> None:
        self.order: list[int] = []
        self._pool = pool
        self._targets = targets
        self._span = span or whole(pool.layout)

    def place(self, at: int) -> memoryview:
        assert at == len(self.order), "a block is begun before the one before it has ended"
        block = self._pool.block(BlockId(self._targets[at]))
        return block[self._span.offset : self._span.offset + self._span.nbytes]

    def landed(self, at: int) -> None:
        self.order.append(at)


class IntoDevice:
    """The same landing for transports of a device."""

    wrong = 0

    def __init__(
        self, transport: Transport, pool: Pool, targets: Sequence[int], span: BlockSlice | None = None
    ) -> None:
        assert transport.device is not None
        self.order: list[int] = []
        self._device = transport.device
        self._targets = targets
        self._words = words_of(pool.memory, span or whole(pool.layout))
        self._landing: list[range] = []

    def land(self, first: int, source: Tensor, blocks: Tensor) -> None:
        some = range(first, first + len(blocks))
        (words, shape), (pool, _) = flat(source), flat(self._words)
        targets = self._device.numbers([self._targets[at] for at in some])[0]
        self._device.copy(words, pool, blocks, targets, shape)
        self._landing.append(some)

    def landed(self) -> bool:
        self.order += self._landing.pop(0)
        return False


def into(
    transport: Transport, pool: Pool, targets: Sequence[int], span: BlockSlice | None = None
) -> Landing | IntoDevice:
    if transport.device is not None:
        return IntoDevice(transport, pool, targets, span)
    assert isinstance(pool, PagedKV)
    return Into(pool, targets, span)


def open_pool(layout: KVLayout, blocks: int, device: str) -> Pool:
    return PagedKV(layout, blocks) if device == "cpu" else DeviceKV(layout, blocks, device)


def open_any(
    kind: str,
    pool: Pool,
    me: Incarnation,
    hub: LoopbackHub | None = None,
    config: TransferConfig | None = None,
) -> Transport:
    """Open a transport; a GPU's, over memory of this host, runs on the fake device."""
    config = config or TransferConfig()
    if kind in ON_DEVICE and pool.device == "cpu":
        from tests.transfer.fake_device import open_fake

        return open_fake(kind, pool, me, config)
    if kind in ON_DEVICE:
        from tests.transfer.fake_device import TESTS

        share = os.environ.get(GPU_VARIABLE, TESTS.share_gpu)
        nccl = msgspec.convert({**msgspec.structs.asdict(TESTS), "share_gpu": share}, NcclConfig)
        os.environ.update(nccl_environment(nccl, str(os.getpid())))
        config = msgspec.structs.replace(config, nccl=nccl)
    return open_transport(kind, pool, me, config, hub)


def put(pool: Pool, block: int, content: bytes) -> None:
    pool.memory[block].copy_(torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()))


def get(pool: Pool, block: int) -> bytes:
    found: bytes = pool.memory[block].cpu().numpy().tobytes()
    return found

"""Ranks with a device each, which only pretends: Triton's interpreter, a recorder of host memory, and the fake libnccl.
`python -m tests.engine.ranks.pretended` is the process of one other than rank 0."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor

import transfer.ranks.follower
from engine.backends.gpu import runner
from engine.backends.gpu.graphs import Recording
from engine.backends.gpu.pool import DeviceKV, as_words
from engine.config import EngineConfig
from engine.kv.layout import KVLayout
from engine.ranks.device_follower import DeviceFollower
from engine.ranks.devices import RankLink
from engine.ranks.follower import main
from engine.ranks.sums import RankError
from engine.storage.paged import KVTensors, PoolFile, header_bytes, map_blocks
from engine.types import Incarnation
from tests.engine.backends.gpu.recording import FakeRecorder
from tests.transfer.fake_device import FakeStream, library_path, open_fake
from transfer.config import TransferConfig
from transfer.gpu.device import DeviceMemory
from transfer.nccl.exchange import NcclExchange
from transfer.nccl.library import NcclLibrary
from transfer.transport import KVMemory, Transport
from worker.rank_devices import RankExchange, translated

CARD = 1 << 26
SMALL_VARIABLE = "PRETENDED_SMALL_RANK"
"""The rank of this number has half a card free."""
STEPS_VARIABLE = "PRETENDED_FEWER_BLOCKS"
"""The rank of this number makes a pool of one block less than it is told."""
UNMAPPED_VARIABLE = "PRETENDED_UNMAPPED"
"""Set: nothing of a rank's can be mapped by another."""


class Waited(RankExchange):
    """On a stream of the fake device: what is called next here runs at once, so each exchange is waited for, as a
    device would wait: until the others come, or until an abort."""

    def __init__(self, name: bytes, rank: int, ranks: int, is_lost: Callable[[], bool]) -> None:
        self._stream = FakeStream()
        own = lambda: self._stream.handle  # noqa: E731
        super().__init__(NcclExchange(NcclLibrary(library_path()), name, rank, ranks, own, 60.0, is_lost), rank)
        self.count, self.aborted = 0, False
        inner = self.abort

        def abort() -> None:
            self.aborted = True
            inner()

        self.abort = abort

    def exchange(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        super().exchange(outgoing, incoming)
        self.count += 1
        event, deadline_s = self._stream.record(), time.monotonic() + 120
        while not event.done():
            if time.monotonic() > deadline_s:
                raise RankError(self._rank, "waits for ever")
            time.sleep(0.0002)
        with self.held():  # a device goes on with garbage after an abort; the interpreter's kernels would fail by it
            pass


class ExchangeRecorder(FakeRecorder):
    """Records calls of NCCL too, with the addresses that they were called with."""

    def __init__(self, link: Waited) -> None:
        super().__init__()
        self._link = link

    def record(self, work: Callable[[], Tensor]) -> Recording:
        with self._noted():
            return super().record(work)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        plain = self._link.exchange

        def noted(outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
            self.note(plain, outgoing, incoming)

        self._link.exchange = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._link.exchange


class Card:
    """Memory of a card, of which a rank has what the others have, or less."""

    total_bytes = CARD

    def __init__(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes

    def free_bytes(self) -> int:
        return self._free_bytes

    def reserved_bytes(self) -> tuple[int, int]:
        return 0, 0

    def release(self) -> None:
        """Keep nothing."""


class MappedKV(DeviceKV):
    """A pool that others of this host map, as they would map a card's."""

    def __init__(self, layout: KVLayout, blocks: int, device: torch.device | str, arch: int = 90) -> None:
        super().__init__(layout, blocks, device, arch)
        file = PoolFile("headrace-kv", blocks, layout.block_bytes)
        memory = torch.frombuffer(file.map, dtype=torch.uint8, offset=header_bytes(blocks))
        memory = memory.view(blocks, layout.block_bytes)
        KVTensors.__init__(self, layout, memory, file)
        self._words = as_words(memory.view(blocks, layout.kv_heads, layout.head_bytes))


def open_pretended(memory: KVMemory, me: Incarnation, config: TransferConfig, host: str) -> dict[str, Transport]:
    """Stands for `transfer.registry.open_transports`."""
    return {config.transport: open_fake(config.transport, cast("DeviceMemory", memory), me, config)}


class PretendedDevices:
    """Fulfils `engine.ranks.devices.Devices`; `link` is the one that was joined."""

    program = "tests.engine.ranks.pretended"

    def __init__(self) -> None:
        self.link: Waited | None = None
        self._rank = 0
        self._shared: list[PoolFile] = []

    def open(self, config: EngineConfig, rank: int) -> torch.device:
        self._rank = rank
        fewer = int(os.environ.get(STEPS_VARIABLE) == str(rank))
        runner.DeviceKV = lambda layout, blocks, *more: MappedKV(layout, blocks - fewer, *more)  # type: ignore
        return torch.device("cpu")

    def unique_id(self) -> bytes:
        return NcclLibrary(library_path()).unique_id()

    def join(self, unique_id: bytes, rank: int, ranks: int, is_lost: Callable[[], bool]) -> RankLink:
        with translated(rank):
            self.link = Waited(unique_id, rank, ranks, is_lost)
        return self.link

    def shared(self, nbytes: int, ranks: int) -> tuple[Tensor, bytes]:
        if os.environ.get(UNMAPPED_VARIABLE):
            raise ValueError("devices that cannot map each other")
        self._shared.append(file := PoolFile("headrace-sums", 1, nbytes))
        return map_blocks(file.fd, 1, nbytes).view(-1), f"/proc/{os.getpid()}/fd/{file.fd}".encode()

    def recorder(self, link: RankLink) -> Callable[[], ExchangeRecorder]:
        assert isinstance(link, Waited)
        return lambda: ExchangeRecorder(link)

    def export(self, kv: KVTensors) -> bytes:
        return b"" if os.environ.get(UNMAPPED_VARIABLE) else f"/proc/{os.getpid()}/fd/{kv.fd}".encode()

    def map(self, name: bytes, blocks: int, block_bytes: int) -> Tensor:
        if not name:
            raise ValueError("a pool without a name")
        with open(name, "r+b") as file:
            return map_blocks(file.fileno(), blocks, block_bytes)

    def memory(self) -> Card:
        return Card(CARD // 2 if os.environ.get(SMALL_VARIABLE) == str(self._rank) else CARD)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve = partial(transfer.ranks.follower.serve, open_ways=open_pretended)
    main(opened=partial(DeviceFollower, devices=PretendedDevices(), serve=serve))

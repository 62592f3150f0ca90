"""KV blocks between GPU workers of one host: the receiver maps the sender's pool and copies out of it.

As `shm`, with the copies on a stream of the receiver's device: the mapping could be written through, but nobody does.
Generations are read from the header that the owner keeps in host memory, before the copy is enqueued and after it has
ended; the owner advances one before it enqueues anything that writes to the block, so equal ones mean that no byte
changed. Two workers on one device are a case like any other. The memory of a peer that died stays mapped until it is
forgotten here.
"""

import functools
import time
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.messages import Endpoint
from engine.storage.paged import header_bytes
from engine.types import BlockId, Incarnation
from transfer.gpu.device import Device, DeviceMemory, words_of
from transfer.gpu.landing import DeviceLanding
from transfer.gpu.pulse import Pulse
from transfer.gpu.scatter import Copy, Scatter
from transfer.host.peer_file import PeerFile, PoolFileDetails, peer_pool_file, pool_file
from transfer.host.pull import Pull, PullTransport, expect
from transfer.reactor import Reactor
from transfer.transport import BlockSlice, Outcome, Ticket, TransferError

BLOCKS_PER_COPY = 64
COPIES = 4
"""Enqueued at once, so that the device does not wait for this thread."""


class CudaIpcDetails(PoolFileDetails, frozen=True):
    """`handle` names the pool, whose generations are in the file."""

    handle: bytes
    gpu: str


class _Mapping(PeerFile):
    """A peer's pool, of which `span` of each block is read."""

    def __init__(self, details: CudaIpcDetails, span: BlockSlice, device: Device) -> None:
        super().__init__(details, header_bytes(details.blocks))
        self.handle = details.handle
        pool = device.open(details.handle, details.blocks, details.block_bytes)
        self.words: Tensor = words_of(pool, span)


class _Named(NamedTuple):
    """The blocks of a receive, as the peer counts them: on the device, int32 `[n]`, and here, uint64 `[n, 2]`, each
    with its generation."""

    numbers: Tensor
    remote: npt.NDArray[np.uint64]


_Pull = Pull[_Mapping, DeviceLanding]


class CudaIpcTransport(PullTransport[_Mapping, DeviceLanding]):
    """`transfer.transport.Transport[DeviceLanding]` over memory that processes of one host share."""

    name = "cuda_ipc"

    # Mutable state: also the copies under way, of the receives in front, whose numbers of blocks are on the device.

    def __init__(self, memory: DeviceMemory, device: Device) -> None:
        if memory.fd < 0:
            raise TransferError("cuda_ipc needs a pool that keeps its generations in a memfd")
        self.device = device
        self._memory = memory
        self._handle = device.export(memory)
        self._scatter = Scatter(device)
        self._named: dict[Ticket, _Named] = {}
        self._pulse = Pulse()
        reactor = Reactor()
        reactor.watch(self._pulse, self._pulse.hush)
        super().__init__(reactor)

    def describe(self, peer: Incarnation) -> Endpoint:
        file = msgspec.structs.asdict(pool_file(self._memory))
        details = CudaIpcDetails(**file, handle=self._handle, gpu=self.device.name)
        return Endpoint(transport=self.name, details=msgspec.to_builtins(details))

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: BlockSlice, received: BlockSlice) -> None:
        details = peer_pool_file(endpoint, CudaIpcDetails, received)
        self.disconnect(peer)
        self._peers[peer] = _Mapping(details, received, self.device)

    def disconnect(self, peer: Incarnation) -> None:
        mapping = self._peers.get(peer)
        super().disconnect(peer)
        if mapping is not None and all(o.handle != mapping.handle for o in self._peers.values()):
            self.device.shut(mapping.handle)

    def close(self) -> None:
        super().close()
        self._pulse.close()

    def _advance(self) -> bool:
        ended = self._scatter.poll()
        for copy in ended:
            assert isinstance(copy.owner, Pull)
            copy.owner.ended += len(copy.blocks)
            copy.owner.error = copy.owner.error or copy.error
        self._finish_ended()
        for pull in self._pulls:
            while not pull.error and pull.begun < len(pull.move.remote) and len(self._scatter) < COPIES:
                self._begin(pull)
        self._finish_ended()
        return self._pulse.set(bool(self._scatter), time.monotonic(), afresh=bool(ended))

    def _begin(self, pull: _Pull) -> None:
        some = slice(pull.begun, pull.begun + BLOCKS_PER_COPY)
        try:
            if not pull.begun:
                self._named[pull.ticket] = self._name(pull)
            numbers, remote = self._named[pull.ticket]
            check = functools.partial(_expect, pull.source, remote[some])
            check()
        except TransferError as error:
            pull.error = f"{type(error).__name__}: {error}"
            return
        copy = Copy(pull, pull.landing, pull.begun, pull.source.words, numbers[some], check=check)
        pull.begun += len(remote[some])
        self._scatter.begin(copy)

    def _name(self, pull: _Pull) -> _Named:
        """Raises TransferError for numbers that the peer's blocks do not have."""
        try:
            remote = np.array(pull.move.remote, dtype=np.uint64)
        except OverflowError as error:
            raise TransferError(f"not blocks and their generations: {error}") from error
        pull.source.check_blocks(remote[:, 0])
        return _Named(self._scatter.numbers(remote[:, 0].tolist()), remote)

    def _finish_ended(self) -> None:
        """A receive has ended when nothing of it is under way and nothing more will be."""
        for pull in list(self._pulls):
            if pull.ended == pull.begun and (pull.error or pull.ended == len(pull.move.remote)):
                self._finish(pull, Outcome.FAILED if pull.error else Outcome.DONE, pull.error)

    def _finish(self, pull: _Pull, outcome: Outcome, error: str = "") -> None:
        self._scatter.drop(pull)
        self._named.pop(pull.ticket, None)
        super()._finish(pull, outcome, error)


def _expect(source: _Mapping, remote: npt.NDArray[np.uint64]) -> None:
    """As `expect`, of all blocks at once."""
    if not source.are_at(remote[:, 0], remote[:, 1]):
        expect(source, [(BlockId(block), generation) for block, generation in remote.tolist()])

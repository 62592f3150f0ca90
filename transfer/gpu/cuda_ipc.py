"""KV blocks between GPU workers of one host: the receiver maps the sender's pool and copies out of it.

As `shm`, with the copies on a stream of the receiver's device: the mapping could be written through, but nobody does.
Generations are read from the header that the owner keeps in host memory, before the copy is enqueued and after it has
ended; the owner advances one before it enqueues anything that writes to the block, so equal ones mean that no byte
changed. Two workers on one device are a case like any other. The memory of a peer that died stays mapped until it is
forgotten here.
"""

import functools
import os
import time
from collections import deque

import msgspec
import numpy as np
from torch import Tensor

from engine.messages import Endpoint
from engine.storage.paged import header_bytes
from engine.types import BlockId, Incarnation
from transfer.gpu.device import Device, DeviceMemory, words_of
from transfer.gpu.landing import DeviceLanding
from transfer.gpu.scatter import Copy, Scatter
from transfer.gpu.wakeup import Wakeup
from transfer.host.peer_file import map_peer_file
from transfer.transport import (
    BlockSlice,
    Completion,
    Move,
    Outcome,
    StaleBlockError,
    Ticket,
    TransferError,
)

BLOCKS_PER_COPY = 32
COPIES = 4
"""Enqueued at once, so that the device does not wait for this thread."""


class CudaIpcDetails(msgspec.Struct, frozen=True):
    """`handle` names the pool, `fd` of process `pid` the file with its generations, `device` and `inode` that file."""

    handle: bytes
    pid: int
    fd: int
    device: int
    inode: int
    blocks: int
    block_bytes: int
    gpu: str


class _Mapping:
    """A peer's pool, of which `span` of each block is read."""

    def __init__(self, details: CudaIpcDetails, span: BlockSlice, device: Device) -> None:
        size = header_bytes(details.blocks)
        self._map = map_peer_file(details.pid, details.fd, details.device, details.inode, size)
        self._generations = np.frombuffer(self._map, dtype=np.uint64, count=details.blocks)
        self.handle = details.handle
        self.blocks = details.blocks
        self.words: Tensor = words_of(device.open(details.handle, details.blocks, details.block_bytes), span)

    def expect(self, remote: tuple[tuple[BlockId, int], ...]) -> None:
        """Raises StaleBlockError where a block is not the one that was offered any more."""
        for block, generation in remote:
            if not 0 <= block < self.blocks:
                raise TransferError(f"the peer has no block {block}")
            now = int(self._generations[block])
            if now != generation:
                raise StaleBlockError(f"block {block} is at generation {now}, {generation} was offered")


class _Pull:
    __slots__ = ("begun", "ended", "error", "landing", "mapping", "move", "peer", "ticket")

    def __init__(
        self, ticket: Ticket, peer: Incarnation, mapping: _Mapping, move: Move, landing: DeviceLanding
    ) -> None:
        self.ticket = ticket
        self.peer = peer
        self.mapping = mapping
        self.move = move
        self.landing = landing
        self.begun = 0
        self.ended = 0
        self.error = ""


class CudaIpcTransport:
    """`transfer.transport.Transport[DeviceLanding]` over memory that processes of one host share."""

    name = "cuda_ipc"
    reads_remotely = True
    scrapped_bytes = 0  # what nobody wants is not read

    # Mutable state: the peers' mappings, and the receives in order; those in front may have copies under way.

    def __init__(self, memory: DeviceMemory, device: Device) -> None:
        if memory.fd < 0:
            raise TransferError("cuda_ipc needs a pool that keeps its generations in a memfd")
        self.device = device
        self._memory = memory
        self._handle = device.export(memory)
        self._peers: dict[Incarnation, _Mapping] = {}
        self._pulls: deque[_Pull] = deque()
        self._scatter = Scatter(device)
        self._completions: list[Completion] = []
        self._last_ticket = 0
        self._wakeup = Wakeup()

    def describe(self) -> Endpoint:
        found = os.fstat(self._memory.fd)
        details = CudaIpcDetails(
            handle=self._handle,
            pid=os.getpid(),
            fd=self._memory.fd,
            device=found.st_dev,
            inode=found.st_ino,
            blocks=self._memory.blocks,
            block_bytes=self._memory.block_bytes,
            gpu=self.device.name,
        )
        return Endpoint(transport=self.name, details=msgspec.to_builtins(details))

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: BlockSlice, received: BlockSlice) -> None:
        try:
            details = msgspec.convert(endpoint.details, CudaIpcDetails)
        except msgspec.ValidationError as error:
            raise TransferError(f"not a cuda_ipc endpoint: {error}") from error
        if details.block_bytes != received.block_bytes or details.blocks <= 0:
            raise TransferError(f"the peer's blocks are not those of its layout: {details}")
        self.disconnect(peer)
        self._peers[peer] = _Mapping(details, received, self.device)

    def send(self, peer: Incarnation, move: Move, packed: None = None) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"{peer} is not connected")
        ticket = self._ticket()
        self._complete(ticket, Outcome.DONE)
        return ticket

    def recv(self, peer: Incarnation, move: Move, landing: DeviceLanding | None) -> Ticket:
        mapping = self._peers.get(peer)
        if mapping is None:
            raise TransferError(f"{peer} is not connected")
        ticket = self._ticket()
        if landing is None:
            self._complete(ticket, Outcome.DONE)
        else:
            self._pulls.append(_Pull(ticket, peer, mapping, move, landing))
            self._wakeup.ring()
        return ticket

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def poll(self, timeout_s: float) -> list[Completion]:
        self._wakeup.wait(timeout_s)
        ended = self._scatter.poll()
        for copy in ended:
            assert isinstance(copy.owner, _Pull)
            copy.owner.ended += len(copy.blocks)
            copy.owner.error = copy.owner.error or copy.error
        self._finish_pulls()
        for pull in self._pulls:
            while not pull.error and pull.begun < len(pull.move.remote) and len(self._scatter) < COPIES:
                self._begin(pull)
        self._finish_pulls()
        self._wakeup.beat(bool(self._scatter), time.monotonic(), afresh=bool(ended))
        self._wakeup.hush()
        completions, self._completions = self._completions, []
        return completions

    def cancel(self, ticket: Ticket) -> bool:
        for pull in self._pulls:
            if pull.ticket == ticket:
                self._scatter.drop(pull)
                self._pulls.remove(pull)
                self._complete(ticket, Outcome.CANCELLED)
                return True
        return False

    def disconnect(self, peer: Incarnation) -> None:
        mapping = self._peers.pop(peer, None)
        for pull in [pull for pull in self._pulls if pull.peer == peer]:
            self._scatter.drop(pull)
            self._pulls.remove(pull)
            self._complete(pull.ticket, Outcome.FAILED, "disconnected")
        if mapping is not None and all(o.handle != mapping.handle for o in self._peers.values()):
            self.device.shut(mapping.handle)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._wakeup.close()

    def _begin(self, pull: _Pull) -> None:
        first = pull.begun
        remote = pull.move.remote[first : first + BLOCKS_PER_COPY]
        pull.begun += len(remote)
        try:
            pull.mapping.expect(remote)
        except TransferError as error:
            pull.error = f"{type(error).__name__}: {error}"
            pull.begun = first
            return
        blocks = [block for block, _ in remote]
        check = functools.partial(pull.mapping.expect, remote)
        words = pull.mapping.words
        self._scatter.begin(Copy(pull, pull.landing, first, words, blocks, check=check))

    def _finish_pulls(self) -> None:
        """A receive has ended when nothing of it is under way and nothing more will be."""
        for pull in list(self._pulls):
            if pull.ended < pull.begun or not (pull.error or pull.ended == len(pull.move.remote)):
                continue
            self._pulls.remove(pull)
            outcome = Outcome.FAILED if pull.error else Outcome.DONE
            self._complete(pull.ticket, outcome, pull.error)

    def _complete(self, ticket: Ticket, outcome: Outcome, error: str = "") -> None:
        self._completions.append(Completion(ticket, outcome, error))
        self._wakeup.ring()

    def _ticket(self) -> Ticket:
        self._last_ticket += 1
        return Ticket(self._last_ticket)

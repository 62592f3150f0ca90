"""KV blocks between processes of one host: the receiver maps the sender's memfd read-only and copies out of it.

The mapping is opened through the owner's `/proc` entry, so the peer must run as the same user (or be allowed to trace
it) in the same PID namespace. It goes away with the last process that holds it; nothing has a name, nothing is left.
"""

import os

import msgspec
import numpy as np
import numpy.typing as npt

from engine.messages import Endpoint
from engine.storage.paged import header_bytes
from engine.types import BlockId, Incarnation
from transfer.host.peer_file import map_peer_file
from transfer.host.pull import Puller
from transfer.transport import (
    BlockSlice,
    Completion,
    KVMemory,
    Landing,
    Move,
    Outcome,
    Ticket,
    TransferError,
)


class ShmDetails(msgspec.Struct, frozen=True):
    """`device` and `inode` name the file itself: a recycled pid or descriptor number leads to another one."""

    pid: int
    fd: int
    device: int
    inode: int
    blocks: int
    block_bytes: int


class _Mapping:
    """A peer's whole pool, read-only, of which `span` of each block is read. Fulfils `transfer.host.pull.PeerPool`."""

    def __init__(self, details: ShmDetails, span: BlockSlice) -> None:
        header = header_bytes(details.blocks)
        size = header + details.blocks * details.block_bytes
        self._map = map_peer_file(details.pid, details.fd, details.device, details.inode, size)
        if self._map.size() != size:
            raise TransferError(f"the peer's pool has {self._map.size()} bytes, expected {size}")
        self._generations = np.frombuffer(self._map, dtype=np.uint64, count=details.blocks)
        rows = np.frombuffer(self._map, dtype=np.uint8, offset=header)
        blocks = rows.reshape(details.blocks, details.block_bytes)
        self._blocks = blocks[:, span.offset : span.offset + span.nbytes]

    def read(self, block: BlockId) -> npt.NDArray[np.uint8]:
        if not 0 <= block < len(self._blocks):
            raise TransferError(f"the peer has no block {block}")
        return self._blocks[block]

    def generation(self, block: BlockId) -> int:
        return int(self._generations[block])


class ShmTransport:
    """`transfer.transport.Transport` over shared memory."""

    name = "shm"
    device = None
    reads_remotely = True
    scrapped_bytes = 0  # what nobody wants is not read

    def __init__(self, memory: KVMemory) -> None:
        if memory.fd < 0:
            raise TransferError("shm needs a pool that lives in a memfd")
        self._memory = memory
        self._peers: dict[Incarnation, _Mapping] = {}
        self._puller = Puller()

    def describe(self) -> Endpoint:
        found = os.fstat(self._memory.fd)
        details = ShmDetails(
            pid=os.getpid(),
            fd=self._memory.fd,
            device=found.st_dev,
            inode=found.st_ino,
            blocks=self._memory.blocks,
            block_bytes=self._memory.block_bytes,
        )
        return Endpoint(transport=self.name, details=msgspec.structs.asdict(details))

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: BlockSlice, received: BlockSlice) -> None:
        try:
            details = msgspec.convert(endpoint.details, ShmDetails)
        except msgspec.ValidationError as error:
            raise TransferError(f"not a shm endpoint: {error}") from error
        if details.block_bytes != received.block_bytes or details.blocks <= 0:
            raise TransferError(f"the peer's blocks are not those of its layout: {details}")
        self._peers[peer] = _Mapping(details, received)

    def send(self, peer: Incarnation, move: Move, packed: None = None) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"{peer} is not connected")
        ticket = self._puller.ticket()
        self._puller.finish(ticket, Outcome.DONE)
        return ticket

    def recv(self, peer: Incarnation, move: Move, landing: Landing | None) -> Ticket:
        mapping = self._peers.get(peer)
        if mapping is None:
            raise TransferError(f"{peer} is not connected")
        ticket = self._puller.ticket()
        self._puller.pull(ticket, peer, mapping, move, landing)
        return ticket

    def fileno(self) -> int:
        return self._puller.bell.fileno()

    def poll(self, timeout_s: float) -> list[Completion]:
        self._puller.bell.wait(timeout_s)
        return self._puller.run()

    def cancel(self, ticket: Ticket) -> bool:
        return self._puller.cancel(ticket)

    def disconnect(self, peer: Incarnation) -> None:
        self._puller.drop_peer(peer)
        self._peers.pop(peer, None)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._puller.bell.close()

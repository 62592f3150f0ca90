"""KV blocks between processes of one host: the receiver maps the sender's memfd read-only and copies out of it.

The mapping is opened through the owner's `/proc` entry, so the peer must run as the same user (or be allowed to trace
it) in the same PID namespace. It goes away with the last process that holds it; nothing has a name, nothing is left.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from engine.messages import Endpoint
from engine.storage.paged import header_bytes
from engine.types import BlockId, Incarnation
from transfer.host.peer_file import PeerFile, PoolFileDetails, peer_pool_file, pool_file
from transfer.host.pull import HostPullTransport
from transfer.transport import BlockSlice, KVMemory, TransferError


class _Mapping(PeerFile):
    """A peer's whole pool, read-only, of which `span` of each block is read. Fulfils `transfer.host.pull.HostPool`."""

    def __init__(self, file: PoolFileDetails, span: BlockSlice) -> None:
        header = header_bytes(file.blocks)
        size = header + file.blocks * file.block_bytes
        super().__init__(file, size)
        if self.map.size() != size:
            raise TransferError(f"the peer's pool has {self.map.size()} bytes, expected {size}")
        rows = np.frombuffer(self.map, dtype=np.uint8, offset=header)
        self._blocks = rows.reshape(file.blocks, file.block_bytes)[:, span.offset : span.offset + span.nbytes]

    def read(self, block: BlockId) -> npt.NDArray[np.uint8]:
        return self._blocks[block]


class ShmTransport(HostPullTransport):
    """`transfer.transport.Transport` over shared memory."""

    name = "shm"

    def __init__(self, memory: KVMemory) -> None:
        if memory.fd < 0:
            raise TransferError("shm needs a pool that lives in a memfd")
        super().__init__()
        self._memory = memory

    def describe(self, peer: Incarnation) -> Endpoint:
        return Endpoint(transport=self.name, details=msgspec.structs.asdict(pool_file(self._memory)))

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: BlockSlice, received: BlockSlice) -> None:
        self._peers[peer] = _Mapping(peer_pool_file(endpoint, PoolFileDetails, received), received)

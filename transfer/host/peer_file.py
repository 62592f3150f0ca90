"""The file behind a worker's pool, as another process of its host finds it: told in an endpoint, mapped read-only. What
`shm` and `cuda_ipc` share."""

import fcntl
import mmap
import os
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from engine.messages import Endpoint
from engine.types import BlockId
from transfer.polling import details_of
from transfer.transport import BlockSlice, KVMemory, TransferError


class PoolFileDetails(msgspec.Struct, frozen=True):
    """The file that process `pid` has open as `fd`. `device` and `inode` name the file itself: a recycled pid or
    descriptor number leads to another one."""

    pid: int
    fd: int
    device: int
    inode: int
    blocks: int
    block_bytes: int


PoolFileDetailsT = TypeVar("PoolFileDetailsT", bound=PoolFileDetails)


def pool_file(memory: KVMemory) -> PoolFileDetails:
    """The file of a pool of this process."""
    found = os.fstat(memory.fd)
    return PoolFileDetails(os.getpid(), memory.fd, found.st_dev, found.st_ino, memory.blocks, memory.block_bytes)


def peer_pool_file(endpoint: Endpoint, kind: type[PoolFileDetailsT], received: BlockSlice) -> PoolFileDetailsT:
    """Return what a peer has told of its pool's file. Raises TransferError where its blocks are not the `received`
    ones."""
    details = details_of(endpoint, kind)
    if details.block_bytes != received.block_bytes or details.blocks <= 0:
        raise TransferError(f"the peer's blocks are not those of its layout: {details}")
    return details


class PeerFile:
    """The first `size` bytes of a peer's file, which begins with the generations of its blocks
    (`engine.storage.paged`). Raises TransferError if it is gone, another, shorter, or
    might become shorter."""

    def __init__(self, file: PoolFileDetails, size: int) -> None:
        self.map = _map(file, size)
        self._generations = np.frombuffer(self.map, dtype=np.uint64, count=file.blocks)

    def check_blocks(self, blocks: npt.NDArray[np.uint64]) -> None:
        """Raise TransferError unless there are all of these blocks, `[n]`."""
        if len(blocks) and blocks.max() >= len(self._generations):
            raise TransferError(f"the peer has no block {blocks.max()}")

    def are_at(self, blocks: npt.NDArray[np.uint64], generations: npt.NDArray[np.uint64]) -> bool:
        """Return True if these blocks, `[n]`, of which there are all, are at these generations, `[n]`."""
        return bool((self._generations[blocks] == generations).all())

    def generation(self, block: BlockId) -> int:
        """Raises TransferError if there is no such block."""
        if not 0 <= block < len(self._generations):
            raise TransferError(f"the peer has no block {block}")
        return int(self._generations[block])


def _map(file: PoolFileDetails, size: int) -> mmap.mmap:
    path = f"/proc/{file.pid}/fd/{file.fd}"
    try:
        mine = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
    except OSError as error:
        raise TransferError(f"cannot open the peer's memory at {path}: {error}") from error
    try:
        found = os.fstat(mine)
        if (found.st_dev, found.st_ino) != (file.device, file.inode):
            raise TransferError(f"{path} is another file: the peer is gone")
        # Before its size is read: to read a page that was cut off ends the reader.
        if not fcntl.fcntl(mine, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransferError(f"{path} is not sealed against shrinking")
        has = os.fstat(mine).st_size
        if has < size:
            raise TransferError(f"{path} has {has} bytes, expected {size}")
        return mmap.mmap(mine, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise TransferError(f"cannot map {path}: {error}") from error
    finally:
        os.close(mine)

"""A file that another process of this host holds open, mapped read-only: how `shm` and `cuda_ipc` look at a peer."""

import mmap
import os

from transfer.transport import TransferError


def map_peer_file(pid: int, fd: int, device: int, inode: int, size: int) -> mmap.mmap:
    """The first `size` bytes of what process `pid` has open as `fd`. `device` and `inode` name the file itself: a
    recycled pid or descriptor number leads to another one. Raises TransferError if it is gone, another, or shorter."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        mine = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(f"cannot open the peer's memory at {path}: {error}") from error
    try:
        found = os.fstat(mine)
        if (found.st_dev, found.st_ino) != (device, inode):
            raise TransferError(f"{path} is another file: the peer is gone")
        if found.st_size < size:
            raise TransferError(f"{path} has {found.st_size} bytes, expected {size}")
        return mmap.mmap(mine, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise TransferError(f"cannot map {path}: {error}") from error
    finally:
        os.close(mine)

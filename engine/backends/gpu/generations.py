"""The generations of a pool whose blocks are not in host memory, where a peer of the same host can map them."""

import mmap
import os
import weakref

import numpy as np

from engine.storage.paged import header_bytes


class Generations:
    """`counts` is uint64 `[blocks]` in a memfd of its own."""

    def __init__(self, blocks: int) -> None:
        self.fd = os.memfd_create("headrace-generations", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, header_bytes(blocks))
        self._map = mmap.mmap(self.fd, header_bytes(blocks))
        self.counts = np.frombuffer(self._map, dtype=np.uint64, count=blocks)

    def close(self) -> None:
        """Close the descriptor. The mapping itself goes when the last view of it does."""
        self._close()
        self.fd = -1

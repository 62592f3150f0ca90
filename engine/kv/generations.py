"""The generations of a pool whose blocks are not in host memory, where a peer of the same host can map them."""

import mmap
import os

import numpy as np

from engine.kv.paged import header_bytes


class Generations:
    """`counts` is uint64 `[blocks]` in a memfd of its own."""

    def __init__(self, blocks: int) -> None:
        self.fd = os.memfd_create("headrace-generations", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, header_bytes(blocks))
        self._map = mmap.mmap(self.fd, header_bytes(blocks))
        self.counts = np.frombuffer(self._map, dtype=np.uint64, count=blocks)

    def close(self) -> None:
        """Close the descriptor. The mapping itself goes when the last view of it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

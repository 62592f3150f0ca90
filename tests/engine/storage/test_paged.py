"""The pool's file: who closes it."""

import gc
import os
from collections.abc import Callable
from contextlib import suppress

import pytest

from engine.kv.layout import KVLayout
from engine.storage.paged import PagedKV, PoolFile

LAYOUT = KVLayout(kv_heads=1, layers=1, block_size=4, head_dim=4)


def _is_open(fd: int, inode: int) -> bool:
    with suppress(OSError):
        return os.fstat(fd).st_ino == inode
    return False


@pytest.mark.parametrize("make", [lambda: PagedKV(LAYOUT, 3), lambda: PoolFile("generations", 3)], ids=["pool", "file"])
@pytest.mark.parametrize("forgotten", [False, True], ids=["closed", "forgotten"])
def test_the_descriptor_goes_with_the_pool(make: Callable[[], PagedKV | PoolFile], forgotten: bool) -> None:
    """Guards against descriptors that run out in a process that opens pool after pool, and against closing one that is
    somebody else's by then."""
    pool = make()
    fd, inode = pool.fd, os.fstat(pool.fd).st_ino
    assert _is_open(fd, inode)
    if not forgotten:
        pool.close()
        assert pool.fd == -1 and not _is_open(fd, inode)
        other = os.memfd_create("other")
        other_inode = os.fstat(other).st_ino
        pool.close()
    del pool
    gc.collect()
    assert not _is_open(fd, inode)
    if not forgotten:
        assert _is_open(other, other_inode)
        os.close(other)

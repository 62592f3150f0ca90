"""Names of transports, and which one joins two workers."""

import sys

import pytest

from engine.kv.layout import KVLayout
from engine.storage.paged import PagedKV
from engine.types import Incarnation
from transfer.config import TransferConfig
from transfer.registry import choose, open_transport
from transfer.transport import TransferError


def test_auto_goes_by_host() -> None:
    assert choose(["shm", "tcp"], "a", "a") == "shm"
    assert choose(["shm", "tcp"], "a", "b") == "tcp"
    assert choose(["nccl", "cuda_ipc"], "a", "a") == "cuda_ipc"
    assert choose(["nccl", "cuda_ipc"], "a", "b") == "nccl"
    assert choose(["tcp"], "a", "a") == "tcp"


def test_an_unknown_name_is_refused() -> None:
    """The message must name what there is: it answers a line of somebody's configuration."""
    pool = PagedKV(KVLayout(kv_heads=1, layers=1, block_size=4, head_dim=8), 2)
    with pytest.raises(TransferError, match="cuda_ipc, loopback, nccl, shm, tcp"):
        open_transport("pigeon", pool, Incarnation(1), TransferConfig())
    with pytest.raises(TransferError, match="hub"):
        open_transport("loopback", pool, Incarnation(1), TransferConfig())
    pool.close()


def test_the_pure_part_needs_neither_torch_nor_numpy() -> None:
    """Guards the import rule: the sides of a handoff run in a simulator and under an explorer."""
    import subprocess

    code = (
        "import transfer.handoff.sender, transfer.handoff.receiver, transfer.registry, sys\n"
        "assert not {'torch', 'numpy', 'grpc'} & set(sys.modules), 'impure'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

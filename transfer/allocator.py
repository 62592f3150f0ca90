"""Can a pool be exported to other workers of its host? By how PyTorch is told to allocate. Pure: who starts a worker
gives its process's variables."""

import re
from collections.abc import Mapping

from transfer.config import TransferConfig

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both are read by some versions of PyTorch: one that says so is enough."""
_WITHOUT_HANDLES = {
    "expandable_segments": re.compile(r"\bexpandable_segments\s*:\s*true\b", re.IGNORECASE),
    "backend:cudaMallocAsync": re.compile(r"\bbackend\s*:\s*cudaMallocAsync\b"),
}
"""Ways to allocate whose memory `cudaIpcGetMemHandle` refuses."""


def is_exported(device: str, config: TransferConfig) -> bool:
    """Is the pool of such a worker mapped by others of its host?"""
    return device != "cpu" and config.transport in ("auto", "cuda_ipc")


def without_handles(environ: Mapping[str, str]) -> str:
    """Why memory allocated under these variables has no IPC handle, and what to do; empty where it has one."""
    for variable in VARIABLES:
        for option, pattern in _WITHOUT_HANDLES.items():
            if pattern.search(environ.get(variable, "")):
                return (
                    f"{variable} has {option}: memory allocated so has no IPC handle, by which other workers of the "
                    'host read blocks; take it out, or set transfer.transport = "nccl"'
                )
    return ""

"""The settings by which KV blocks travel, and what they ask of the environment of a worker's process. Pure: who starts
workers applies it."""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from transfer.handoff.negotiation import AS_STORED, WP64, XXH3

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both are read by some versions of PyTorch: one that says so is enough."""
_WITHOUT_HANDLES = {
    "expandable_segments": re.compile(r"\bexpandable_segments\s*:\s*true\b", re.IGNORECASE),
    "backend:cudaMallocAsync": re.compile(r"\bbackend\s*:\s*cudaMallocAsync\b"),
}
"""Ways to allocate whose memory `cudaIpcGetMemHandle` refuses."""


class NcclConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the `nccl` transport. Peers may differ in all but `share_gpu`."""

    communicators: int = 16
    """The most communicators at one time; with more peers, the pair that was used least recently loses its own."""
    channels: int = 2
    """Thread blocks, and sets of buffers, of a communicator."""
    buffer_bytes: int = 1 << 20
    """The size of each buffer of a channel (`NCCL_BUFFSIZE`)."""
    piece_bytes: int = 32 << 20
    """Blocks travel packed in pieces of about this size. A worker keeps four of them, whatever the number of peers."""
    limit_s: float = 2.0
    """An operation that both ends have begun and that takes longer costs its communicator."""
    join_s: float = 20.0
    """The time in which a communicator must be made and warmed up."""
    drain_s: float = 5.0
    """The time in which the kernels of an aborted communicator must have ended, else the worker ends: its memory is not
    safe. `cluster` takes as many times as much where it knows of as many workers on one GPU, which take turns there."""
    one_sided: bool = False
    """Put pieces into a ring of the receiver's instead of sending them to it, where both workers say so, NCCL has the
    verbs (2.29.2) and the devices can: copy engines do the work, no multiprocessor does."""
    put_bytes: int = 8 << 20
    """The size of a piece that is put. Each pair keeps four of them at each end, as long as it has a communicator."""
    share_gpu: Literal["no", "multi_rank", "two_hosts"] = "no"
    """The way in which two workers of one GPU may speak over NCCL, which is slow and for tests: as two ranks of a
    device (NCCL 2.30 and later), or as if they were on two hosts (earlier, over sockets). Both must say the same."""


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    transport: str = "auto"
    """`auto` takes `shm` where both workers share a host and `tcp` elsewhere, `cuda_ipc` and `nccl` where blocks are on
    a GPU; or a name from `transfer.registry`."""
    digests: Literal["all", "sampled", "off"] = "all"
    """The blocks of which the sender makes a digest that the receiver checks: of two workers, the stricter decides."""
    digest_sample: float = 1 / 16
    """The share of blocks, above 0 and up to 1, that `sampled` covers."""
    digest_algorithm: Literal["auto", "xxh3-64", "wp64"] = "auto"
    """Two workers must come to the same. `wp64` is the one that a GPU makes in its copy kernel; on a CPU it is slower.
    `auto` takes it for a pool on a GPU, and `xxh3-64` elsewhere."""
    wire: Literal["as_stored", "int8", "fp8"] = AS_STORED
    """The form in which blocks travel over `tcp` and `nccl`. `int8`, `fp8`: in 8 bits, with a scale for each token and
    head, if both workers say the same and store more than 8 bits; less precise, for slow networks (docs/handoff.md).
    Transports that read the sender's memory themselves move blocks as they are stored."""
    tcp_host: str = ""
    """The address the tcp transport listens on and tells its peers, or a name that this host finds it by; empty means
    the worker's own."""
    escalate_s: float = 5.0
    """A lost reader for whom blocks have been in quarantine for this long is called silent, to the router."""
    stall_s: float = 10.0
    """A tcp connection on which no byte comes for this long although some are due is given up, and the peer dialled
    again."""
    stuck_s: float = 10.0
    """A worker ends itself when its transfer thread has not come back from one call for this long, and gives its disk
    tier up when the thread of that has not. A call moves at most one chunk or 16 MiB."""

    nccl: NcclConfig = NcclConfig()

    @property
    def device_bytes(self) -> int:
        """GPU memory that transports may come to take: slots, and for as many communicators as there may be, rings and
        four buffers of NCCL's a channel. What else NCCL takes is only known when it has."""
        if self.transport not in ("auto", "nccl"):
            return 0
        nccl = self.nccl
        pair = 4 * nccl.channels * nccl.buffer_bytes + (4 * nccl.put_bytes if nccl.one_sided else 0)
        return 4 * nccl.piece_bytes + nccl.communicators * pair

    @property
    def digest_share(self) -> float:
        """The share of blocks that have a digest, as it is told in `Hello`."""
        return {"all": 1.0, "sampled": self.digest_sample, "off": 0.0}[self.digests]

    def digest_on(self, device: str) -> str:
        """The algorithm of a worker whose pool is on `device`, as it is told in `Hello`."""
        if self.digest_algorithm != "auto":
            return self.digest_algorithm
        return XXH3 if device == "cpu" else WP64


def is_exported(device: str, config: TransferConfig) -> bool:
    """Return True where others of its host map the pool of such a worker."""
    return device != "cpu" and config.transport in ("auto", "cuda_ipc")


def without_handles(environ: Mapping[str, str]) -> str:
    """Return why memory allocated under these variables has no IPC handle, and what to do; empty where it has one."""
    for variable in VARIABLES:
        for option, pattern in _WITHOUT_HANDLES.items():
            if pattern.search(environ.get(variable, "")):
                return (
                    f"{variable} has {option}: memory allocated so has no IPC handle, by which other workers of the "
                    'host read blocks; take it out, or set transfer.transport = "nccl"'
                )
    return ""


def nccl_environment(config: NcclConfig, worker: str) -> dict[str, str]:
    """Return what NCCL reads from the environment of one worker's process, and no call can set. `worker` is its name:
    two of one host have different ones."""
    found = {
        # Two of these, or four, for each channel and peer: the memory that pairs are blamed for.
        "NCCL_BUFFSIZE": str(config.buffer_bytes),
        # Nobody else's port and threads: the workers watch each other by themselves.
        "NCCL_RAS_ENABLE": "0",
    }
    if config.share_gpu == "multi_rank":
        found["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    elif config.share_gpu == "two_hosts":
        found |= {"NCCL_HOSTID": f"headrace-{worker}", "NCCL_SOCKET_IFNAME": "lo"}
    return found

"""What NCCL reads from its process's environment, and no call can set. Pure: who starts workers applies it."""

from transfer.config import NcclConfig


def nccl_environment(config: NcclConfig, worker: str) -> dict[str, str]:
    """Variables of one worker's process. `worker` is its name: two of one host have different ones."""
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

"""How much of a GPU's memory is in use, by whom."""

import torch


def device_memory(device: str) -> dict[str, int]:
    """Bytes, as of now, in any thread: `tensors` of this process, `reserved` by its allocator with these included,
    `used` by all processes of the device, and their `total`. Empty for the CPU."""
    if device == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "tensors": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "used": total - free,
        "total": total,
    }

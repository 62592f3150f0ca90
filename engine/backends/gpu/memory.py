"""Sizes a GPU worker's pool: what a trial of all that it does there leaves free, at its peak.

The trial runs over a pool of two blocks, before the real one: kernels are compiled, every decode step is recorded, the
largest step runs. What the card then lacks is read off the card, so that compiled code, recordings, the libraries'
workspaces and the allocator's slack count like tensors. Then the trial is thrown away, since recordings hold the
addresses of its pool, and all is done once more over the real one. Beside it, what the metrics say of the card.
"""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.model.prepared.pieces import locked


class GpuMemory(Protocol):
    """The memory of one GPU, as this process sees it."""

    total_bytes: int

    def free_bytes(self) -> int:
        """Return the bytes that nobody has taken, this process's allocator included, which keeps what was given back to
        it."""

    def reserved_bytes(self) -> tuple[int, int]:
        """Return the bytes that this process's allocator holds now, and the most that it has held since `release`."""

    def release(self) -> None:
        """Give back what the allocator keeps for nobody, once the device has ended all work."""


@dataclass(frozen=True, slots=True)
class Peak:
    """`own_bytes`: what the trial took at its peak, beside weights and pool. `free_bytes`: what a pool could have had
    then. `total_bytes`: of the card."""

    own_bytes: int
    free_bytes: int
    total_bytes: int


class Trial:
    """Measures what is done from now on, until `peak`, which lets go what was made.

    What another process took meanwhile would count as the trial's own: workers of one card open it `alone_on` it."""

    def __init__(self, memory: GpuMemory) -> None:
        self._memory = memory
        memory.release()
        self._before = memory.free_bytes()

    def peak(self, let_go: Callable[[], object], pool_bytes: int) -> Peak:
        """`pool_bytes`: of the trial's pool."""
        now, most = self._memory.reserved_bytes()
        free = self._memory.free_bytes() - (most - now)
        let_go()
        self._memory.release()
        return Peak(self._before - free - pool_bytes, free + pool_bytes, self._memory.total_bytes)


def measure_peak(memory: GpuMemory, trial: Callable[[], object], pool_bytes: int) -> Peak:
    """Run the trial, whose pool has `pool_bytes`. What it returns holds all that it keeps, and is let go."""
    began = Trial(memory)
    kept = [trial()]
    return began.peak(kept.clear, pool_bytes)


def auto_pool_bytes(peak: Peak, share: float, weights_bytes: int, kept_bytes: int) -> int:
    """The pool of a worker that may use `share` of its card and leaves `kept_bytes` alone; negative where it does not
    fit. The first of two workers finds the other's memory free: only its share leaves it alone."""
    own = peak.total_bytes * share - weights_bytes - peak.own_bytes
    return int(min(own, peak.free_bytes)) - kept_bytes


@contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Keep other workers of this host from loading weights, trying what they take, and taking their pool on the same
    card meanwhile. A lock file in the temporary folder, which containers that share a card must share too."""
    card = torch.cuda.get_device_properties(device).uuid
    with locked(Path(tempfile.gettempdir()) / f"headrace-gpu-{os.getuid()}-{card}.lock"):
        yield


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


class CudaMemory:
    """Fulfils `GpuMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = int(torch.cuda.mem_get_info(device)[1])

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def reserved_bytes(self) -> tuple[int, int]:
        return torch.cuda.memory_reserved(self._device), torch.cuda.max_memory_reserved(self._device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

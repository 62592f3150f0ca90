"""What a worker shows of its GPU's memory, of its kernels and of its NCCL communicators; zeros where there is neither.

All of it is read when a page is rendered: the engine and the transfer thread spend nothing on it.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from telemetry.families import Families

DEVICE_MEMORY = ("tensors", "reserved", "used", "total")
"""GPU memory of PyTorch's tensors in this process; of what its allocator holds, these included; of all processes on the
device; and all that the device has."""


COMPILED = ("start", "serving")
"""When kernels were compiled: before the worker was ready, or after it."""


class NcclReadings(Protocol):
    """Counts since the start, and bytes. Fulfilled by `transfer.nccl.budget.NcclReport`."""

    built: int
    dropped: int
    lost: int
    pair_bytes: int
    slot_bytes: int


class Nccl(Protocol):
    """The NCCL transport as metrics read it, from any thread. Fulfilled by `transfer.nccl.transport.NcclTransport`."""

    @property
    def report(self) -> NcclReadings: ...

    @property
    def communicators(self) -> int: ...


class GpuMetrics:
    """Families of one worker. `read_memory` returns bytes by DEVICE_MEMORY, or nothing without a GPU, `compilations`
    counts by COMPILED, both in any thread; `nccl` is the worker's transport of that name, if it has one."""

    def __init__(
        self,
        families: Families,
        read_memory: Callable[[], Mapping[str, int]],
        nccl: Nccl | None,
        compilations: Callable[[], Mapping[str, int]],
    ) -> None:
        self._read_memory = read_memory
        self._nccl = nccl
        families.asked(
            "device_memory_bytes",
            "GPU memory: of this worker's tensors, reserved by it, used by all processes, and all there is.",
            "state",
            self._memory,
        )
        families.asked(
            "kernel_compilations_total",
            "Kernels compiled by Triton, or loaded from its cache: before the worker serves, or while requests wait.",
            "phase",
            compilations,
        )
        families.asked(
            "nccl_memory_bytes",
            "GPU memory of a pair's communicator, as the latest one took, and of all slots for pieces.",
            "what",
            self._nccl_memory,
        )
        families.asked(
            "nccl_pairs_total",
            "Pairs of workers that got a communicator, that gave it up for another pair, that were lost.",
            "what",
            self._nccl_pairs,
        )
        families.gauge("nccl_communicators", "NCCL communicators that there are.")[()].set_function(
            lambda: nccl.communicators if nccl else 0
        )

    def _memory(self) -> Mapping[str, float]:
        found = self._read_memory()
        return {state: found.get(state, 0) for state in DEVICE_MEMORY}

    def _nccl_memory(self) -> Mapping[str, float]:
        if self._nccl is None:
            return {"communicator": 0, "slots": 0}
        report = self._nccl.report
        return {"communicator": report.pair_bytes, "slots": report.slot_bytes}

    def _nccl_pairs(self) -> Mapping[str, float]:
        if self._nccl is None:
            return {"built": 0, "dropped": 0, "lost": 0}
        report = self._nccl.report
        return {"built": report.built, "dropped": report.dropped, "lost": report.lost}

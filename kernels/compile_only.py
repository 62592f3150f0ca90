# mypy: allow-untyped-defs, allow-incomplete-defs
"""Compiles launches for a GPU that is not there, into Triton's cache on disk; nothing runs.

Triton asks its driver what it compiles for and hands it what it has compiled. This driver names a device, refuses what
needs more shared memory than that has, and loads and launches nothing. The wrappers are called as ever, with tensors on
torch's `meta` device, so what is compiled is what they launch on a card: the same constants, the same types, the same
alignments, and hence the same entry of the cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.launch import interpreted

MOST_THREADS = 1024
_devices = count()
"""A number for each device: what Triton remembers of one is not taken for another."""


class _Driver:
    """The part of a driver that `triton.runtime` uses."""

    def __init__(self, capability: int, shared_bytes: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self._device = next(_devices)
        self.compiled: list[Any] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": shared_bytes},
            load_binary=lambda *compiled: (None, 0, 0, 0, MOST_THREADS),
        )

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source, metadata):
        # Of a kernel whose parts have warps of their own, the metadata counts all warps, not those it is launched with.
        warps = getattr(source.fn, "launch_warps", metadata.num_warps)
        options = {"num_warps": warps, "num_stages": metadata.num_stages, "launch_pdl": metadata.launch_pdl}
        self.compiled.append(triton.compile(source, target=self._target, options=options))
        return lambda *launch: None


@contextmanager
def compile_only(capability: int, shared_bytes: int) -> Iterator[list[Any]]:
    """Compile what is launched inside for a GPU of this compute capability (such as 90), whose programs have
    `shared_bytes` of shared memory. Yields what was compiled, each kernel once, as Triton's `CompiledKernel`; a launch
    raises OutOfResources where it needs more. Raises RuntimeError in Triton's interpreter, which compiles nothing."""
    if interpreted():
        raise RuntimeError("Triton's interpreter compiles nothing")
    absent, present = _Driver(capability, shared_bytes), driver._active
    driver.set_active(absent)
    try:
        yield absent.compiled
    finally:
        driver._active = present

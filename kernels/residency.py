"""How many programs of a compiled kernel an SM holds at once: what a persistent grid is sized by.

A grid of more programs than that runs in two waves, the second of them mostly idle; one of fewer has fewer reads under
way. Sources: the CUDA C++ Programming Guide, compute capabilities 8.x and 9.0 (registers are given to a warp in units
of 256 and lie in four parts of an SM; each program takes 1 KiB of shared memory besides its own).
"""

from typing import Any, NamedTuple

import torch

UNKNOWN = 3
"""Programs of the decode kernel on an SM, where nobody can say: what most of its configurations come to."""
_PARTS = 4
_REGISTERS_OF_A_PART = 16_384
_REGISTER_UNIT = 256
_SHARED_UNIT_BYTES = 128
_RESERVED_BYTES = 1 << 10
_WARP = 32


class Multiprocessor(NamedTuple):
    """What programs share on one SM."""

    shared_bytes: int
    threads: int = 2048


def resident_programs(registers: int, shared_bytes: int, warps: int, sm: Multiprocessor) -> int:
    """Return how many programs fit on one SM, of so many registers a thread, shared memory and warps each; 0 where none
    does."""
    of_a_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _PARTS * (_REGISTERS_OF_A_PART // max(1, of_a_warp)) // warps
    own_bytes = -(-shared_bytes // _SHARED_UNIT_BYTES) * _SHARED_UNIT_BYTES + _RESERVED_BYTES
    return min(by_registers, sm.shared_bytes // own_bytes, sm.threads // (warps * _WARP))


def multiprocessor(device: torch.device) -> Multiprocessor:
    """Return the SM of a CUDA device."""
    told = torch.cuda.get_device_properties(device)
    return Multiprocessor(told.shared_memory_per_multiprocessor, told.max_threads_per_multi_processor)


def residency(compiled: Any, sm: Multiprocessor) -> int | None:
    """Return how many programs of a Triton `CompiledKernel` an SM holds; None where the driver did not say how many
    registers it takes, as one does that loads nothing."""
    compiled._init_handles()  # loads it, which is what tells the registers
    if not compiled.n_regs:
        return None
    return resident_programs(compiled.n_regs, compiled.metadata.shared, compiled.metadata.num_warps, sm)

"""Checks shared by every Triton wrapper before it launches, and the hook that counts compilations."""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from kernels.compilations import OWN, Compilations
from kernels.configs import table_arch

REFUSED = (OutOfResources, CompilationError)
"""The errors of a launch whose configuration asks for more than the GPU has, or that the compiler refuses."""


def arch_of(device: torch.device) -> int:
    """Return the configuration table's name of a GPU; the interpreter's is 90."""
    return table_arch(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else 90


def interpreted() -> bool:
    """Say whether kernels run in Triton's interpreter, on CPU tensors, as they do in tests without a GPU."""
    return bool(triton.knobs.runtime.interpret)


def launches_dependents() -> bool:
    """Say whether what kernels are launched on, or compiled for, can start a launch before the one that it follows has
    ended, and let it wait for that one (compute capability 9.0)."""
    return not interpreted() and bool(driver.active.get_current_target().arch >= 90)


def check_interpretable(*tensors: Tensor) -> None:
    """Refuse bfloat16 under the interpreter, which would compute on its bit patterns and say nothing (Triton issues
    4972 and 11584). Raises TypeError."""
    if interpreted() and any(tensor.dtype == torch.bfloat16 for tensor in tensors):
        raise TypeError(
            "Triton's interpreter computes garbage with bfloat16: use float16 or float32"
        )


def count_compilations() -> Compilations:
    """Make Triton report every kernel that it compiles, or loads, from now on; returns where they are counted."""
    triton.knobs.runtime.jit_post_compile_hook = _compiled
    return OWN


def _compiled(*, fn: Any, **_: object) -> None:
    OWN.compiled(fn.name)

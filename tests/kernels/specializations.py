"""Which kernels a GPU would have to compile: Triton's own keys of the launches that are asked for.

Triton compiles a kernel anew for every key: types of arguments, constants, which addresses and numbers are multiples of
16, which numbers are 1, and options. The key is made here by the very function that `JITFunction.run` calls, for sm_90.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

Key = tuple[str, str]
"""The kernel's name, and what it would be compiled for."""

_BACKEND = make_backend(GPUTarget("cuda", 90, 32))


def key_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """What `kernel`, a function of `triton.jit` under the interpreter, would be compiled for with these arguments."""
    name, bind = _binder(kernel)
    _, specialization, options = bind(*args, **kwargs)
    return name, compute_cache_key({}, specialization, options)


@cache
def _binder(kernel: Any) -> tuple[str, Any]:
    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    return kernel.fn.__name__, create_function_from_signature(compiled.signature, compiled.params, _BACKEND)


@contextmanager
def launched(carry_out: bool = False) -> Iterator[set[Key]]:
    """Yield the keys of all launches inside this block. They are carried out only if so asked: otherwise what they
    would have written is whatever was there."""
    plain, seen = InterpretedFunction.run, set[Key]()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        seen.add(key_of(self, args, kwargs))
        if carry_out:
            plain(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = run
    try:
        yield seen
    finally:
        InterpretedFunction.run = plain

"""Triton's interpreter without half of its time: at each call of a device function it patches the language anew,
although the launch around it has done so, and for each value it makes type and shape anew. Here the one is done once in
a launch, the other once in a process."""

import inspect
import sys
from typing import Any

NAME = "triton.runtime.interpreter"


def quicken() -> None:
    """Change the interpreter of this process, if anything has imported it."""
    interpreter: Any = sys.modules.get(NAME)
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or patch.__module__ != NAME:
        return
    _patch_once(interpreter, patch)
    _remember_types(interpreter)
    _remember_shapes(interpreter.tl.core)


def _patch_once(interpreter: Any, patch: Any) -> None:
    tl = interpreter.tl
    patched: set[frozenset[str]] = set()
    seen_by: dict[Any, frozenset[str]] = {}

    def once(fn: Any) -> Any:
        # A module of device functions may see the language by other names than the kernel that calls them.
        seen = seen_by.get(fn)
        if seen is None:
            values = fn.__globals__.values()
            seen = frozenset(one.__name__ for one in values if inspect.ismodule(one) and one in (tl, tl.core))
            seen_by[fn] = seen
        if seen in patched:
            return None
        patched.add(seen)
        scope = patch(fn)
        restore = scope.restore

        def end() -> None:
            patched.clear()
            restore()

        scope.restore = end
        return scope

    interpreter._patch_lang = once


def _remember_types(interpreter: Any) -> None:
    """NumPy's types by the names of Triton's, which are equal where their names are."""
    core, found = interpreter.tl.core, interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, core.block_type) else kind
        if isinstance(element, core.pointer_type):
            return found(element)
        if element.name not in known:
            known[element.name] = found(element)
        return known[element.name]

    interpreter._get_np_dtype = np_dtype


def _remember_shapes(core: Any) -> None:
    """What a type of blocks and a value have of their shape, which nobody changes."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, Any] = {}
    tensors: dict[Any, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in shape))
        if key in blocks:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = blocks[key]
        else:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key in tensors:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = tensors[key]
        else:
            make_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel

    core.block_type.__init__, core.tensor.__init__ = block, tensor

"""Triton's interpreter without a third of its time: at each call of a device function it patches the language anew,
although the launch around it has done so. Here it does so once in a launch."""

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
    tl = interpreter.tl
    patched: set[frozenset[str]] = set()

    def once(fn: Any) -> Any:
        # A module of device functions may see the language by other names than the kernel that calls them.
        seen = frozenset(
            value.__name__ for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)
        )
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

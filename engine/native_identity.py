"""Names blocks in native code (`kernels/host/identity.cpp`), where it was built: most of a long prompt's hashing is
Python between two blocks.

Without a compiler at the installation there is none, and `engine.identity` goes on by itself, with the same names.
"""

import ctypes
import logging
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

from engine.identity import IDENTITY_BYTES, PERSON, TOKEN_BYTES, Hasher, hash_piece, hash_with

log = logging.getLogger(__name__)


def use_native_identities() -> bool:
    """Let this process name blocks in native code, if it can; return whether it does."""
    hasher = native_hasher()
    if hasher is not None:
        hash_with(hasher)
    return hasher is not None


def native_hasher(path: Path | None = None) -> Hasher | None:
    """Return the library's function, or None: where there is no library, or one that names blocks otherwise. `path`: in
    the place of the library that was installed."""
    path = path or _installed()
    if path is None or sys.byteorder == "big":
        return None
    try:
        # It keeps the interpreter's lock: waiting for that again could take longer than any prompt.
        hasher = _hasher(ctypes.PyDLL(str(path)).headrace_chain)
    except (OSError, AttributeError) as error:
        log.warning("blocks are named in Python, as %s cannot be used: %s", path.name, error)
        return None
    parent, packed = bytes(range(IDENTITY_BYTES)), bytes(range(240))
    if any(hasher(parent, packed, size) != hash_piece(parent, packed, size) for size in (TOKEN_BYTES, 60, 240)):
        log.warning("blocks are named in Python, as %s names them otherwise", path.name)
        return None
    return hasher


def _installed() -> Path | None:
    package = find_spec("kernels")
    folders = package.submodule_search_locations if package is not None else None
    places = (Path(folder) / f"_native_host{suffix}" for folder in folders or () for suffix in EXTENSION_SUFFIXES)
    return next((path for path in places if path.is_file()), None)


def _hasher(function: Callable[..., object]) -> Hasher:
    person = PERSON.ljust(16, b"\0")
    text, size = ctypes.c_char_p, ctypes.c_int64
    function.argtypes = [text, text, size, size, text, ctypes.c_void_p]  # type: ignore[attr-defined]
    function.restype = None  # type: ignore[attr-defined]

    def hashed(parent: bytes, packed: bytes, stride: int) -> tuple[bytes, ...]:
        blocks = len(packed) // stride
        if not blocks or len(parent) != IDENTITY_BYTES or blocks * stride != len(packed):
            return hash_piece(parent, packed, stride)
        room = bytearray(blocks * IDENTITY_BYTES)
        function(parent, packed, stride, blocks, person, ctypes.byref(ctypes.c_char.from_buffer(room)))
        return _names(blocks).unpack(room)

    return hashed


@lru_cache(maxsize=64)
def _names(blocks: int) -> struct.Struct:
    return struct.Struct(f"{IDENTITY_BYTES}s" * blocks)

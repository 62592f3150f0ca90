"""Tensors of one safetensors file: where they lie, or as 32-bit numpy arrays, mapped and not read.

The `safetensors` package checks the header; its numpy side knows no bfloat16, so the bytes are taken from the map.
"""

import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from engine.model.codes import FloatArray
from engine.model.config import ModelError
from engine.model.files.checkpoint import check_is_file
from engine.model.files.stored import StoredRows

_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
KINDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float32"}
_INTEGERS = {"I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1"}


_PLACE = re.compile(rb'"data_offsets"\s*:\s*\[')
"""What every tensor has once. A quotation mark within a string has another sign before it, and a tensor of this name a
table behind it."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class StoredTensor(NamedTuple):
    """A tensor in a file, whose type is named as the file does."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


class SafetensorsFile:
    """A mapped file and its table of tensors. Raises ModelError whenever the file is not what it should be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_is_file(path)
        try:
            with safe_open(str(path), framework="numpy"):
                pass
            self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        except OSError as error:
            raise ModelError(path, f"cannot be read: {error}") from error
        except SafetensorError as error:
            raise ModelError(path, f"not a sound safetensors file: {error}") from error
        (size,) = struct.unpack("<Q", self._bytes[:8].tobytes())
        start = 8 + size
        self.header = self._bytes[:start].tobytes()
        """The bytes before the first tensor's."""
        header = msgspec.json.decode(self.header[8:])
        header.pop("__metadata__", None)
        self.tensors = {
            name: StoredTensor(path, entry.dtype, entry.shape, start + first, last - first)
            for name, entry in msgspec.convert(header, dict[str, _Entry]).items()
            for first, last in [entry.data_offsets]
        }

        # A name that comes twice is one in the table.
        if (count := len(_PLACE.findall(self.header))) > len(self.tensors):
            raise ModelError(path, f"has {count} tensors by {len(self.tensors)} names: one has been given twice")

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return the tensor's bytes, mapped; KeyError if the file does not have it."""
        tensor = self.tensors[name]
        return self._bytes[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor of integers, or the bytes of one of small floats, mapped; KeyError if the file does not have
        it."""
        tensor = self.tensors[name]
        if tensor.dtype not in _INTEGERS:
            raise ModelError(self.path, f"tensor {name}: dtype {tensor.dtype}, where integers are expected")
        return self.raw(name).view(_INTEGERS[tensor.dtype]).reshape(tensor.shape)

    def read(self, name: str) -> FloatArray:
        """Read the tensor in 32 bits; KeyError if the file does not have it."""
        return _widened(self.plain(name))

    def rows(self, name: str, part: int | None = None, which: slice | None = None) -> StoredRows:
        """Return the tensor's rows; or, of what it has of number `part` in its first dimension, transposed, those that
        `which` says. KeyError if the file does not have it."""
        values = self.plain(name, part)
        if which is not None:
            values = values.T[which]
        kind = KINDS[self.tensors[name].dtype]
        return StoredRows(values.shape, kind, lambda first, end: _widened(values[first:end]))

    def plain(self, name: str, part: int | None = None) -> NDArray[Any]:
        """Return the tensor, or what it has of number `part` in its first dimension, mapped as it is stored: bfloat16
        as its bits. KeyError if the file does not have it."""
        _, dtype, shape, first, size = self.tensors[name]
        if part is not None:
            if len(shape) < 2 or part >= shape[0]:
                raise ModelError(self.path, f"tensor {name} has shape {shape}, and no part {part}")
            size //= shape[0]
            first, shape = first + part * size, shape[1:]
        if dtype not in _DTYPES:
            raise ModelError(self.path, f"tensor {name}: dtype {dtype} is not supported")
        return self._bytes[first : first + size].view(np.dtype(_DTYPES[dtype])).reshape(shape)


def _widened(values: NDArray[Any]) -> FloatArray:
    if values.dtype == np.uint16:  # bfloat16
        wide = values.astype(np.uint32, order="C")
        wide <<= np.uint32(16)  # in place: nothing is held twice in 32 bits
        return wide.view(np.float32)
    return np.ascontiguousarray(values, dtype=np.float32)

"""Opening a GGUF file: the `gguf` package's reader, made quick and made to say what is wrong.

That reader takes seconds because it builds one numpy view per element of the vocabulary. Here arrays are walked
over the raw bytes. If a later version of the package renames the two methods overridden below, files still open,
only slower.
"""

import re
import struct
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField, ReaderTensor
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.model.codes import Codes, FloatArray
from engine.model.config import ModelError
from engine.model.files.checkpoint import STORED, check_is_file, check_unread, most_of
from engine.model.files.gguf_codes import codes_of, form_of
from engine.model.files.stored import StoredRows

MOST_TENSORS, MOST_FIELDS, MOST_STRINGS = 1 << 17, 1 << 16, 1 << 22
"""Far more than any model's file has. A larger count is a broken one, and to walk the file for it would take for ever.
"""
MOST_DIMENSIONS = 4

_BROKEN = (ValueError, KeyError, IndexError, OverflowError, TypeError, struct.error)
"""The errors that the package raises on bytes that are no GGUF."""


class _QuickReader(GGUFReader):
    def _build_fields(self, offs: int, count: int) -> int:
        if self.byte_order == "S":
            raise ValueError("it is of a machine with the other order of bytes")
        if count > MOST_FIELDS:
            raise ValueError(f"{count} metadata, of which no model has more than {MOST_FIELDS}")
        return super()._build_fields(offs, count)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        try:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, int(raw_type))
            return self._array_parts(orig_offs)
        except _BROKEN as error:
            raise ValueError(f"the metadata behind {next(reversed(self.fields))}: {error}") from error

    def _array_parts(self, orig_offs: int) -> Any:
        raw = self.data.data
        offset = int(orig_offs)
        item_type, length = struct.unpack_from("<IQ", raw, offset)
        item = GGUFValueType(item_type)
        offset += 12
        scalar = self.gguf_scalar_to_np.get(item)
        if scalar is not None:
            size = length * np.dtype(scalar).itemsize
            if offset + size > len(raw):
                raise ValueError("an array runs past the end of the file")
            values = np.frombuffer(raw, dtype=scalar, count=length, offset=offset)
            return offset + size - orig_offs, [values], [0], [GGUFValueType.ARRAY, item]
        if item != GGUFValueType.STRING:
            raise ValueError(f"arrays of {item.name} are not supported")
        if length > MOST_STRINGS:
            raise ValueError(f"an array of {length} strings")
        strings: list[memoryview] = []
        for _ in range(length):
            (size,) = struct.unpack_from("<Q", raw, offset)
            offset += 8 + size
            if offset > len(raw):
                raise ValueError("a string runs past the end of the file")
            strings.append(raw[offset - size : offset])
        return offset - orig_offs, strings, list(range(length)), [GGUFValueType.ARRAY, item]

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[ReaderField]]:
        if count > MOST_TENSORS:
            raise ValueError(f"{count} tensors, of which no model has more than {MOST_TENSORS}")
        return super()._build_tensor_info(offs, count)

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        places: list[tuple[int, int, str]] = []
        for field in fields:
            _, name_data, _, dims, raw_dtype, offset = field.parts
            name = bytes(name_data).decode("utf-8")
            if not 1 <= len(dims) <= MOST_DIMENSIONS or not all(dims):
                raise ValueError(f"tensor {name} has shape {dims.tolist()}")
            try:
                kind = GGMLQuantizationType(int(raw_dtype[0]))
            except ValueError as error:
                raise ValueError(f"tensor {name}: {error}") from error
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if int(dims[0]) % block:
                raise ValueError(f"tensor {name} ({kind.name}) has {dims[0]} columns, no multiple of {block}")
            if int(offset[0]) % int(self.alignment):
                raise ValueError(f"tensor {name} begins at {offset[0]}, no multiple of {self.alignment}")
            start = int(start_offs) + int(offset[0])
            end = start + prod(dims.tolist()) // block * block_bytes
            if end > len(self.data):
                raise ValueError(f"tensor {name} ends at byte {end} of {len(self.data)}: truncated")
            places.append((start, end, name))
        places.sort()
        for (_, end, name), (start, _, behind) in pairwise(places):
            if start < end:
                raise ValueError(f"tensor {behind} begins within tensor {name}")
        super()._build_tensors(start_offs, fields)


class GGUFFile:
    """A GGUF file's metadata and tensors. Raises ModelError whenever the file is not what it should be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_is_file(path)
        try:
            reader = _QuickReader(path)
        except OSError as error:
            raise ModelError(path, f"cannot be read: {error.strerror}") from error
        except _BROKEN as error:
            raise ModelError(path, f"not a sound GGUF file: {error}") from error
        self._read, self._asked = set[str](), set[str]()
        self._fields = reader.fields
        self._tensors: dict[str, ReaderTensor] = {item.name: item for item in reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value as plain Python, or `default` where the file does not have it."""
        self._asked.add(key)
        field = self._fields.get(key)
        if field is None:
            return default
        try:
            return field.contents()
        except _BROKEN as error:
            raise ModelError(self.path, f"metadata {key}: {error}") from error

    def was_asked(self, key: str) -> bool:
        return key in self._asked

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(self.path, f"metadata {key} is missing")
        return value

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape with rows first, unlike in the file."""
        return tuple(int(size) for size in reversed(self._find(name).shape))

    def check_all_read(self, family: str, harmless: re.Pattern[str]) -> None:
        """Raise ModelError for a tensor that nothing has asked for and that is not harmless."""
        check_unread(family, dict.fromkeys(self._tensors, self.path), self._read, harmless)

    def stored_dtype(self) -> str:
        """Return the type of most of the weights, see `most_of`."""
        return most_of((tensor.tensor_type.name, int(tensor.n_bytes)) for tensor in self._tensors.values())

    def rows(self, name: str, part: int | None = None) -> StoredRows:
        """Return a tensor's rows, or those of number `part` in its first dimension: codes where `codes_of` knows the
        format, and else values, dequantized to 32 bits."""
        found, shape, data = self._find(name), self.shape(name), self._data(name, part)
        shape = shape if part is None else shape[1:]
        form = form_of(found.tensor_type) if len(shape) == 2 else None

        def codes(first: int, end: int) -> Codes:
            with np.errstate(invalid="ignore"):  # a scale that is no number is told of below
                read = codes_of(data[first:end], found.tensor_type)
            assert read is not None
            for what in (read.scales, read.offsets):
                if what is not None and not np.isfinite(what).all():
                    raise ModelError(self.path, f"tensor {name}: a scale is not a finite number")
            return read

        def values(first: int, end: int) -> FloatArray:
            try:
                read = dequantize(data[first:end] if len(shape) > 1 else data, found.tensor_type)
            except (NotImplementedError, *_BROKEN) as error:
                raise ModelError(self.path, f"tensor {name} ({found.tensor_type.name}): {error}") from error
            wide = np.ascontiguousarray(read, dtype=np.float32)
            return wide.reshape(-1, *shape[1:]) if len(shape) > 1 else wide.reshape(shape)[first:end]

        kind = form or STORED.get(found.tensor_type.name, "float32")
        return StoredRows(shape, kind, codes if form else values)

    def _data(self, name: str, part: int | None) -> NDArray[Any]:
        found = self._find(name)
        if part is None:
            return found.data
        if len(found.shape) < 2 or part >= self.shape(name)[0]:
            raise ModelError(self.path, f"tensor {name} has shape {self.shape(name)}, and no part {part}")
        matrix: NDArray[Any] = found.data[part]
        return matrix

    def _find(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise ModelError(self.path, f"tensor {name} is missing")
        self._read.add(name)
        return self._tensors[name]

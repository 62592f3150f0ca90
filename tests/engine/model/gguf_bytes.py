"""A GGUF file taken apart, so that a test can put it together with any of its parts broken."""

import struct
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

Type = gguf.GGUFValueType
PACKED = {
    Type.UINT8: "<B", Type.INT8: "<b", Type.UINT16: "<H", Type.INT16: "<h", Type.UINT32: "<I", Type.INT32: "<i",
    Type.UINT64: "<Q", Type.INT64: "<q", Type.FLOAT32: "<f", Type.FLOAT64: "<d", Type.BOOL: "<?",
}  # fmt: skip
ALIGNMENT = 32


@dataclass
class Tensor:
    """Columns first, as the file has it."""

    dims: list[int]
    kind: int
    offset: int


@dataclass
class Parts:
    """`fields`: type and value by key; an array's type is `(ARRAY, type of items)`. A count of None is the true one."""

    fields: dict[str, tuple[Any, Any]]
    tensors: dict[str, Tensor]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    field_count: int | None = None
    tensor_count: int | None = None
    behind: list[tuple[str, tuple[Any, Any]]] = field(default_factory=list)
    """Fields that are written after the others, whether their keys are there or not."""

    @staticmethod
    def read(path: Path) -> "Parts":
        reader = gguf.GGUFReader(path)
        fields = {
            name: (tuple(found.types[:2]) if len(found.types) > 1 else found.types[0], found.contents())
            for name, found in reader.fields.items()
            if not name.startswith("GGUF.")
        }
        start = int(reader.data_offset)
        tensors = {
            one.name: Tensor(one.shape.tolist(), int(one.tensor_type), int(one.data_offset) - start)
            for one in reader.tensors
        }
        return Parts(fields, tensors, path.read_bytes()[start:])

    def copy(self) -> "Parts":
        return deepcopy(self)

    def bytes(self) -> bytes:
        counts = (self.tensor_count, len(self.tensors)), (self.field_count, len(self.fields) + len(self.behind))
        header = self.magic + struct.pack("<I", self.version)
        header += b"".join(struct.pack("<Q", true if said is None else said) for said, true in counts)
        for key, (kind, value) in (*self.fields.items(), *self.behind):
            header += string(key) + typed(kind, value)
        for name, tensor in self.tensors.items():
            header += string(name) + struct.pack("<I", len(tensor.dims))
            header += b"".join(struct.pack("<Q", size) for size in tensor.dims)
            header += struct.pack("<IQ", tensor.kind, tensor.offset)
        return header + bytes(-len(header) % ALIGNMENT) + self.data


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(kind: Any, value: Any) -> bytes:
    """Return a value's type and bytes; a value of bytes is taken as it is."""
    if isinstance(kind, tuple):
        array, item = kind
        if isinstance(value, bytes):
            return struct.pack("<II", array, item) + value
        items = b"".join(packed(item, one) for one in value)
        return struct.pack("<IIQ", array, item, len(value)) + items
    return struct.pack("<I", kind) + (value if isinstance(value, bytes) else packed(kind, value))


def packed(kind: int, value: Any) -> bytes:
    return string(value) if kind == Type.STRING else struct.pack(PACKED[Type(kind)], value)

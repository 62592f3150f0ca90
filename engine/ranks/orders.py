"""What rank 0 tells the other ranks to compute, and what they say back: records, and their bytes.

An order carries the tensors of a step themselves, so that a rank decides nothing: it makes the same calls of the same
model on the same numbers. Orders lie in memory that all ranks map; a message of a few bytes says that one is there,
with its number and the digest of its bytes, which each rank computes of what it has read.
"""

import struct
from dataclasses import fields
from typing import Any, Literal

import msgspec
import torch
import xxhash
from torch import Tensor

from engine.batch import ForwardBatch, GroupTables
from engine.config import StepLimits
from engine.types import BlockId

PROGRAM = "engine.ranks.follower"
"""The module that another rank's process runs, where nothing is to move blocks of a pool of its own."""

ORDER_BYTES = 64 * 1024 * 1024
"""Room for one order; memory that is never written is never taken."""

ANNOUNCEMENT = struct.Struct("<QQQ")
"""Number, bytes and digest of an order; with 0 bytes, the group is to end."""


class PackedTensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: list[int]
    raw: bytes

    @staticmethod
    def of(tensor: Tensor) -> "PackedTensor":
        raw = tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor
        return PackedTensor(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw.numpy().tobytes())

    def tensor(self) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.raw:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.raw), dtype=dtype).view(self.shape)


class PackedTables(msgspec.Struct, frozen=True, array_like=True):
    """`GroupTables`."""

    slots: PackedTensor
    tables: list[PackedTensor]

    @staticmethod
    def of(tables: GroupTables) -> "PackedTables":
        return PackedTables(PackedTensor.of(tables.slots), [PackedTensor.of(table) for table in tables.block_tables])

    def group_tables(self) -> GroupTables:
        return GroupTables(self.slots.tensor(), [table.tensor() for table in self.tables])


class RankOrder(msgspec.Struct, frozen=True, array_like=True):
    """`kind`: compute the KV and the logits of a batch, its last hidden rows alone, or the logits of such `rows`; or
    make `copies` of blocks in the rank's own pool, which are made when it says that it has read the order. The fields
    of the batch, by name: numbers, lists of numbers, tensors, lists of tensors; and `windows`, the tables of the layer
    groups but the first."""

    kind: Literal["forward", "hidden", "logits", "copy"]
    numbers: dict[str, int] = {}
    lists: dict[str, list[int]] = {}
    tensors: dict[str, PackedTensor] = {}
    tables: dict[str, list[PackedTensor]] = {}
    rows: PackedTensor | None = None
    windows: list[PackedTables] = []
    copies: list[tuple[BlockId, BlockId]] = []

    @staticmethod
    def of_batch(kind: Literal["forward", "hidden"], batch: ForwardBatch) -> "RankOrder":
        """Raises TypeError for a field of a batch that is nothing of what is known here."""
        numbers, lists = dict[str, int](), dict[str, list[int]]()
        tensors, tables = dict[str, PackedTensor](), dict[str, list[PackedTensor]]()
        for field in fields(batch):
            if field.name == "windows":
                continue
            match value := getattr(batch, field.name):
                case int():
                    numbers[field.name] = value
                case Tensor():
                    tensors[field.name] = PackedTensor.of(value)
                case [Tensor(), *_]:
                    tables[field.name] = [PackedTensor.of(table) for table in value]
                case list():
                    lists[field.name] = value
                case _:
                    raise TypeError(f"ForwardBatch.{field.name} is a {type(value).__name__}")
        windows = [PackedTables.of(one) for one in batch.windows]
        return RankOrder(kind, numbers, lists, tensors, tables, windows=windows)

    def batch(self) -> ForwardBatch:
        found: dict[str, Any] = {**self.numbers, **self.lists}
        found |= {name: packed.tensor() for name, packed in self.tensors.items()}
        found |= {name: [packed.tensor() for packed in tables] for name, tables in self.tables.items()}
        return ForwardBatch(**found, windows=tuple(one.group_tables() for one in self.windows))


class RankSetup(msgspec.Struct, frozen=True):
    """All that a rank is started with. Descriptors in its process: memory of the group, the socket to rank 0 for
    orders, and by rank those for sums."""

    config: bytes
    """`EngineConfig`, as MessagePack."""
    rank: int
    ranks: int
    memory_fd: int
    orders_fd: int
    sums_fds: dict[int, int]
    link: bytes = b""
    """The name by which devices of ranks find each other; empty where the ranks are on the CPU."""
    limits: StepLimits | None = None
    kept_bytes: int = 0
    """What a pool leaves of a device to others of its process."""
    moves_fd: int = -1
    """The place where a rank with a pool of its own is told which of its blocks to move."""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """What a rank has opened; rank 0 compares it with its own."""

    fingerprint: str
    arithmetic: str
    weights_bytes: int
    is_stable: bool


class PoolMapped(msgspec.Struct, frozen=True, tag=True):
    """The rank has mapped the pool that it was sent, or opened one of its own, of so many blocks. Of the latter it
    sends the file, whose generations rank 0 advances: at once, or, if it is a device's, when it is to move blocks, with
    a `name` by which rank 0 can map them."""

    blocks: int
    name: bytes = b""


class RankRoom(msgspec.Struct, frozen=True, tag=True):
    """The number of blocks that a pool on the rank's device may have."""

    blocks: int


class OrderRead(msgspec.Struct, frozen=True, tag=True):
    """Which order a rank has read, and the digest of what it read."""

    number: int
    digest: int


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """Why a rank ends, and which one's fault it is."""

    rank: int
    problem: str


Said = RankReady | PoolMapped | RankRoom | OrderRead | RankFailed


def digest_of(raw: bytes | memoryview, number: int) -> int:
    return xxhash.xxh3_64_intdigest(raw, seed=number)

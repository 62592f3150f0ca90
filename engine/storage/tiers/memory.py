"""The memory between which blocks of the lower tiers are copied: the device's, and this process's own on its host."""

from typing import Protocol

import torch
from torch import Tensor

from engine.kv.tiers.commands import TierSlot
from engine.types import BlockId


class TierDeviceMemory(Protocol):
    """Fulfilled by `engine.storage.paged.KVTensors`, on any device."""

    @property
    def memory(self) -> Tensor:
        """uint8 `[blocks, block_bytes]`."""

    def block(self, block: BlockId) -> memoryview:
        """Its bytes; only where `memory` is on the CPU."""


class HostMemory:
    """`slots` blocks of this process's memory; locked where a GPU copies into it, else taken as it is written."""

    def __init__(self, slots: int, block_bytes: int, *, pinned: bool = False) -> None:
        self.memory = torch.empty(slots, block_bytes, dtype=torch.uint8, pin_memory=pinned)

    def block(self, slot: TierSlot) -> memoryview:
        return self.memory[slot.index].numpy().data

"""What ranks that have a device each reach it, and each other, by; CUDA's and NCCL's are opened by the shell of a
worker (`worker.rank_devices`), pretended ones by tests."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from engine.backends.gpu.graphs import Recorder
from engine.backends.gpu.memory import GpuMemory
from engine.config import EngineConfig
from engine.ranks.device_sums import Exchange
from engine.ranks.one_shot import MappedMemory
from engine.storage.paged import KVTensors


class RankLink(Exchange, Protocol):
    """One rank's end of what connects the devices."""

    def held(self) -> AbstractContextManager[None]:
        """Keep an abort out while recorded exchanges are replayed. Raises RankError after one."""

    def abort(self) -> None:
        """End what waits for other ranks, from any thread, so that whoever waits for the device comes back."""


class Devices(MappedMemory, Protocol):
    """The devices of one worker, in one of its processes."""

    program: str
    """The module that the process of another rank runs: it runs a `DeviceFollower` with these devices."""

    def open(self, config: EngineConfig, rank: int) -> torch.device:
        """Return the rank's device, made the current one of this thread. Raises ValueError where there is none."""

    def unique_id(self) -> bytes:
        """Return a name by which the ranks of one worker find each other."""

    def join(self, unique_id: bytes, rank: int, ranks: int, is_lost: Callable[[], bool]) -> RankLink:
        """Connect with the others; waits for them, as long as none is known to be lost. Raises RankError."""

    def recorder(self, link: RankLink) -> Callable[[], Recorder]:
        """Return what makes recorders of steps with their exchanges."""

    def memory(self) -> GpuMemory: ...

    def export(self, kv: KVTensors) -> bytes:
        """Return a name by which rank 0 can map this rank's pool; empty where there is none."""

"""What tensor-parallel ranks on GPUs reach each other by: a GPU of this host each, and NCCL between them."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.ranks.sums import RankError
from transfer.nccl.exchange import NcclExchange
from transfer.nccl.library import NcclError, NcclLibrary
from transfer.transport import TransferError

if TYPE_CHECKING:
    from engine.backends.gpu.graphs import CudaRecorder
    from engine.backends.gpu.memory import CudaMemory
    from engine.ranks.devices import RankLink
    from engine.storage.paged import KVTensors

log = logging.getLogger(__name__)

_JOIN_S = 600.0
"""How long ranks wait for each other to connect: one may have to compile what another has found compiled."""


def gpu_of(config: EngineConfig, rank: int, count: int) -> int:
    """Return the GPU of a rank, of `count` that this process sees: one after the other, from the configured one on.
    Ray shows a worker those that it was given. Raises ValueError where there are not so many."""
    first = torch.device(config.device).index or 0
    if first + config.tensor_parallel > count:
        raise ValueError(
            f"engine.tensor_parallel: {config.tensor_parallel} ranks from {config.device} on need GPUs "
            f"{first} to {first + config.tensor_parallel - 1}, and this process sees {count} of its host"
        )
    return first + rank


class RankExchange:
    """`NcclExchange` of one rank. Fulfils `engine.ranks.devices.RankLink`."""

    def __init__(self, inner: NcclExchange, rank: int) -> None:
        self._inner = inner
        self._rank = rank
        self.abort = inner.abort

    def exchange(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        with translated(self._rank):
            self._inner.exchange(outgoing, incoming)

    @contextmanager
    def held(self) -> Iterator[None]:
        with translated(self._rank), self._inner.held():
            yield


@contextmanager
def translated(rank: int) -> Iterator[None]:
    try:
        yield
    except NcclError as error:
        raise RankError(rank, f"cannot reach the others: {error}") from error


class CudaDevices:
    """Fulfils `engine.ranks.devices.Devices`. CuPy, whose libnccl it is, is imported where it is used."""

    program = "worker.gpu_rank"

    def open(self, config: EngineConfig, rank: int) -> torch.device:
        if not torch.cuda.is_available():
            raise ValueError(f"engine.device {config.device}: PyTorch sees no GPU; `headrace doctor` says why")
        gpu = gpu_of(config, rank, torch.cuda.device_count())
        self._first, self._device = gpu - rank, torch.device("cuda", gpu)
        torch.cuda.set_device(self._device)
        return self._device

    def unique_id(self) -> bytes:
        return _library().unique_id()

    def join(self, unique_id: bytes, rank: int, ranks: int, is_lost: Callable[[], bool]) -> RankExchange:
        with translated(rank):
            return RankExchange(
                NcclExchange(_library(), unique_id, rank, ranks, self._stream, _JOIN_S, is_lost), rank
            )

    def shared(self, nbytes: int, ranks: int) -> tuple[Tensor, bytes]:
        from transfer.gpu.cuda import CudaDevice

        try:
            own = CudaDevice(str(self._device))
            for other in range(self._first, self._first + ranks):
                own.check_reach(other)
            return own.shared(nbytes)
        except TransferError as error:
            raise ValueError(str(error)) from error

    def recorder(self, link: "RankLink") -> "Callable[[], CudaRecorder]":
        from engine.backends.gpu.graphs import CudaRecorder

        # One for all: workspaces of libraries stay with it.
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return partial(CudaRecorder, self._device, stream)

    def memory(self) -> "CudaMemory":
        from engine.backends.gpu.memory import CudaMemory

        return CudaMemory(self._device)

    def export(self, kv: "KVTensors") -> bytes:
        from transfer.gpu.cuda import CudaDevice

        try:
            return CudaDevice(str(self._device)).export(kv)
        except TransferError as error:
            log.warning("rank 0 will not map this rank's pool: %s", error)
            return b""

    def map(self, name: bytes, blocks: int, block_bytes: int) -> Tensor:
        from transfer.gpu.cuda import CudaDevice

        try:
            return CudaDevice(str(self._device)).open(name, blocks, block_bytes)
        except TransferError as error:
            raise ValueError(f"the pool of a rank on another GPU cannot be mapped: {error}") from error

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)


def _library() -> NcclLibrary:
    try:
        from transfer.gpu.cuda import loaded_nccl
    except ModuleNotFoundError as error:
        raise ValueError(
            "engine.tensor_parallel: ranks on GPUs need CuPy: install headrace[cuda12] or headrace[cuda13]"
        ) from error
    return NcclLibrary(loaded_nccl())

"""Transports by name. Each factory imports its own module, so that nobody pays for a transport that is not used."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import msgspec

from engine.types import Incarnation
from transfer.config import TransferConfig
from transfer.transport import KVMemory, TransferError, Transport

if TYPE_CHECKING:
    from engine.kv.layout import KVLayout
    from transfer.digest import Tally
    from transfer.gpu.device import DeviceMemory
    from transfer.handoff.negotiation import Agreement
    from transfer.host.loopback import LoopbackHub
    from transfer.route import Route

AUTO = "auto"
LOOPBACK = "127.0.0.1"


def _loopback(memory: KVMemory, incarnation: Incarnation, config: TransferConfig, hub: LoopbackHub | None) -> Transport:
    from transfer.host.loopback import LoopbackTransport

    if hub is None:
        raise TransferError("loopback connects pools of one process: it needs their common hub")
    return LoopbackTransport(memory, incarnation, hub)


def _shm(memory: KVMemory, incarnation: Incarnation, config: TransferConfig, hub: LoopbackHub | None) -> Transport:
    from transfer.host.shm import ShmTransport

    return ShmTransport(memory)


def _tcp(memory: KVMemory, incarnation: Incarnation, config: TransferConfig, hub: LoopbackHub | None) -> Transport:
    from transfer.host.tcp.transport import TcpTransport

    return TcpTransport(memory, incarnation, config.tcp_host or LOOPBACK, config.stall_s)


def _cuda_ipc(memory: KVMemory, incarnation: Incarnation, config: TransferConfig, hub: LoopbackHub | None) -> Transport:
    pool = _on_device(memory)
    from transfer.gpu.cuda import CudaDevice
    from transfer.gpu.cuda_ipc import CudaIpcTransport

    return CudaIpcTransport(pool, CudaDevice(memory.device))


def _nccl(memory: KVMemory, incarnation: Incarnation, config: TransferConfig, hub: LoopbackHub | None) -> Transport:
    pool = _on_device(memory)
    from transfer.gpu.cuda import CudaDevice, loaded_nccl
    from transfer.nccl.library import NcclLibrary
    from transfer.nccl.transport import NcclTransport

    device = CudaDevice(memory.device)
    library = NcclLibrary(loaded_nccl())
    host = config.tcp_host or LOOPBACK
    return NcclTransport(pool, incarnation, host, config.stall_s, config.nccl, device, library)


def _on_device(memory: KVMemory) -> DeviceMemory:
    if memory.device == "cpu":
        raise TransferError("cuda_ipc and nccl move blocks that are on a GPU")
    if find_spec("cupy") is None:
        raise TransferError("cuda_ipc and nccl need CuPy: install headrace[cuda12] or headrace[cuda13]")
    return cast("DeviceMemory", memory)


Factory = Callable[[KVMemory, Incarnation, TransferConfig, "LoopbackHub | None"], Transport]
FACTORIES: dict[str, Factory] = {
    "cuda_ipc": _cuda_ipc,
    "loopback": _loopback,
    "nccl": _nccl,
    "shm": _shm,
    "tcp": _tcp,
}
WAYS = {"cpu": ("shm", "tcp"), "cuda": ("cuda_ipc", "nccl")}
"""Transports that `auto` may take, by where the blocks are: within a host, and beyond."""


def open_transport(
    name: str, memory: KVMemory, incarnation: Incarnation, config: TransferConfig, hub: LoopbackHub | None = None
) -> Transport:
    """A transport of this worker's pool. Raises TransferError if there is none of that name, or it cannot start."""
    if name not in FACTORIES:
        raise TransferError(f"no transport {name!r}; there are {', '.join(sorted(FACTORIES))}")
    return FACTORIES[name](memory, incarnation, config, hub)


def open_transports(
    memory: KVMemory, incarnation: Incarnation, config: TransferConfig, host: str
) -> dict[str, Transport]:
    """Every transport that `choose` may pick for a worker of this config, by name. `host` is the worker's own."""
    config = msgspec.structs.replace(config, tcp_host=config.tcp_host or host)
    ways = WAYS[memory.device.partition(":")[0]]
    names = ways if config.transport == AUTO else (config.transport,)
    return {name: open_transport(name, memory, incarnation, config) for name in names}


def choose(names: Collection[str], my_host: str, peer_host: str) -> str:
    """The name of the transport between two workers, of those open here: the only one, or by where they run."""
    if len(names) == 1:
        return next(iter(names))
    within, beyond = next(way for way in WAYS.values() if set(way) == set(names))
    return within if my_host == peer_host else beyond


def open_route(transport: Transport, memory: KVMemory, layout: KVLayout, agreement: Agreement, tally: Tally) -> Route:
    """The route for the memory that `transport` moves. Raises ValueError, as `Route` does."""
    if transport.device is None:
        from transfer.route import Route

        return Route(transport, memory, layout, agreement, tally)
    from transfer.gpu.route import DeviceRoute

    return DeviceRoute(transport, memory, layout, agreement, tally)

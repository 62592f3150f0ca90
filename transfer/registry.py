"""Transports by name. Each factory imports its own module, so that nobody pays for a transport that is not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from engine.types import Incarnation
from transfer.config import TransferConfig
from transfer.transport import KVMemory, TransferError, Transport

if TYPE_CHECKING:
    from transfer.loopback import LoopbackHub

AUTO = "auto"
LOOPBACK = "127.0.0.1"


def _loopback(
    memory: KVMemory, incarnation: Incarnation, config: TransferConfig, hub: LoopbackHub | None
) -> Transport:
    from transfer.loopback import LoopbackTransport

    if hub is None:
        raise TransferError("loopback connects pools of one process: it needs their common hub")
    return LoopbackTransport(memory, incarnation, hub)


def _shm(
    memory: KVMemory, incarnation: Incarnation, config: TransferConfig, hub: LoopbackHub | None
) -> Transport:
    from transfer.shm import ShmTransport

    return ShmTransport(memory)


def _tcp(
    memory: KVMemory, incarnation: Incarnation, config: TransferConfig, hub: LoopbackHub | None
) -> Transport:
    from transfer.tcp import TcpTransport

    return TcpTransport(memory, incarnation, config.tcp_host or LOOPBACK, config.stall_s)


Factory = Callable[[KVMemory, Incarnation, TransferConfig, "LoopbackHub | None"], Transport]
FACTORIES: dict[str, Factory] = {"loopback": _loopback, "shm": _shm, "tcp": _tcp}


def open_transport(
    name: str,
    memory: KVMemory,
    incarnation: Incarnation,
    config: TransferConfig,
    hub: LoopbackHub | None = None,
) -> Transport:
    """A transport of this worker's pool. Raises TransferError if there is none of that name, or it cannot start."""
    return FACTORIES[_known(name)](memory, incarnation, config, hub)


def open_transports(
    memory: KVMemory, incarnation: Incarnation, config: TransferConfig, host: str
) -> dict[str, Transport]:
    """Every transport that `choose` may pick for a worker of this config, by name. `host` is the worker's own."""
    config = msgspec.structs.replace(config, tcp_host=config.tcp_host or host)
    names = ("shm", "tcp") if config.transport == AUTO else (config.transport,)
    return {name: open_transport(name, memory, incarnation, config) for name in names}


def choose(config: TransferConfig, my_host: str, peer_host: str) -> str:
    """The name of the transport between two workers: as configured, or by where they run."""
    if config.transport != AUTO:
        return _known(config.transport)
    return "shm" if my_host == peer_host else "tcp"


def _known(name: str) -> str:
    if name not in FACTORIES:
        raise TransferError(f"no transport {name!r}; there are {', '.join(sorted(FACTORIES))}")
    return name

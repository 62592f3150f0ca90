"""A decode worker whose incoming bytes can be spoiled: the real one over transports that flip a bit when told to.

The test writes how many chunks to spoil into `FOLDER/spoil`; each one spoiled adds a byte to `FOLDER/spoiled`.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import worker.opening
from decode_worker.role import open_decode_worker
from transfer.transport import KVMemory, Landing, Move, Ticket, Transport
from worker.worker import Worker

FOLDER = "CHAOS_FOLDER"


class SpoilingLanding:
    """Any landing; the last block of a chunk loses one bit before anybody has compared its digest."""

    def __init__(self, inner: Landing, blocks: int, folder: Path) -> None:
        self.place = inner.place
        self._inner = inner
        self._last = blocks - 1
        self._folder = folder

    def landed(self, at: int) -> None:
        if at == self._last:
            self._spoil(at)
        self._inner.landed(at)

    def _spoil(self, at: int) -> None:
        order = self._folder / "spoil"
        left = int(order.read_text()) if order.exists() else 0
        if left > 0:
            order.write_text(str(left - 1))
            self.place(at)[0] ^= 1
            with (self._folder / "spoiled").open("a") as file:
                file.write(".")


class SpoilingTransport:
    """Any transport, whose receives can be spoiled."""

    def __init__(self, inner: Transport, folder: Path) -> None:
        self._inner = inner
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def recv(self, peer: Any, move: Move, landing: Landing | None) -> Ticket:
        if landing is not None:
            landing = SpoilingLanding(landing, len(move.remote), self._folder)
        return self._inner.recv(peer, move, landing)


def _spoiling(open_transports: Callable[..., dict[str, Transport]]) -> Callable[..., Any]:
    def opened(memory: KVMemory, *rest: Any) -> dict[str, Any]:
        found = open_transports(memory, *rest)
        folder = Path(os.environ[FOLDER])
        return {name: SpoilingTransport(one, folder) for name, one in found.items()}

    return opened


def spoiling_decode_worker(*arguments: Any) -> Worker[Any]:
    """Hosted in a process of its own, where the name it replaces has no other reader."""
    opening: Any = worker.opening
    opening.open_transports = _spoiling(opening.open_transports)
    return open_decode_worker(*arguments)

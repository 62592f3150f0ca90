"""A decode worker whose incoming bytes can be spoiled: the real one over transports that flip a bit when told to.

The test writes how many chunks to spoil into `FOLDER/spoil`; each one spoiled adds a byte to `FOLDER/spoiled`.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decode_worker.worker
from decode_worker.worker import DecodeWorker
from transfer.transport import Completion, KVMemory, Move, Outcome, Ticket, Transport

FOLDER = "CHAOS_FOLDER"


class SpoilingTransport:
    """Any transport; a landed chunk loses one bit before anybody has compared its digest."""

    def __init__(self, inner: Transport, memory: KVMemory, folder: Path) -> None:
        self._inner = inner
        self._memory = memory
        self._folder = folder
        self._moves: dict[Ticket, Move] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def recv(self, peer: Any, move: Move) -> Ticket:
        ticket = self._inner.recv(peer, move)
        self._moves[ticket] = move
        return ticket

    def poll(self, timeout_s: float) -> list[Completion]:
        done = self._inner.poll(timeout_s)
        for completion in done:
            move = self._moves.pop(completion.ticket, None)
            if move is not None and move.local and completion.outcome is Outcome.DONE:
                self._spoil(move)
        return done

    def _spoil(self, move: Move) -> None:
        order = self._folder / "spoil"
        left = int(order.read_text()) if order.exists() else 0
        if left > 0:
            order.write_text(str(left - 1))
            self._memory.block(move.local[-1])[0] ^= 1
            with (self._folder / "spoiled").open("a") as file:
                file.write(".")


def _spoiling(open_transports: Callable[..., dict[str, Transport]]) -> Callable[..., Any]:
    def opened(memory: KVMemory, *rest: Any) -> dict[str, Any]:
        found = open_transports(memory, *rest)
        folder = Path(os.environ[FOLDER])
        return {name: SpoilingTransport(one, memory, folder) for name, one in found.items()}

    return opened


class SpoilingDecodeWorker(DecodeWorker):
    """Hosted in a process of its own, where the name it replaces has no other reader."""

    def start(self):  # type: ignore[no-untyped-def]
        worker = decode_worker.worker
        worker.open_transports = _spoiling(worker.open_transports)  # type: ignore[assignment]
        return super().start()

"""What rank 0 and another rank tell each other about moving blocks: frames on a socket of the worker's own, with a
number and a digest, as its orders have (`engine.ranks.orders`)."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import msgspec
import xxhash

from engine.messages import guarded
from engine.types import Incarnation
from transfer.config import TransferConfig
from transfer.handoff.commands import MoverCommand, MoverEvent
from transfer.transport import TransferError

_HEAD = struct.Struct("<QQQ")
"""Number of the frame, its bytes, and their digest."""


class OpenMover(msgspec.Struct, frozen=True, tag=True):
    """Open the transports that a worker of this life and config has, on this rank's pool. `incarnation`: the rank's."""

    incarnation: Incarnation
    config: TransferConfig
    host: str


class DescribeTo(msgspec.Struct, frozen=True, tag=True):
    """Say what these ranks of a peer are to be told of a transport. `number`: that of the question."""

    number: int
    transport: str
    peers: tuple[Incarnation, ...]


ToMover = OpenMover | DescribeTo | MoverCommand


class MoverOpened(msgspec.Struct, frozen=True, tag=True):
    """The transports that were opened; or why they were not."""

    transports: tuple[str, ...]
    error: str = ""


class DescribedTo(msgspec.Struct, frozen=True, tag=True):
    number: int
    details: tuple[dict[str, Any], ...]


class Reported(msgspec.Struct, frozen=True, tag=True):
    """An event of the rank's mover, and how that stands: digests, transfers outstanding, bytes that landed nowhere."""

    event: MoverEvent
    made: int
    verified: int
    mismatched: int
    outstanding: int
    scrapped_bytes: int


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Said every now and then by a rank that has parts to move."""


FromMover = MoverOpened | DescribedTo | Reported | Alive

T = TypeVar("T")


class MoveLink(Generic[T]):
    """One end, which hears `kind`. Any thread may `say`; one hears. Raises TransferError where the other end takes
    nothing for as long as its socket may wait, or says something else than it meant to. That it is gone is heard."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self._socket = sock
        decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._decode = guarded(decoder.decode)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._said = self._heard = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def say(self, record: msgspec.Struct) -> None:
        raw = self._encoder.encode(record)
        with self._lock:
            self._said += 1
            try:
                self._socket.sendall(_HEAD.pack(self._said, len(raw), _digest(raw, self._said)) + raw)
            except BlockingIOError:
                raise TransferError("it takes no commands") from None
            except OSError:
                return  # whoever hears, hears of its end

    def hear(self) -> T | None:
        """Wait for the next record; None: there will be no more."""
        head = self._read(_HEAD.size)
        if head is None:
            return None
        number, size, digest = _HEAD.unpack(head)
        raw = self._read(size)
        if raw is None:
            return None
        self._heard += 1
        if (number, digest) != (self._heard, _digest(raw, self._heard)):
            raise TransferError(f"frame {self._heard} is not frame {number} as it was said")
        try:
            return self._decode(raw)
        except msgspec.MsgspecError as error:
            raise TransferError(f"frame {number} says nothing that is known here: {error}") from error

    def __iter__(self) -> Iterator[T]:
        while (record := self.hear()) is not None:
            yield record

    def _read(self, size: int) -> bytes | None:
        found = bytearray()
        while len(found) < size:
            try:
                some = self._socket.recv(min(size - len(found), 1 << 20))
            except OSError:
                return None
            if not some:
                return None
            found += some
        return bytes(found)


class QueuedLink:
    """Says in a thread of its own what it is given, so that nobody waits for the other end to take it. `fail` is told
    why it says no more. At most as much waits here as is given while the other end may take nothing."""

    def __init__(self, link: MoveLink[Any], name: str, fail: Callable[[str], None]) -> None:
        self._link = link
        self._fail = fail
        self._unsaid: SimpleQueue[msgspec.Struct | None] = SimpleQueue()
        threading.Thread(target=self._main, name=name, daemon=True).start()

    def say(self, record: msgspec.Struct) -> None:
        self._unsaid.put(record)

    def close(self) -> None:
        """End the thread, once it has said what it was given."""
        self._unsaid.put(None)

    def _main(self) -> None:
        try:
            while (record := self._unsaid.get()) is not None:
                self._link.say(record)
        except Exception as error:  # nobody looks at this thread
            self._fail(str(error))


def _digest(raw: bytes, number: int) -> int:
    return xxhash.xxh3_64_intdigest(raw, seed=number)

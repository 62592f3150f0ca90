"""One direction of one TCP connection that carries KV blocks: frames out of a pool, frames into a pool.

A frame is a header, the blocks' bytes, and one trailing byte that says whether the sender vouches for them. The sender
may withdraw a send at any point: what is missing is then filled with zeros, so the stream stays in step and the pool is
not read any more. The receiver drains whatever comes: bytes of a receive that was cancelled go to scrap.
"""

import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

import msgspec
import xxhash

from transfer.transport import Completion, Landing, Move, Outcome, Ticket, TransferError

HEADER = struct.Struct("<4sIQIQ")
MAGIC = b"HRkv"
VOUCHED = b"\x01"
WITHDRAWN = b"\x00"
BYTES_PER_TURN = 16 << 20
"""A link moves at most this much before the others have their turn."""
IOVECS = 64
_FILLER = memoryview(bytes(1 << 18))
_NOTHING = memoryview(b"")

_encoder = msgspec.msgpack.Encoder()


def header(move: Move, blocks: int, block_bytes: int) -> bytes:
    """Names the chunk: both ends compute it, and the receiver compares."""
    key = xxhash.xxh3_64_intdigest(_encoder.encode(move.handoff))
    return HEADER.pack(MAGIC, move.seq, key, blocks, blocks * block_bytes)


def chunk_key(move: Move, blocks: int, block_bytes: int) -> int:
    """Return the header as 64 bits."""
    return xxhash.xxh3_64_intdigest(header(move, blocks, block_bytes))


class _Entry(Protocol):
    ticket: Ticket | None
    """The ticket; None once it is withdrawn: then nobody is told of its end."""

    def withdraw(self) -> None:
        """Leave local memory alone from now on, and stay in step with the other end."""


EntryT = TypeVar("EntryT", bound=_Entry)


class _Link(Generic[EntryT]):
    # Mutable state: the connection, if there is one, and the entries that have not ended, in order.

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self._queue: deque[EntryT] = deque()

    @property
    def is_due(self) -> bool:
        """True while the socket has something to take, or to bring."""
        return bool(self._queue)

    def cancel(self, ticket: Ticket) -> bool:
        for entry in self._queue:
            if entry.ticket == ticket:
                entry.withdraw()
                return True
        return False

    def abandon(self, outcome: Outcome, error: str) -> list[Completion]:
        """Close; everything queued ends with `outcome`."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None
        tickets = [entry.ticket for entry in self._queue if entry.ticket is not None]
        self._queue.clear()
        return [Completion(ticket, outcome, error) for ticket in tickets]


class _Send:
    __slots__ = ("left", "parts", "size", "ticket")

    def __init__(self, ticket: Ticket, parts: list[memoryview]) -> None:
        self.ticket: Ticket | None = ticket
        self.parts = deque(parts)
        self.size = self.left = sum(part.nbytes for part in parts)

    def advance(self, sent: int) -> None:
        self.left -= sent
        while sent:
            part = self.parts[0]
            if sent < part.nbytes:
                self.parts[0] = part[sent:]
                return
            sent -= part.nbytes
            self.parts.popleft()

    def withdraw(self) -> None:
        """Stop reading the pool. The frame keeps its header and its length; filler takes the place of the blocks."""
        header_left = max(0, HEADER.size - (self.size - self.left))
        kept = [self.parts[0]] if header_left else []
        filler = self.left - header_left - len(WITHDRAWN)
        while filler > 0:
            kept.append(_FILLER[:filler])
            filler -= kept[-1].nbytes
        self.parts = deque([*kept, memoryview(WITHDRAWN)])
        self.ticket = None


class OutLink(_Link[_Send]):
    """Sends in order. Without a socket yet they wait for the receiver to dial."""

    def post(self, ticket: Ticket, head: bytes, blocks: Sequence[memoryview]) -> None:
        self._queue.append(_Send(ticket, [memoryview(head), *blocks, memoryview(VOUCHED)]))

    def write(self) -> list[Completion]:
        """Write what the socket takes. Raises OSError when the connection is lost."""
        assert self.sock is not None
        done: list[Completion] = []
        budget = BYTES_PER_TURN
        while self._queue and budget > 0:
            send = self._queue[0]
            try:
                sent = self.sock.sendmsg(list(islice(send.parts, IOVECS)))
            except BlockingIOError:
                break
            budget -= sent
            send.advance(sent)
            if not send.left:
                self._queue.popleft()
                if send.ticket is not None:
                    done.append(Completion(send.ticket, Outcome.DONE))
        return done


@dataclass(slots=True, eq=False)
class _Recv:
    ticket: Ticket | None
    head: bytes
    landing: Landing | None  # None: what is left of the payload goes to scrap
    left: int
    at: int = 0
    room: memoryview = _NOTHING  # what is left of the place of block `at`

    def withdraw(self) -> None:
        self.ticket = self.landing = None
        self.room = _NOTHING


class InLink(_Link[_Recv]):
    """Receives in the order in which they were posted, which is the order of the frames."""

    def __init__(self) -> None:
        super().__init__()
        self._head = memoryview(bytearray(HEADER.size))
        self._head_bytes = 0
        self._scrap = memoryview(bytearray(1 << 18))
        self.read_bytes = 0
        self.scrapped_bytes = 0

    def post(self, ticket: Ticket, head: bytes, landing: Landing | None, nbytes: int) -> None:
        self._queue.append(_Recv(ticket, head, landing, nbytes))

    def read(self) -> list[Completion]:
        """Read what has come for posted receives. Raises OSError or TransferError when the connection is lost."""
        assert self.sock is not None
        done: list[Completion] = []
        budget = BYTES_PER_TURN
        while self._queue and budget > 0:
            recv = self._queue[0]
            try:
                read = self._step(self.sock, recv, done)
            except BlockingIOError:
                break
            if not read:
                raise ConnectionResetError("the peer closed the connection")
            budget -= read
            self.read_bytes += read
        return done

    def _step(self, sock: socket.socket, recv: _Recv, done: list[Completion]) -> int:
        if self._head_bytes < HEADER.size:
            read = sock.recv_into(self._head[self._head_bytes :])
            self._head_bytes += read
            if self._head_bytes == HEADER.size and self._head != recv.head:
                raise TransferError("a frame came that is not the next one posted")
            return read
        if recv.left:
            return self._payload(sock, recv)
        trailer = sock.recv(1)
        if trailer:
            self._queue.popleft()
            self._head_bytes = 0
            if recv.ticket is not None:
                vouched = trailer == VOUCHED
                outcome = Outcome.DONE if vouched else Outcome.FAILED
                error = "" if vouched else "the sender withdrew the chunk"
                done.append(Completion(recv.ticket, outcome, error))
        return len(trailer)

    def _payload(self, sock: socket.socket, recv: _Recv) -> int:
        if recv.landing is None:
            read = sock.recv_into(self._scrap[: recv.left])
            self.scrapped_bytes += read
            recv.left -= read
            return read
        if not recv.room:
            recv.room = recv.landing.place(recv.at)
        read = sock.recv_into(recv.room)
        recv.left -= read
        recv.room = recv.room[read:]
        if not recv.room:
            recv.landing.landed(recv.at)
            recv.at += 1
        return read

    def abandon(self, outcome: Outcome, error: str) -> list[Completion]:
        self._head_bytes = 0
        return super().abandon(outcome, error)

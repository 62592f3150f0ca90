"""What the nccl transport knows of one peer, and how the two find each other.

The leader dials, again and again until the follower knows it: the two learn of each other at slightly different times.
A socket that is lost is not dialled again before the next `connect`, which both ends need (as with tcp): what one of
them has launched on the old communicator, the other must not wait for on a new one.
"""

import contextlib
import os
import socket

import msgspec

from engine.types import Incarnation
from transfer.gpu.landing import DeviceLanding
from transfer.gpu.narrow import DevicePacked
from transfer.host.tcp.door import tune
from transfer.liveness import Watchdog
from transfer.nccl.communicator import Communicator
from transfer.nccl.pair import Chunk, Pair
from transfer.nccl.wire import Said, Wire
from transfer.transport import BlockSlice, Move

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5


class NcclDetails(msgspec.Struct, frozen=True):
    """How a worker is reached. `gpu` is its device, `version` that of its library."""

    host: str
    port: int
    token: str
    block_bytes: int
    version: int
    gpu: str


class Dial:
    """One attempt after another to reach a follower."""

    def __init__(self, details: NcclDetails, greeting: bytes, now: float, limit_s: float) -> None:
        """Raises OSError where the host has no address."""
        found = socket.getaddrinfo(details.host, details.port, type=socket.SOCK_STREAM)
        self._family: int = found[0][0]
        address = found[0][4]
        self._address = (str(address[0]), int(address[1]))
        self.greeting = greeting
        self.until_s = now + limit_s
        self.next_s = now
        self._pause_s = FIRST_PAUSE_S

    def connect(self, now: float, stall_s: float) -> socket.socket:
        """A socket that is being connected. Raises OSError."""
        self.next_s = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        tune(sock, stall_s)
        try:
            with contextlib.suppress(BlockingIOError):
                sock.connect(self._address)
        except OSError:
            sock.close()
            raise
        return sock


def connected(sock: socket.socket) -> None:
    """Raises OSError where an attempt to connect has failed."""
    failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failed:
        raise OSError(failed, os.strerror(failed))


class NcclPeer:
    # Mutable state: the socket, the communicator, the chunks, and why it was lost.

    def __init__(
        self, incarnation: Incarnation, sent: BlockSlice, received: BlockSlice, dial: Dial | None, stall_s: float
    ) -> None:
        self.incarnation = incarnation
        self.sent = sent
        self.received = received
        self.dial = dial
        self.pair = Pair(leads=dial is not None)
        self.wire: Wire | None = None
        self.is_met = False  # the follower has said, or heard, its welcome
        self.lost = ""
        self.epoch = 0
        self.communicator: Communicator | None = None
        self.invited: bytes = b""  # follower: the id of a communicator that waits for room
        self.slot_bytes = 0  # of its communicator's ring, if it has one
        self.can_put = False  # leader: the follower has said so
        self.spare_asked = False
        self.watchdog = Watchdog(stall_s)
        self.progress = 0
        self._unsaid: list[Said] = []

    def __repr__(self) -> str:
        state = self.lost or ("met" if self.is_met else "not met")
        return f"NcclPeer({self.incarnation:x}, {state}, {self.communicator!r}, {self.pair!r})"

    def span(self, sends: bool) -> BlockSlice:
        """What travels of each block that goes there, or comes from there."""
        return self.sent if sends else self.received

    def say(self, *messages: Said) -> None:
        """Now, or when the two have met."""
        if self.lost:
            return
        if self.wire is None or not self.is_met:
            self._unsaid += messages
            return
        for message in messages:
            self.wire.say(message)

    def meet(self) -> None:
        self.is_met = True
        unsaid, self._unsaid = self._unsaid, []
        self.say(*unsaid)


class PostedChunk(msgspec.Struct, frozen=True):
    """A chunk, with what it takes to carry it out: a `landing` for a receive, `packed` for a send in 8 bits."""

    peer: NcclPeer
    chunk: Chunk
    move: Move
    landing: DeviceLanding | None
    packed: DevicePacked | None

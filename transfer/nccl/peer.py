"""A peer of the nccl transport, and how the two find each other.

The leader dials, again and again until the follower knows it: the two learn of each other at slightly different times.
A socket that is lost is not dialled again before the next `connect`, which both ends need (as with tcp): what one of
them has launched on the old communicator, the other must not wait for on a new one.
"""

import socket
from dataclasses import dataclass, field

import msgspec

from engine.types import Incarnation
from transfer.gpu.landing import DeviceLanding
from transfer.gpu.narrow import DevicePacked
from transfer.host.tcp.door import DoorAddress, Target, dial
from transfer.liveness import Watchdog
from transfer.nccl.communicator import Communicator
from transfer.nccl.pair import Chunk, Pair
from transfer.nccl.wire import Said, Wire
from transfer.transport import BlockSlice, Move

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5


class NcclDetails(DoorAddress, frozen=True):
    """The way to reach a worker. `gpu` is its device, `version` that of its library."""

    version: int
    gpu: str


@dataclass(slots=True, eq=False)
class Dial:
    """One attempt after another to reach a follower, whose door has `key`, until `until_s`; the next one is due at
    `next_s`."""

    target: Target
    key: str
    next_s: float
    until_s: float
    pause_s: float = FIRST_PAUSE_S

    def connect(self, now: float, stall_s: float) -> socket.socket:
        """A socket that is being connected. Raises OSError."""
        self.next_s = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        return dial(self.target, stall_s)


@dataclass(slots=True, eq=False)
class NcclPeer:
    # Mutable state: the socket, the communicator, the chunks, and why it was lost.

    incarnation: Incarnation
    sent: BlockSlice
    received: BlockSlice
    dial: Dial | None
    watchdog: Watchdog
    pair: Pair
    wire: Wire | None = None
    is_met: bool = False  # the follower has said, or heard, its welcome
    lost: str = ""
    epoch: int = 0
    communicator: Communicator | None = None
    invited: bytes = b""  # follower: the id of a communicator that waits for room
    slot_bytes: int = 0  # of its communicator's ring, if it has one
    can_put: bool = False  # leader: the follower has said so
    spare_asked: bool = False
    progress: int = 0
    unsaid: list[Said] = field(default_factory=list)

    def __repr__(self) -> str:
        state = self.lost or ("met" if self.is_met else "not met")
        return f"NcclPeer({self.incarnation:x}, {state}, {self.communicator!r}, {self.pair!r})"

    def span(self, sends: bool) -> BlockSlice:
        """Return the part that travels of each block that goes there, or comes from there."""
        return self.sent if sends else self.received

    def say(self, *messages: Said) -> None:
        """Now, or when the two have met."""
        if self.lost:
            return
        if self.wire is None or not self.is_met:
            self.unsaid += messages
            return
        for message in messages:
            self.wire.say(message)

    def meet(self) -> None:
        self.is_met = True
        unsaid, self.unsaid = self.unsaid, []
        self.say(*unsaid)


class PostedChunk(msgspec.Struct, frozen=True):
    """A chunk, with what it takes to carry it out: a `landing` for a receive, `packed` for a send in 8 bits."""

    peer: NcclPeer
    chunk: Chunk
    move: Move
    landing: DeviceLanding | None
    packed: DevicePacked | None

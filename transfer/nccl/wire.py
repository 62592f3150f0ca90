"""The messages of the two ends of a pair beside the bytes, and the socket on which they are said.

Of two workers the one with the smaller incarnation *leads*: it makes and drops the pair's communicator, and it alone
decides which operation comes next. Both launch the same operations in the same order, so neither waits in a kernel for
an operation that the other has queued behind another. The loss of the socket is the loss of the pair.
"""

import socket
from collections import deque
from collections.abc import Callable

import msgspec

from engine.messages import guarded
from transfer.host.tcp.door import Knock
from transfer.transport import TransferError

MAX_MESSAGE_BYTES = 4096
TURN_BYTES = 65536
"""A socket that is filled as fast as it is read does not keep the thread from the others."""
_HEAD_BYTES = 4


class _Said(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class _OnCommunicator(_Said, frozen=True):
    epoch: int


class Welcome(_Said, frozen=True):
    """Follower: it knows the leader, which may speak. `puts`: it can, and may, have a ring (`transfer.nccl.ring`)."""

    puts: bool = False


class BuildCommunicator(_OnCommunicator, frozen=True):
    """Leader: join communicator number `epoch`, as rank 1; with a ring of such slots, if any."""

    unique_id: bytes
    slot_bytes: int = 0


class CommunicatorJoined(_OnCommunicator, frozen=True):
    """Follower: it has joined."""


class RequestDrop(_OnCommunicator, frozen=True):
    """Follower: it needs room; drop the communicator, if it is idle."""


class DropCommunicator(_OnCommunicator, frozen=True):
    """Leader: no operation will come on it any more."""


class CommunicatorDropped(_OnCommunicator, frozen=True):
    """Follower: its part is gone."""


class Ready(_Said, frozen=True):
    """Follower: its send (or receive) number `number` is posted. `key` names the chunk, as both ends compute it."""

    sends: bool
    number: int
    key: int


class Gone(_Said, frozen=True):
    """Either: its send (or receive) number `number` will not be carried out, or not to the end."""

    sends: bool
    number: int


class Go(_OnCommunicator, frozen=True):
    """Leader: it has launched this operation. It must be answered in kind, whatever has become of the chunk."""

    leader_sends: bool
    number: int
    first: int
    nbytes: int
    """0 is the warm-up: both send and receive one word, or put one."""
    slot: int = -1
    """The place in the ring to put it, where there is a ring and the leader receives."""


class Grant(_OnCommunicator, frozen=True):
    """Follower: what the leader has said that it puts goes there."""

    slot: int


Said = (
    Welcome
    | BuildCommunicator
    | CommunicatorJoined
    | RequestDrop
    | DropCommunicator
    | CommunicatorDropped
    | Ready
    | Gone
    | Go
    | Grant
)

_encoder = msgspec.msgpack.Encoder()
_decode: Callable[[bytes], Said] = guarded(msgspec.msgpack.Decoder(Said).decode)


class Wire:
    """Messages in order over one non-blocking socket."""

    def __init__(self, sock: socket.socket, knock: Knock | None = None) -> None:
        """Nothing is written, or read as a message, before `knock` is done."""
        self.sock = sock
        self._knock = knock
        self._out: deque[memoryview] = deque()
        self._heard = bytearray()

    @property
    def wants_write(self) -> bool:
        return bool(self._out) if self._knock is None else self._knock.wants_write

    def say(self, message: Said) -> None:
        """Queue a message; `write` sends it."""
        data = _encoder.encode(message)
        self._out.append(memoryview(len(data).to_bytes(_HEAD_BYTES, "little") + data))

    def write(self) -> None:
        """Raises OSError when the connection is lost."""
        while self._out and self._knock is None:
            try:
                sent = self.sock.send(self._out[0])
            except BlockingIOError:
                return
            if sent == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][sent:]

    def read(self) -> list[Said]:
        """Return what has come, at most `TURN_BYTES` of it: the rest keeps the socket readable. Raises OSError when the
        connection is lost, TransferError for what is no message, ProofError when somebody else than the peer
        answers."""
        if self._knock is not None:
            if not self._knock.step():
                return []
            self._knock = None
        try:
            data = self.sock.recv(TURN_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        self._heard += data
        found: list[Said] = []
        while len(self._heard) >= _HEAD_BYTES:
            end = _HEAD_BYTES + int.from_bytes(self._heard[:_HEAD_BYTES], "little")
            if end > _HEAD_BYTES + MAX_MESSAGE_BYTES:
                raise TransferError(f"a message of {end} bytes: not this protocol")
            if len(self._heard) < end:
                break
            try:
                found.append(_decode(bytes(self._heard[_HEAD_BYTES:end])))
            except msgspec.MsgspecError as error:
                raise TransferError(f"not a message of this protocol: {error}") from error
            del self._heard[:end]
        return found

    def close(self) -> None:
        self.sock.close()

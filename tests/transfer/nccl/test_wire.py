"""Messages over one socket, cut anywhere. Two ends that talk are in test_pair.py and test_transport.py, sockets that
are lost in test_processes.py."""

import socket
from collections.abc import Iterator

import msgspec
import pytest

from engine.types import Incarnation
from transfer.host.tcp.door import Knock
from transfer.host.tcp.proof import CODE_BYTES, GREETING_BYTES, NONCE_BYTES, answer, is_proven
from transfer.nccl.wire import MAX_MESSAGE_BYTES, TURN_BYTES, BuildCommunicator, Go, Gone, Ready, Welcome, Wire
from transfer.transport import TransferError


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    with one, other:
        yield one, other


def test_messages_come_whole_and_in_order_wherever_they_are_cut(ends: tuple[socket.socket, socket.socket]) -> None:
    said = [Welcome(True), Ready(True, 3, 4), Go(1, False, 2, 0, 64, slot=1), Gone(False, 9)]
    speaker, listener = Wire(ends[0]), Wire(ends[1])
    for message in said:
        speaker.say(message)
    assert speaker.wants_write
    speaker.write()
    assert not speaker.wants_write
    data, between = ends[1].recv(65536), socket.socketpair()
    with between[0], between[1]:
        between[1].setblocking(False)
        listener = Wire(between[1])
        heard = []
        for at in range(len(data)):
            between[0].send(data[at : at + 1])
            heard += listener.read()
    assert heard == said


def test_what_the_socket_does_not_take_goes_out_later(ends: tuple[socket.socket, socket.socket]) -> None:
    """Guards the rest of a message that was sent in part: it must not begin anew."""
    said = [BuildCommunicator(epoch, bytes(range(256)) * 8) for epoch in range(500)]
    speaker, listener = Wire(ends[0]), Wire(ends[1])
    for message in said:
        speaker.say(message)
    speaker.write()
    assert speaker.wants_write, "the socket takes it all: nothing is shown"
    heard = []
    while len(heard) < len(said):
        speaker.write()
        heard += listener.read()
    assert heard == said and not speaker.wants_write


def test_nothing_is_said_or_heard_before_both_ends_are_proven(ends: tuple[socket.socket, socket.socket]) -> None:
    """Guards what a leader says first from whoever listens at its peer's port."""
    key = bytes(32)
    wire = Wire(ends[0], Knock(ends[0], key.hex(), Incarnation(1), Incarnation(2)))
    wire.say(Gone(True, 3))
    wire.write()
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)
    assert wire.wants_write and wire.read() == []
    said = ends[1].recv(4096)
    assert len(said) == GREETING_BYTES and not wire.wants_write
    told = answer(key, said, bytes(NONCE_BYTES))
    welcome = msgspec.msgpack.encode(Welcome(True))
    ends[1].send(told[:-1])
    assert wire.read() == []
    wire.write()
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)
    ends[1].send(told[-1:] + len(welcome).to_bytes(4, "little") + welcome)
    assert wire.read() == [Welcome(True)] and wire.wants_write
    assert is_proven(key, said, told, ends[1].recv(CODE_BYTES))
    wire.write()
    assert Wire(ends[1]).read() == [Gone(True, 3)]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"), "not this protocol"),
        ((3).to_bytes(4, "little") + b"abc", "not a message of this protocol"),
    ],
)
def test_what_is_no_message_is_refused(ends: tuple[socket.socket, socket.socket], data: bytes, error: str) -> None:
    """Guards memory from a stranger that announces gigabytes, and the thread from what it cannot decode."""
    ends[0].send(data)
    with pytest.raises(TransferError, match=error):
        Wire(ends[1]).read()


def test_the_end_of_the_socket_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].close()
    with pytest.raises(ConnectionResetError):
        Wire(ends[1]).read()


def test_a_peer_that_never_stops_talking_has_one_turn(ends: tuple[socket.socket, socket.socket]) -> None:
    """Guards the transfer thread, and its memory, against a socket that is filled as fast as it is read."""
    one = msgspec.msgpack.encode(Ready(True, 1, 0))
    message = len(one).to_bytes(4, "little") + one
    count = 2 * TURN_BYTES // len(message)
    assert ends[0].send(message * count) == count * len(message), "the socket does not hold so much"
    listener = Wire(ends[1])
    heard = listener.read()
    assert 0 < len(heard) < count, "it reads on while there is something"
    while len(heard) < count:
        heard += listener.read()
    assert heard == [Ready(True, 1, 0)] * count

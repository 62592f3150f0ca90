"""Lets the ends of `tcp` and `nccl` find each other: one listens, proves who it is, and lets in who proves the same
(`transfer.host.tcp.proof`), and nobody else; the other dials.

Nobody waits for anybody here: each step takes what has come, in the thread that waits on the reactor. Who says nothing,
or says it byte by byte, holds one of MAX_STRANGERS places until the thread's first turn after `stall_s`, and no more
memory than a greeting.
"""

import contextlib
import errno
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from engine.messages import Endpoint
from engine.types import Incarnation
from transfer.host.tcp.proof import (
    ANSWER_BYTES,
    CODE_BYTES,
    GREETING_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    answer,
    greeted,
    greeting,
    is_proven,
    proof,
)
from transfer.polling import details_of
from transfer.reactor import Reactor
from transfer.transport import BlockSlice, TransferError

MAX_STRANGERS = 64
"""Accepted connections that have not proven who they are; past it one is closed, the oldest of those that have not
greeted, if there are any."""

Target = tuple[int, tuple[str, int]]
"""An address family, and the host's address and port."""


class DoorAddress(msgspec.Struct, frozen=True):
    """The address at which a worker listens, and the key by which it and one peer know each other there. Its blocks
    have `block_bytes`. An older release, which shows a `token` in the clear, has no `key`: neither end takes the
    other's address, and nobody dials."""

    host: str
    port: int
    key: str
    block_bytes: int


DoorAddressT = TypeVar("DoorAddressT", bound=DoorAddress)


def peer_door(endpoint: Endpoint, kind: type[DoorAddressT], received: BlockSlice) -> DoorAddressT:
    """Return what a peer has told of its door. Raises TransferError where its blocks are not the `received` ones."""
    details = details_of(endpoint, kind)
    try:
        key = bytes.fromhex(details.key)
    except ValueError as error:
        raise TransferError(f"not a {endpoint.transport} endpoint: {error}") from error
    if len(key) != KEY_BYTES:
        raise TransferError(f"not a {endpoint.transport} endpoint: its key has {len(key)} bytes")
    if not 0 < details.port < 1 << 16:
        raise TransferError(f"not a {endpoint.transport} endpoint: there is no port {details.port}")
    if details.block_bytes != received.block_bytes:
        raise TransferError(f"the peer's blocks are not those of its layout: {details.block_bytes} bytes")
    return details


def resolve(address: DoorAddress) -> Target:
    """Raises TransferError where the host is no plain address: a name server may not answer for longer than the
    transfer thread may be away."""
    try:
        family, _, _, _, found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except (OSError, ValueError) as error:  # ValueError: no host could have such a name
        raise TransferError(f"cannot find {address.host[:100]!r}: {error}") from error
    return family, (str(found[0]), int(found[1]))


def dial(target: Target, stall_s: float) -> socket.socket:
    """A socket that is being connected. Raises OSError."""
    family, address = target
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _tune(sock, stall_s)
        with contextlib.suppress(BlockingIOError):
            sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


def check_connected(sock: socket.socket) -> None:
    """Raises OSError where an attempt to connect has failed."""
    failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failed:
        raise OSError(failed, os.strerror(failed))


def listen(host: str) -> socket.socket:
    """A listening socket at a port of the system's choice. May wait for a name server where `host` is no plain address.
    Raises TransferError."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listener = socket.create_server((host, 0), family=found[0][0], backlog=128)
    except OSError as error:
        raise TransferError(f"cannot listen on {host}: {error}") from error
    listener.setblocking(False)
    return listener


def _tune(sock: socket.socket, stall_s: float) -> None:
    """Settings of both ends: small writes go at once, and a host that has been silent for `stall_s`, to data or to
    keepalives, breaks the connection, where the platform can tell."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause_s = max(1, int(stall_s / 4))
    settings = {
        "TCP_KEEPIDLE": pause_s,
        "TCP_KEEPINTVL": pause_s,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": max(1, int(stall_s * 1000)),
    }
    for name, value in settings.items():
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Knock:
    """A connection that is being made to a peer's door, until both ends have proven themselves. `key` is what the peer
    has told. Every attempt has a nonce of its own."""

    def __init__(self, sock: socket.socket, key: str, dialer: Incarnation, wanted: Incarnation) -> None:
        self._sock = sock
        self._key = bytes.fromhex(key)
        self._greeting = greeting(dialer, wanted, secrets.token_bytes(NONCE_BYTES))
        self._heard = b""
        self.wants_write = True

    def step(self) -> bool:
        """Go on as far as the socket lets it; True once the listener has proven itself and has our proof, and nothing
        of what it says next has been read. Raises OSError when the connection is lost, ProofError when somebody else
        answers."""
        try:
            if self.wants_write:
                check_connected(self._sock)
                self._say(self._greeting)
                self.wants_write = False
            more = self._sock.recv(ANSWER_BYTES - len(self._heard))
        except BlockingIOError:
            return False
        if not more:
            raise ConnectionResetError("the peer closed the connection")
        self._heard += more
        if len(self._heard) < ANSWER_BYTES:
            return False
        self._say(proof(self._key, self._greeting, self._heard))
        return True

    def _say(self, said: bytes) -> None:
        # A fresh connection's buffer takes these few bytes whole.
        if self._sock.send(said) != len(said):
            raise OSError("what was said went out in part")


@dataclass(slots=True, eq=False)
class _Stranger:
    """Somebody that has come and has not proven who it is: what it has `said` whole, our answer to that, and what has
    come since."""

    until_s: float
    dialer: Incarnation | None = None
    said: bytes = b""
    answered: bytes = b""
    heard: bytearray = field(default_factory=bytearray)

    @property
    def wanted_bytes(self) -> int:
        return (CODE_BYTES if self.said else GREETING_BYTES) - len(self.heard)


class Door:
    """Lets in those who come to `listener`, inside somebody else's reactor.

    `admit(dialer, sock)` is called for each connection that has proven itself; the socket is its own where it returns
    True.
    """

    def __init__(
        self,
        listener: socket.socket,
        incarnation: Incarnation,
        reactor: Reactor,
        stall_s: float,
        admit: Callable[[Incarnation, socket.socket], bool],
    ) -> None:
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self._host, self._port = str(host), int(port)
        self._root = secrets.token_bytes(KEY_BYTES)
        self._incarnation = incarnation
        self._reactor = reactor
        self._stall_s = stall_s
        self._admit = admit
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        reactor.watch(listener, self._accept)

    def address(self, block_bytes: int, peer: Incarnation) -> DoorAddress:
        """Return what `peer` is told of this door, and nobody else. From any thread."""
        return DoorAddress(self._host, self._port, self._key_of(peer).hex(), block_bytes)

    def _key_of(self, peer: Incarnation) -> bytes:
        """Return the key that this peer alone is told. Nobody can make it of another's."""
        return hmac.digest(self._root, peer.to_bytes(8, "little"), "sha256")

    def step(self, now: float) -> None:
        """Close those that have had their time. Called behind the reads, so that what came while this process was
        stopped counts."""
        while self._strangers:
            sock, oldest = next(iter(self._strangers.items()))
            if now <= oldest.until_s:
                return
            self._turn_out(sock)

    def close(self) -> None:
        for sock in list(self._strangers):
            self._turn_out(sock)
        self._reactor.unwatch(self._listener)
        self._listener.close()
        self._give_spare()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
            _tune(sock, self._stall_s)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return  # nobody is there any more, or the connection broke before it began
        if len(self._strangers) >= MAX_STRANGERS:
            silent = (other for other, stranger in self._strangers.items() if not stranger.said)
            self._turn_out(next(silent, next(iter(self._strangers))))
        self._strangers[sock] = _Stranger(time.monotonic() + self._stall_s)
        self._reactor.watch(sock, lambda: self._listen(sock))

    def _turn_away(self) -> None:
        """Close the connection that waits, with the descriptor kept for that: left alone, it would wake the thread at
        every turn until a descriptor is free."""
        self._give_spare()
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _listen(self, sock: socket.socket) -> None:
        stranger = self._strangers.get(sock)
        if stranger is None:
            return
        try:
            more = sock.recv(stranger.wanted_bytes)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        stranger.heard += more
        if more and (stranger.wanted_bytes or (not stranger.said and self._answer(sock, stranger))):
            return
        self._forget(sock)
        if not more or not self._is_welcome(stranger, sock):
            sock.close()

    def _answer(self, sock: socket.socket, stranger: _Stranger) -> bool:
        """Prove who listens here to one that has greeted rightly."""
        said = bytes(stranger.heard)
        dialer, wanted = greeted(said) or (None, None)
        if dialer is None or wanted != self._incarnation:
            return False
        stranger.dialer, stranger.said = dialer, said
        stranger.answered = answer(self._key_of(dialer), said, secrets.token_bytes(NONCE_BYTES))
        stranger.heard.clear()
        try:
            return sock.send(stranger.answered) == ANSWER_BYTES
        except OSError:
            return False

    def _is_welcome(self, stranger: _Stranger, sock: socket.socket) -> bool:
        dialer, said, heard = stranger.dialer, stranger.said, bytes(stranger.heard)
        if dialer is None or not is_proven(self._key_of(dialer), said, stranger.answered, heard):
            return False
        return self._admit(dialer, sock)

    def _turn_out(self, sock: socket.socket) -> None:
        self._forget(sock)
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        del self._strangers[sock]
        self._reactor.unwatch(sock)

"""Lets the ends of `tcp` and `nccl` find each other: one listens and lets in who greets with the token that it was
told alone, and nobody else; the other dials."""

import contextlib
import errno
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine.messages import Endpoint
from engine.types import Incarnation
from transfer.polling import details_of
from transfer.reactor import Reactor
from transfer.transport import BlockSlice, TransferError

TOKEN_BYTES = 32
MAGIC = b"HRKVTCP1"
MAX_STRANGERS = 64
"""Accepted connections that have not said who they are; past it the oldest is closed."""

_GREETING = struct.Struct(f"<8s{TOKEN_BYTES}sQQ")

Target = tuple[int, tuple[str, int]]
"""An address family, and the host's address and port."""


class DoorAddress(msgspec.Struct, frozen=True):
    """The address at which a worker listens, and the token by which it lets one peer in. Its blocks have `block_bytes`.
    """

    host: str
    port: int
    token: str
    block_bytes: int


DoorAddressT = TypeVar("DoorAddressT", bound=DoorAddress)


def peer_door(endpoint: Endpoint, kind: type[DoorAddressT], received: BlockSlice) -> DoorAddressT:
    """Return what a peer has told of its door. Raises TransferError where its blocks are not the `received` ones."""
    details = details_of(endpoint, kind)
    try:
        token = bytes.fromhex(details.token)
    except ValueError as error:
        raise TransferError(f"not a {endpoint.transport} endpoint: {error}") from error
    if len(token) != TOKEN_BYTES:
        raise TransferError(f"not a {endpoint.transport} endpoint: its token has {len(token)} bytes")
    if not 0 < details.port < 1 << 16:
        raise TransferError(f"not a {endpoint.transport} endpoint: there is no port {details.port}")
    if details.block_bytes != received.block_bytes:
        raise TransferError(f"the peer's blocks are not those of its layout: {details.block_bytes} bytes")
    return details


def resolve(address: DoorAddress) -> Target:
    """May wait for a name server where the host is no plain address. Raises TransferError."""
    try:
        family, _, _, _, found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:  # ValueError: no host could have such a name
        raise TransferError(f"cannot find {address.host!r}: {error}") from error
    return family, (str(found[0]), int(found[1]))


def greeting(address: DoorAddress, dialer: Incarnation, wanted: Incarnation) -> bytes:
    """Return what the one that dials says first: the token it was told, who it is, and whom it means to reach."""
    return _GREETING.pack(MAGIC, bytes.fromhex(address.token), dialer, wanted)


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
    """A listening socket at a port of the system's choice. Raises TransferError."""
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


class Door:
    """Lets in those who come to `listener`, inside somebody else's reactor.

    `admit(dialer, sock)` is called for each connection that greets rightly; the socket is its own if it returns True.
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
        self._port = int(listener.getsockname()[1])
        self._key = secrets.token_bytes(TOKEN_BYTES)
        self._incarnation = incarnation
        self._reactor = reactor
        self._stall_s = stall_s
        self._admit = admit
        self._strangers: dict[socket.socket, bytearray] = {}
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        reactor.watch(listener, self._accept)

    def address(self, host: str, block_bytes: int, peer: Incarnation) -> DoorAddress:
        """Return what `peer` is told of this door, and nobody else. From any thread."""
        return DoorAddress(host, self._port, self._token_of(peer).hex(), block_bytes)

    def _token_of(self, peer: Incarnation) -> bytes:
        """Return the token by which this peer alone is let in. Nobody can make it of another's."""
        return hmac.digest(self._key, peer.to_bytes(8, "little"), "sha256")

    def close(self) -> None:
        for stranger in list(self._strangers):
            self._forget(stranger)
            stranger.close()
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
            oldest = next(iter(self._strangers))
            self._forget(oldest)
            oldest.close()
        self._strangers[sock] = bytearray()
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
        heard = self._strangers.get(sock)
        if heard is None:
            return
        try:
            more = sock.recv(_GREETING.size - len(heard))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        heard += more
        if more and len(heard) < _GREETING.size:
            return
        self._forget(sock)
        if not more or not self._is_welcome(heard, sock):
            sock.close()

    def _is_welcome(self, heard: bytearray, sock: socket.socket) -> bool:
        magic, token, dialer, wanted = _GREETING.unpack(heard)
        rightly = hmac.compare_digest(token, self._token_of(Incarnation(dialer)))
        if not rightly or magic != MAGIC or wanted != self._incarnation:
            return False
        return self._admit(Incarnation(dialer), sock)

    def _forget(self, sock: socket.socket) -> None:
        del self._strangers[sock]
        self._reactor.unwatch(sock)

"""The listening socket of the tcp transport: lets in who greets with the right token, and nobody else."""

import hmac
import selectors
import socket
import struct
from collections.abc import Callable

from engine.types import Incarnation

TOKEN_BYTES = 32
MAGIC = b"HRKVTCP1"
MAX_STRANGERS = 64
"""Accepted connections that have not said who they are; past it the oldest is closed."""

_GREETING = struct.Struct(f"<8s{TOKEN_BYTES}sQQ")


def tune(sock: socket.socket, stall_s: float) -> None:
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


def greeting(token: bytes, dialer: Incarnation, wanted: Incarnation) -> bytes:
    """What the one that dials says first: the token it was told, who it is, and whom it means to reach."""
    return _GREETING.pack(MAGIC, token, dialer, wanted)


class Door:
    """Listens on `host`, at a port of the system's choice, inside somebody else's selector.

    `admit(dialer, sock)` is called for each connection that greets rightly; the socket is its own if it returns True.
    Raises OSError if it cannot listen.
    """

    def __init__(
        self,
        host: str,
        token: bytes,
        incarnation: Incarnation,
        selector: selectors.BaseSelector,
        stall_s: float,
        admit: Callable[[Incarnation, socket.socket], bool],
    ) -> None:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self._listener = socket.create_server((host, 0), family=found[0][0], backlog=128)
        self._listener.setblocking(False)
        self._token = token
        self._incarnation = incarnation
        self._selector = selector
        self._stall_s = stall_s
        self._admit = admit
        self._strangers: dict[socket.socket, bytearray] = {}
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def port(self) -> int:
        found: int = self._listener.getsockname()[1]
        return found

    def close(self) -> None:
        for stranger in list(self._strangers):
            self._forget(stranger)
            stranger.close()
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        tune(sock, self._stall_s)
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self._forget(oldest)
            oldest.close()
        self._strangers[sock] = bytearray()
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._listen(sock))

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
        rightly = hmac.compare_digest(token, self._token)
        if not rightly or magic != MAGIC or wanted != self._incarnation:
            return False
        return self._admit(Incarnation(dialer), sock)

    def _forget(self, sock: socket.socket) -> None:
        del self._strangers[sock]
        self._selector.unregister(sock)

"""One HTTP connection of the front: uvicorn's, with limits that its client cannot stretch.

A client has `header_s` for the handshake of https, as long for the head of a request, from its first byte or from the
connection on, `body_s` for its body, and `idle_s` between requests. Whoever sends slowly gets 408; a new connection
that finds no room (`ConnectionTable`) gets 503 and time to read it. Whoever has left so much of an answer unread that
no more is written, and then reads none of it for `idle_s`, is cut off.

A client that has shut its sending side down is answered. To the server it looks like one that has closed the whole
connection, until something is sent that its host refuses. So the answer's first bytes, which are the same whatever the
answer is, are sent ahead of it, one at a time, and a refused one ends the request.
"""

import asyncio
import fcntl
import socket
import ssl
import sys
import termios
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import msgspec
from uvicorn.config import Config

from router.config import FrontLimits
from router.http.answers import CONNECTION
from router.http.connections import ConnectionTable
from router.http.formats import early_envelope
from router.http.gate import CertificateProtocol
from router.http.handshake import CountedProtocol, HandshakeProtocol

BEGINNING = b"HTTP/1.1 "
WATCH_S = 0.1
PROBE_EVERY = 3
"""A byte is sent ahead at every so many looks at the connection."""
FAREWELL_S = 1.0
"""The time that a refused client has to read why."""
MAX_FAREWELLS = 16
ACCEPT_AT_ONCE = 16
"""asyncio accepts as many connections before it looks at any of them."""
TCP_CLOSED = 7


class SharedFront:
    """The part that all connections of one server share: who is there, the limits, how many are being sent away, and
    the handshakes under way."""

    def __init__(self, limits: FrontLimits, connections: int) -> None:
        self.limits = limits
        self.table: ConnectionTable[FrontProtocol] = ConnectionTable(connections, limits.connections_per_address)
        self.farewells = 0
        self.handshakes: set[asyncio.Task[None]] = set()

    def install(self, config: Config, context: ssl.SSLContext | None = None) -> None:
        """Let a server that is not loaded yet make its connections so, with TLS where there is a context."""
        make: Callable[..., asyncio.Protocol] = partial(FrontProtocol, self)
        if context is not None:
            make = partial(self._secured, context)
        config.http = cast(Any, make)
        config.ws = "none"
        config.timeout_keep_alive = cast(Any, self.limits.idle_s)
        config.backlog = ACCEPT_AT_ONCE

    def _secured(self, context: ssl.SSLContext, **more: Any) -> HandshakeProtocol:
        return HandshakeProtocol(FrontProtocol(self, **more), context, self.handshakes)

    def close(self) -> None:
        """End the handshakes under way."""
        for task in list(self.handshakes):
            task.cancel()


class FrontProtocol(CertificateProtocol, CountedProtocol):
    # Mutable state: whether it counts already; what the client owes (`_owes` is "head", "body" or nothing) and the
    # timer for that; the timer for what it has left unread; whether it was refused, or has shut its side down, and how
    # often it was looked at since.

    def __init__(self, shared: SharedFront, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._shared = shared
        self._is_counted = False
        self._is_refused = False
        self._owes = ""
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        self._looks = 0

    def accepted(self, transport: asyncio.Transport) -> float | None:
        self.transport, self._is_counted = transport, True
        peer = transport.get_extra_info("peername")
        taken, victim = self._shared.table.admit(self, str(peer[0]) if peer else "")
        if victim is not None:
            victim.transport.abort()
        if taken:
            return self._shared.limits.header_s
        self._is_refused = True
        self._shared.farewells += 1
        return FAREWELL_S if self._shared.farewells <= MAX_FAREWELLS else None

    def gone(self) -> None:
        self._shared.table.remove(self)
        self._shared.farewells -= self._is_refused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if not self._is_counted:
            self.accepted(transport)
        super().connection_made(transport)
        if self._is_refused:
            self._refuse()
        else:
            self._owe("head", self._shared.limits.header_s)
        self.app_state = {**self.app_state, CONNECTION: self}

    # See `router.http.answers.ChunkWriter`.

    def is_gone(self) -> bool:
        return bool(self.transport.is_closing())

    def is_writable(self) -> bool:
        return self.conn.their_http_version == b"1.1" and not self.flow.write_paused and not self.is_gone()

    def write_chunk(self, data: bytes) -> None:
        self.cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone()
        self._owe("", 0.0)
        self._stop_waiting()
        super().connection_lost(exc)
        # They lead back to this connection, which would stay until the collector looks at everything.
        self.app_state, self.scope, self.cycle = {}, None, None  # type: ignore[assignment]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def _wait_for_reading(self) -> None:
        self._unread_timer = self.loop.call_later(self._shared.limits.idle_s, self._look_again, self._unread_bytes())

    def _look_again(self, before_bytes: int) -> None:
        """End a connection whose client has read nothing since; another has as long again."""
        if self._unread_bytes() < before_bytes:
            self._wait_for_reading()
        else:
            self.transport.abort()

    def _unread_bytes(self) -> int:
        """Return what the client's host has not taken: in our buffer, and in the kernel's, which takes no more of ours
        until a third of it is free."""
        connection = self.transport.get_extra_info("socket")
        in_kernel = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
        return int(self.transport.get_write_buffer_size()) + int.from_bytes(in_kernel, sys.byteorder)

    def _stop_waiting(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()
            return
        self._shared.table.waits(self)
        self._look()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection for the answer to a complete request."""
        if self.scheme == "https" or self._is_refused or self._owes or self.cycle is None:
            return None
        if self.cycle.response_complete:
            return None
        if not self._is_half_closed:
            self._is_half_closed = True
            self.cycle.transport = cast(asyncio.Transport, _AheadTransport(self.transport))
            self.loop.call_later(WATCH_S, self._watch)
        return True

    def _look(self) -> None:
        """See what the client owes now."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            # Between requests uvicorn's own timer runs, until a byte of the next one comes.
            waits_for_head = self.timeout_keep_alive_task is None
            self._owe("head" if waits_for_head else "", self._shared.limits.header_s)
        elif self.cycle.more_body:
            self._owe("body", self._shared.limits.body_s)
        else:
            self._owe("", 0.0)
            self._shared.table.answered(self)

    def _owe(self, what: str, limit_s: float) -> None:
        if what == self._owes:
            return
        self._owes = what
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what:
            self._timer = self.loop.call_later(limit_s, self._late)

    def _late(self) -> None:
        """The client has had its time: it is told so if it has begun a request and got no answer."""
        if self.transport.is_closing():
            return
        has_begun = self._owes == "body" or bool(self.conn.trailing_data[0])
        is_unanswered = self.cycle is None or self.cycle.response_complete or not self.cycle.response_started
        if has_begun and is_unanswered:
            part = "headers" if self._owes == "head" else "body"
            path = self.cycle.scope["path"] if self._owes == "body" else ""
            self.transport.write(_notice(408, f"the request's {part} took too long", "timeout", path))
        self.transport.close()

    def _refuse(self) -> None:
        """Say that there is no room; the client may read it for a while, as long as not too many do."""
        self.transport.write(_notice(503, "too many connections", "unavailable", ""))
        if self._shared.farewells > MAX_FAREWELLS:
            self.transport.abort()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(FAREWELL_S, self.transport.abort)

    def _watch(self) -> None:
        """See whether a client that has shut down its sending side still reads."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if _is_reset(self.transport.get_extra_info("socket")):
            self.transport.abort()
            return
        self._looks += 1
        if self._looks % PROBE_EVERY == 1 and not self.cycle.response_started:
            cast(_AheadTransport, self.cycle.transport).send_ahead()
        self.loop.call_later(WATCH_S, self._watch)


class _AheadTransport:
    """Sends the first bytes of an answer before the rest of it is known."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send_ahead(self) -> None:
        self._transport.write(BEGINNING[self._sent : self._sent + 1])
        self._sent = min(self._sent + 1, len(BEGINNING))

    def write(self, data: bytes) -> None:
        assert data.startswith(BEGINNING[: self._sent])
        self._transport.write(data[self._sent :])
        self._sent = 0


def _is_reset(connection: socket.socket) -> bool:
    """Return True if the client's host has refused what was sent. On a Unix socket, sending itself fails then."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        state: int = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return True
    return state == TCP_CLOSED


def _notice(status: int, message: str, code: str, path: str) -> bytes:
    """A whole answer to a client whose request was not read. While its route is not known either, the body can be read
    as an error of any shape."""
    said = early_envelope(path, status, message, "server_error", code)
    body = msgspec.json.encode(said if path else {"type": "error", **cast(dict[str, object], said)})
    line = f"{status} {HTTPStatus(status).phrase}".encode()
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (line, len(body))
    return head + b"retry-after: 1\r\nconnection: close\r\n\r\n" + body

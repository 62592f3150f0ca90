"""Serves one page of metrics from one thread, whoever connects and however slowly.

Every connection carries one request and has `LIMIT_S` for it, its answer included. There are at most `CONNECTIONS`; the
oldest goes when another comes, so that clients who hold them open and say nothing keep no scrape out.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from threading import Thread
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST

CONNECTIONS = 32
LIMIT_S = 10.0
HEAD_BYTES = 8 * 1024
ACCEPT_AT_ONCE = 8
"""asyncio accepts as many connections before any of them is looked at."""
LISTEN_BACKLOG = 128


class PageGuard(Protocol):
    """Decides who may read the page. It is asked in the page's own thread."""

    def context(self) -> ssl.SSLContext | None:
        """Return what the listening socket needs for TLS, None without it."""

    def status(self, authorization: str, certificate: Mapping[str, Any] | None) -> int:
        """Return 200 for a reader that is let in, else the HTTP status of its refusal. `authorization` is that header's
        value, `certificate` what `getpeercert` says of the client."""


class PageServer:
    """Serves what `render` returns at `/metrics`, until `close`, to those whom `guard` lets in. Raises OSError if the
    address cannot be bound."""

    # Mutable state, of its thread: the open connections, oldest first.

    def __init__(
        self, render: Callable[[], bytes], host: str, port: int, guard: PageGuard | None = None
    ) -> None:
        self._render = render
        self._guard = guard
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(LISTEN_BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self.port = int(self._socket.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        secure: dict[str, Any] = {}
        if self._guard is not None and (context := self._guard.context()) is not None:
            secure = {"ssl": context, "ssl_handshake_timeout": LIMIT_S, "ssl_shutdown_timeout": LIMIT_S}
        server = await asyncio.start_server(
            self._attend, sock=self._socket, limit=HEAD_BYTES, backlog=ACCEPT_AT_ONCE, **secure
        )
        self._socket.listen(LISTEN_BACKLOG)
        await self._stopping.wait()
        server.close()
        for writer in self._open:
            writer.transport.abort()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection, and close it."""
        if len(self._open) >= CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(LIMIT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head, writer.get_extra_info("peercert")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            writer.transport.abort()
        finally:
            self._open.pop(writer, None)

    def _answer(self, head: bytes, certificate: Mapping[str, Any] | None) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.split(b" ", 1)[0].split(b"?", 1)[0]
        status, kind, body = b"200 OK", CONTENT_TYPE_LATEST, b""
        allowed = 200 if self._guard is None else self._guard.status(_authorization(head), certificate)
        if allowed != 200:
            refusal = b"401 Unauthorized\r\nwww-authenticate: Bearer" if allowed == 401 else b"403 Forbidden"
            status, kind, body = refusal, "text/plain", b"a credential of the role monitor is needed\n"
        elif method not in (b"GET", b"HEAD"):
            status, kind, body = b"405 Method Not Allowed", "text/plain", b"GET is served\n"
        elif path not in (b"/metrics", b"/"):
            status, kind, body = b"404 Not Found", "text/plain", b"/metrics is served\n"
        else:
            body = self._render()
        lines = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        return lines % (status, kind.encode(), len(body)) + (b"" if method == b"HEAD" else body)


def _authorization(head: bytes) -> str:
    """Return that header's value; of several, what is no credential."""
    fields = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    found = [value.strip() for name, _, value in fields if name.strip().lower() == b"authorization"]
    return "ambiguous" if len(found) > 1 else found[0].decode("latin-1") if found else ""

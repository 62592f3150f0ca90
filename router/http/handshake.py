"""The beginning of an https connection: it counts, and has a time limit, before anything is known of its client.

Left to itself, asyncio tells a protocol of a connection when its handshake is over: clients who open connections and
never begin one would hold descriptors that no limit counts, for a minute each. Here a connection counts as soon as it
is accepted, shakes hands in the time for a head (`header_s`), and goes on as any other (`router/http/protocol.py`).
"""

import asyncio
import ssl
from abc import abstractmethod


class CountedProtocol(asyncio.Protocol):
    """What a connection is once it has shaken hands, and who counts it until then."""

    @abstractmethod
    def accepted(self, transport: asyncio.Transport) -> float | None:
        """Count a connection whose handshake is due. Return the time for that; None where there is no room for it, not
        even to say so."""

    @abstractmethod
    def gone(self) -> None:
        """Count a connection no more; called once for each that was accepted."""


class HandshakeProtocol(asyncio.Protocol):
    """A connection that has not shaken hands. What follows is `front`'s; `under_way` holds the handshakes of a server.
    """

    def __init__(
        self, front: CountedProtocol, context: ssl.SSLContext, under_way: set[asyncio.Task[None]]
    ) -> None:
        self._front = front
        self._context = context
        self._under_way = under_way

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.pause_reading()  # its first byte is the handshake's
        limit_s = self._front.accepted(transport)
        if limit_s is None:
            self._front.gone()
            transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._shake(transport, limit_s), name="https handshake")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _shake(self, plain: asyncio.Transport, limit_s: float) -> None:
        front, early = self._front, _EarlyBytes()
        secure: asyncio.Transport | None = None
        try:
            secure = await asyncio.get_running_loop().start_tls(
                plain, early, self._context, server_side=True, ssl_handshake_timeout=limit_s
            )
        except OSError:
            pass  # it speaks no TLS, shows a wrong certificate, has left, or is late
        finally:
            if secure is None or secure.is_closing() or early.is_over:
                front.gone()
                plain.abort()
                secure = None
        if secure is not None:
            secure.set_protocol(front)
            front.connection_made(secure)
            if early.data:
                front.data_received(bytes(early.data))


class _EarlyBytes(asyncio.Protocol):
    """Keeps what comes with the end of the handshake, before its task goes on: of one read at most."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_over = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> None:
        self.is_over = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True

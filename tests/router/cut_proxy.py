"""A TCP proxy whose connections a test can cut, as a network does."""

import asyncio
from contextlib import suppress


class CutProxy:
    """Forwards to a port of this host. `cut` resets every connection; `refuse` also those that come later;
    `swallow` leaves them open and lets nothing through any more."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._refusing = False
        self._swallowing = False
        self.accepted = 0
        self.cut_connections = 0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self, refuse: bool = False) -> None:
        self._refusing = refuse
        for writer in self._writers:
            writer.transport.abort()
            self.cut_connections += 1
        self._writers.clear()

    def swallow(self) -> None:
        self._swallowing = True

    def heal(self) -> None:
        self._refusing = False

    async def stop(self) -> None:
        self.cut(refuse=True)
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        self.accepted += 1
        try:
            other_reader, other = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, other}
        await asyncio.gather(self._pump(reader, other), self._pump(other_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                if self._swallowing:
                    continue
                writer.write(data)
                await writer.drain()
        writer.close()
        self._writers.discard(writer)

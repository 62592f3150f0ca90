"""The bound of `benchmarks.front`: servers that only write, in the router's place, over gRPC and as server-sent events.

Nothing comes from workers, and no token is looked up, counted, kept or made text: at each step a timer lets a group of
streams, as many as there would be workers, write a message that was made once for all of them. What that costs is the
price of the library and the kernel, below which no router of the same libraries comes.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.front_peers import HEAD, due_steps

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1764201600,'
    b'"model":"hex","choices":[{"index":0,"text":" %04x","finish_reason":null,"logprobs":null}]}\n\n'
)


class _Group:
    """The streams of one step. Mutable state: who is told of it, and what they write."""

    def __init__(self) -> None:
        self.told: set[Callable[[], None]] = set()
        self.message = b""

    def step(self, message: bytes) -> None:
        self.message = message
        for tell in self.told:
            tell()


class _BareGrpc:
    """`Generate` and nothing else."""

    def __init__(self, groups: list[_Group]) -> None:
        self._next = itertools.cycle(groups)

    def message(self, tick: int) -> bytes:
        from protos import headrace_pb2 as pb

        return pb.GenerateResponse(delta=pb.Delta(text=f" {tick:04x}", token_ids=[tick])).SerializeToString()

    async def start(self) -> int:
        import grpc

        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler = grpc.unary_stream_rpc_method_handler(self._answer)
        generic = grpc.method_handlers_generic_handler("headrace.v1.Headrace", {"Generate": handler})
        server.add_generic_rpc_handlers((generic,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._server = server
        return int(port)

    async def _answer(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        group, due = next(self._next), asyncio.Event()
        group.told.add(due.set)
        try:
            while True:
                await due.wait()
                due.clear()
                yield group.message
        finally:
            group.told.remove(due.set)


class _BareSse:
    """Every POST opens a stream."""

    def __init__(self, groups: list[_Group]) -> None:
        self._next = itertools.cycle(groups)

    def message(self, tick: int) -> bytes:
        event = EVENT % tick
        return b"%x\r\n%b\r\n" % (len(event), event)

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=4096)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        group, write = next(self._next), writer.transport.write

        def tell() -> None:
            if not writer.transport.is_closing():
                write(group.message)

        group.told.add(tell)
        with suppress(ConnectionError):  # a client that leaves amid a stream resets it
            while await reader.read(65536):
                pass
        group.told.remove(tell)
        writer.close()


async def _serve(pipe: Connection, kind: str, count: int, tick_s: float, period: int) -> None:
    groups = [_Group() for _ in range(count)]
    server = _BareGrpc(groups) if kind == "bare-grpc" else _BareSse(groups)
    pipe.send(f"127.0.0.1:{await server.start()}")
    async for at in due_steps(pipe, count):
        groups[at].step(server.message(int(time.monotonic() / tick_s) % period))


def serve_bare(pipe: Connection, kind: str, count: int, tick_s: float, period: int) -> None:
    """Serve `bare-grpc` or `bare-sse`; the first word of the pipe is the address, and then it is told rates. A token is
    the time in units of `tick_s`, which comes round after `period` of them."""
    asyncio.run(_serve(pipe, kind, count, tick_s, period))

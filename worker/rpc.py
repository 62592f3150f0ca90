"""Streams of frames over gRPC: the one asyncio loop of a worker, its server, and connections to other workers.

A frame is a list of `engine.messages` records as bytes. The loop's thread does no work per token or per record: it
hands the bytes of a frame to a callback, which puts them into the engine's inbox, and sends the bytes it is given.
Everything else happens in the engine thread.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import grpc
import msgspec

from engine.types import host_port

log = logging.getLogger(__name__)

R = TypeVar("R")

MAX_FRAME_BYTES = 64 * 1024 * 1024
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    # Without it a frozen peer is noticed after a minute, whatever keepalive says.
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Workers are on the cluster's own network: a proxy set for the way out is not for them.
    ("grpc.enable_http_proxy", 0),
    # A shared subchannel would impose gRPC's own, longer, pauses between attempts.
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)

Send = Callable[[bytes | None], None]
"""Queue one frame for the other end; None ends the stream. May be called from any thread; after the end it does
nothing."""
Put = Callable[[object], None]
"""Fill an engine's inbox, from any thread."""


class Session(Protocol):
    """One end of one stream. Called on the loop's thread: must return at once."""

    def frame(self, data: bytes) -> None: ...

    def closed(self, why: str) -> None:
        """The stream has ended, for whatever reason; called once."""


Accept = Callable[[Send], Session]


class InboxStream:
    """A session whose frames, and whose end, become items of the engine's inbox. Identity is by object."""

    def __init__(self, send: Send, put: Put) -> None:
        self.send = send
        self._put = put

    def frame(self, data: bytes) -> None:
        self._put(FrameIn(self, data))

    def closed(self, why: str) -> None:
        self._put(StreamEnded(self, why))


class FrameIn(msgspec.Struct, frozen=True):
    """Item: a frame has come."""

    stream: InboxStream
    data: bytes


class StreamEnded(msgspec.Struct, frozen=True):
    """Item: a stream is gone, for whatever reason."""

    stream: InboxStream
    why: str


def records_of(data: bytes, decode: Callable[[bytes], list[R]], whose: str) -> list[R]:
    """Return the records of a frame; none of one that is not of this protocol, which is logged."""
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        log.error("%s: a frame is not of this protocol, and is dropped: %s", whose, error)
        return []


def dialable(host: str) -> str:
    """Return `host`, if peers can dial it. Raises ValueError for a wildcard: it says where to listen only."""
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(f"worker host {host!r}: name an address that the other workers can dial")
    return host


class _Outbox:
    """Frames on their way to one stream; `None` ends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.ended = False

    def send(self, data: bytes | None) -> None:
        self.ended |= data is None
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, data)
        except RuntimeError:  # the loop has ended, and with it every stream
            log.debug("a frame was dropped: the loop has ended")

    def __aiter__(self) -> "_Outbox":
        return self

    async def __anext__(self) -> bytes:
        data = await self._queue.get()
        if data is None:
            raise StopAsyncIteration
        return data


async def _feed(stream: grpc.aio.StreamStreamCall, outbox: _Outbox) -> None:
    """Write until the outbox or the stream ends; who reads the stream reports how."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for data in outbox:
            await stream.write(data)
        await stream.done_writing()


class RpcLoop:
    """A thread with an asyncio loop, a gRPC server on it, and any number of client streams."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._servers: list[grpc.aio.Server] = []
        self._clients: dict[int, tuple[asyncio.Task[None], _Outbox]] = {}

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self, host: str, port: int, streams: dict[str, Accept]) -> int:
        """Serve streams by path (`/service/name`). Returns the port. Raises OSError where it cannot be bound."""
        self._thread.start()
        return int(self.call(self._serve(host, port, streams)))

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 30.0) -> Any:
        """Run a coroutine on the loop from another thread and wait for it."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(timeout_s)

    async def _serve(self, host: str, port: int, streams: dict[str, Accept]) -> int:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        for path, accept in streams.items():
            handler = grpc.stream_stream_rpc_method_handler(self._handler(accept))
            _, service, method = path.split("/")
            generic = grpc.method_handlers_generic_handler(service, {method: handler})
            server.add_generic_rpc_handlers((generic,))
        try:
            bound = server.add_insecure_port(host_port(host, port))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        await server.start()
        self._servers.append(server)
        return bound

    def _handler(self, accept: Accept) -> Callable[..., AsyncIterator[bytes]]:
        async def handle(frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            outbox = _Outbox(self._loop)
            session = accept(outbox.send)
            why = "the other end closed the stream"

            async def read() -> None:
                async for data in frames:
                    session.frame(data)
                outbox.send(None)

            reader = asyncio.ensure_future(read())
            try:
                async for data in outbox:
                    yield data
            except asyncio.CancelledError:
                why = "the stream was cancelled"
                raise
            finally:
                reader.cancel()
                session.closed(why)

        return handle

    def connect(self, address: str, method: str, accept: Accept) -> None:
        """Open a client stream to `method` (`/service/name`) at `address`. Returns at once; the session made by
        `accept` hears of everything, also that nobody was there."""
        self._loop.call_soon_threadsafe(self._connect, address, method, accept)

    def _connect(self, address: str, method: str, accept: Accept) -> None:
        outbox = _Outbox(self._loop)
        task = self._loop.create_task(self._client(address, method, accept(outbox.send), outbox))
        self._clients[id(task)] = (task, outbox)
        task.add_done_callback(lambda done: self._clients.pop(id(done), None))

    async def _client(self, address: str, method: str, session: Session, outbox: _Outbox) -> None:
        why = "the other end closed the stream"
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        stream = channel.stream_stream(method)()
        # Given the outbox itself, gRPC would feed from it in a task that outlives a stream which the other end broke.
        feeder = self._loop.create_task(_feed(stream, outbox))
        try:
            async for data in stream:
                session.frame(data)
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            why = "this side closed the stream"
        finally:
            session.closed(why)
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
            await channel.close()

    def stop(self, grace_s: float = 1.0) -> None:
        """End every stream, the server and the thread. Streams that were ended before are given `grace_s` to deliver
        what was said on them."""
        if not self._thread.is_alive():
            return
        self.call(self._stop(grace_s), timeout_s=grace_s + 10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)
        self._loop.close()

    async def _stop(self, grace_s: float) -> None:
        clients = list(self._clients.values())
        ending = [task for task, outbox in clients if outbox.ended]
        if ending:
            await asyncio.wait(ending, timeout=grace_s)
        for task, _ in clients:
            task.cancel()
        await asyncio.gather(*(task for task, _ in clients), return_exceptions=True)
        for server in self._servers:
            await server.stop(grace_s)
        # Whoever reads a stream that the server has just ended would be reported as destroyed with the loop.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)

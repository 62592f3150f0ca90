"""Streams of frames over gRPC: the one asyncio loop of a worker, its server, and connections to other workers.

A stream begins with the proof that both ends belong to one cluster (`engine.handshake`); before it, nobody hears of the
stream. A frame is a list of `engine.messages` records as bytes. The loop's thread does no work per token or per record:
it hands the bytes of a frame to a callback, which puts them into the engine's inbox, and sends the bytes it is given.
Everything else happens in the engine thread. What waits in between is bounded on both ends: a stream is not read while
the engine has `MAX_UNREAD_BYTES` of it to hear, and one that takes nothing any more is ended.
"""

import asyncio
import logging
import os
import resource
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import grpc
import msgspec

from access.internal import StrangeCertificateError, dial, listen, shown_by_dialer, why_unreachable
from access.tls import ServerCertificates
from engine.dialing import prove
from engine.handshake import (
    HANDSHAKE_S,
    NONCE_BYTES,
    HandshakeError,
    Listener,
    Party,
    PartyRole,
    Secrets,
)
from engine.messages import FRAME_BYTES, Record, frames, is_joinable, joined
from engine.types import host_port

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 8 << 20
"""A frame may be larger than this only where a peer is not one of ours: see `engine.messages.frames`."""
MAX_UNREAD_BYTES = 16 << 20
"""Bytes of one stream that wait for the engine; past it the stream is not read, and its sender waits."""
FRAME_COST_BYTES = 512
"""What a frame that waits takes beside its bytes, which may be none."""
MAX_UNSENT_BYTES = 64 << 20
"""Bytes that wait for one stream's other end; past it the stream is ended."""
DRAIN_LOOK_S = 0.005
ABORT_S = 1.0
MIN_CONNECTIONS, MAX_CONNECTIONS = 32, 16_384
"""Connections to a worker: half of the descriptors that it may have, within these."""
MAX_STRANGERS = 256
"""Streams whose other end has not proven itself; past it the oldest is ended."""
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
    # Every connection of ours has a stream. One without is a stranger's.
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 5_000),
    # Ours has one: what a stranger does not read, no status ends, only the end of its connection.
    ("grpc.max_concurrent_streams", 4),
)

Send = Callable[[bytes | None], None]
"""Queue one frame for the other end; None ends the stream. May be called from any thread; after the end it does
nothing."""
Put = Callable[[object], None]
"""Fill an engine's inbox, from any thread."""


class Session(Protocol):
    """One end of one stream. Called on the loop's thread: must return at once."""

    @property
    def unread_bytes(self) -> int:
        """Bytes of frames that have come and wait: above MAX_UNREAD_BYTES no more are read."""

    def frame(self, data: bytes) -> None: ...

    def closed(self, why: str) -> None:
        """The stream has ended, for whatever reason; called once."""


class DialerSession(Session, Protocol):
    """The session of a stream that this process has opened, made before anybody has answered."""

    def proven(self, peer: Party) -> None:
        """The other end has proven that it is this party; called once, before any frame. What was sent before goes to
        it now. Raises HandshakeError where it is not the one that was meant."""


class ServedStream(msgspec.Struct, frozen=True):
    """A stream that others may open: who may, and what makes the session of one that has proven who it is."""

    roles: frozenset[PartyRole]
    accept: Callable[[Send, Party], Session]


Open = Callable[[Send], DialerSession]


class InboxStream(ABC):
    """A session whose frames, and whose end, become items of the engine's inbox. Identity is by object."""

    def __init__(self, send: Send, put: Put) -> None:
        self.send = send
        self._put = put
        # Each is written by one thread alone: the loop's, and the engine's.
        self._came_bytes = self._heard_bytes = 0
        self._is_broken = False

    @abstractmethod
    def decode(self, data: bytes) -> list[Record]:
        """Return the records of a frame (`records_of`)."""

    def records_of(self, data: bytes, decode: Callable[[bytes], Sequence[Record]], whose: str) -> list[Record]:
        """Return what `decode` makes of a frame. One that is not of its protocol ends the stream, and nothing more is
        heard of it: what that frame was to say would be missed."""
        if self._is_broken:
            return []
        try:
            return list(decode(data))
        except msgspec.MsgspecError as error:
            log.error("%s: a frame is not of this protocol, and its stream is ended: %s", whose, error)
            self._is_broken = True
            self.send(None)
            return []

    def say(self, records: Sequence[Record]) -> None:
        """Send records, as many frames as they need."""
        for data in frames(records):
            self.send(data)

    def proven(self, peer: Party) -> None:
        self._put(StreamProven(self, peer))

    @property
    def unread_bytes(self) -> int:
        return self._came_bytes - self._heard_bytes

    def frame(self, data: bytes) -> None:
        self._came_bytes += len(data) + FRAME_COST_BYTES
        self._put(FrameIn(self, data))

    def heard(self, frame: "FrameIn") -> None:
        """Note that the engine is done with a frame; from its thread."""
        self._heard_bytes += len(frame.data) + FRAME_COST_BYTES

    def closed(self, why: str) -> None:
        self._put(StreamEnded(self, why))


class FrameIn(msgspec.Struct, frozen=True):
    """Item: a frame has come."""

    stream: InboxStream
    data: bytes


class StreamProven(msgspec.Struct, frozen=True):
    """Item: the other end of a stream that we have opened is this party. Comes before its frames."""

    stream: InboxStream
    peer: Party


class StreamEnded(msgspec.Struct, frozen=True):
    """Item: a stream is gone, for whatever reason."""

    stream: InboxStream
    why: str


def dialable(host: str) -> str:
    """Return `host`, if peers can dial it. Raises ValueError for a wildcard: it says where to listen only."""
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(f"worker host {host!r}: name an address that the other workers can dial")
    return host


class _Outbox:
    """Frames on their way to one stream; `None` ends it. Those that wait together leave as one, for each costs the
    other end as much as a dozen records: the tokens of a step and the report behind it."""

    # Mutable state, the loop's but for `ended`: the frames that wait, and their bytes.

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[bytes | None] = deque()
        self._filled = asyncio.Event()
        self._unsent_bytes = 0
        self.overflown = False
        self.ended = False
        self.cut: Callable[[], object] = lambda: None
        """Ends the stream at once. What is missing would be missed: both ends shall know where they stand."""

    def send(self, data: bytes | None) -> None:
        self.ended |= data is None
        try:
            self._loop.call_soon_threadsafe(self._put, data)
        except RuntimeError:  # the loop has ended, and with it every stream
            log.debug("a frame was dropped: the loop has ended")

    def _put(self, data: bytes | None) -> None:
        if self.overflown:
            return
        self._unsent_bytes += len(data or b"")
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            log.error("a stream is ended: its other end takes nothing, and %d bytes wait", self._unsent_bytes)
            self.overflown = True
            self._waiting.clear()
            self.cut()
            data = None
        self._waiting.append(data)
        self._filled.set()

    def __aiter__(self) -> "_Outbox":
        return self

    async def __anext__(self) -> bytes:
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        first = self._waiting.popleft()
        if first is None:
            raise StopAsyncIteration
        taken, size = [first], len(first)
        while self._waiting and is_joinable(first) and (data := self._waiting[0]) is not None:
            if size + len(data) > FRAME_BYTES:
                break
            taken.append(data)
            size += len(data)
            self._waiting.popleft()
        self._unsent_bytes -= size
        return joined(taken)


async def _feed(stream: grpc.aio.StreamStreamCall, outbox: _Outbox) -> None:
    """Write until the outbox or the stream ends; who reads the stream reports how."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for data in outbox:
            await stream.write(data)
        await stream.done_writing()


async def _drained(session: Session) -> None:
    """Return once the session has little enough to hear."""
    while session.unread_bytes > MAX_UNREAD_BYTES:
        await asyncio.sleep(DRAIN_LOOK_S)


async def _abort(context: Any, code: grpc.StatusCode, why: str) -> None:
    """End a stream that was opened here with a status, if its other end takes one. By itself a cancelled task ends no
    stream: it would be open for the other end, for good."""
    with suppress(TimeoutError):
        await asyncio.wait_for(context.abort(code, why), ABORT_S)


class RpcLoop:
    """A thread with an asyncio loop, a gRPC server on it, and any number of client streams."""

    def __init__(self, name: str, me: Party, secrets: Secrets, certificates: ServerCertificates | None = None) -> None:
        """`me` is what this process proves to be, with `secrets`, at both ends of streams. With `certificates` these
        have TLS, and others are refused."""
        self._me = me
        self._secrets = secrets
        self._certificates = certificates
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._servers: list[grpc.aio.Server] = []
        self._clients: dict[int, tuple[asyncio.Task[None], _Outbox]] = {}
        self._strangers: dict[asyncio.Task[Any], asyncio.TimerHandle] = {}

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self, host: str, port: int, streams: dict[str, ServedStream]) -> int:
        """Serve streams by path (`/service/name`). Returns the port. Raises OSError where it cannot be bound."""
        self._thread.start()
        return int(self.call(self._serve(host, port, streams)))

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 30.0) -> Any:
        """Run a coroutine on the loop from another thread and wait for it."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(timeout_s)

    async def _serve(self, host: str, port: int, streams: dict[str, ServedStream]) -> int:
        connections = max(MIN_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        most = ("grpc.max_allowed_incoming_connections", min(connections, MAX_CONNECTIONS))
        server = grpc.aio.server(options=(*SERVER_OPTIONS, most))
        for path, served in streams.items():
            handler = grpc.stream_stream_rpc_method_handler(self._handler(path, served))
            _, service, method = path.split("/")
            generic = grpc.method_handlers_generic_handler(service, {method: handler})
            server.add_generic_rpc_handlers((generic,))
        try:
            bound = listen(server, host_port(host, port), self._certificates)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        await server.start()
        self._servers.append(server)
        return bound

    def _handler(self, path: str, served: ServedStream) -> Callable[..., AsyncIterator[bytes]]:
        async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            frames = aiter(requests)
            task = asyncio.current_task()
            assert task is not None
            try:
                with self._stranger(task):
                    greeting = await anext(frames)
                    channel = b"" if self._certificates is None else shown_by_dialer(context)
                    nonce = os.urandom(NONCE_BYTES)
                    listener = Listener(self._secrets, path, self._me, served.roles, nonce, channel)
                    yield listener.welcome(greeting)
                    party = listener.check(await anext(frames))
            except (HandshakeError, StrangeCertificateError, StopAsyncIteration, asyncio.CancelledError) as error:
                why = str(error) or "it has not proven itself in time"
                log.warning("a stream at %s from %s is refused: %s", path, context.peer(), why)
                await _abort(context, grpc.StatusCode.UNAUTHENTICATED, why)
                raise
            outbox = _Outbox(self._loop)
            outbox.cut = task.cancel
            session = served.accept(outbox.send, party)
            why = "the other end closed the stream"

            async def read() -> None:
                async for data in frames:
                    session.frame(data)
                    await _drained(session)
                outbox.send(None)

            reader = asyncio.ensure_future(read())
            try:
                async for data in outbox:
                    yield data
            except asyncio.CancelledError:
                why = "the stream was cancelled"
                if outbox.overflown:
                    why = "the other end takes nothing"
                    await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, why)
                raise
            finally:
                reader.cancel()
                session.closed(why)

        return handle

    @contextmanager
    def _stranger(self, task: "asyncio.Task[Any]") -> Iterator[None]:
        """Count one whose proof is due, and end its task where that does not come in time, or it is the oldest of too
        many: those that mean to prove themselves do so at once. What it does not read counts like what it does not say.
        """
        if len(self._strangers) >= MAX_STRANGERS:
            next(iter(self._strangers)).cancel()
        self._strangers[task] = self._loop.call_later(HANDSHAKE_S, task.cancel)
        try:
            yield
        finally:
            self._strangers.pop(task).cancel()

    def connect(self, address: str, method: str, open_session: Open) -> None:
        """Open a client stream to `method` (`/service/name`) at `address`. Returns at once; the session made by
        `open_session` hears of everything, also that nobody was there."""
        self._loop.call_soon_threadsafe(self._connect, address, method, open_session)

    def _connect(self, address: str, method: str, open_session: Open) -> None:
        outbox = _Outbox(self._loop)
        task = self._loop.create_task(self._client(address, method, open_session(outbox.send), outbox))
        self._clients[id(task)] = (task, outbox)
        task.add_done_callback(lambda done: self._clients.pop(id(done), None))

    async def _client(self, address: str, method: str, session: DialerSession, outbox: _Outbox) -> None:
        why = "the other end closed the stream"
        channel, shown = dial(address, CHANNEL_OPTIONS, self._certificates)
        stream = channel.stream_stream(method)()
        outbox.cut = stream.cancel
        # Given the outbox itself, gRPC would feed from it in a task that outlives a stream which the other end broke.
        feeder: asyncio.Task[None] | None = None
        try:
            session.proven(await prove(stream, self._secrets, method, self._me, shown))
            feeder = self._loop.create_task(_feed(stream, outbox))
            while (data := await stream.read()) is not grpc.aio.EOF:
                session.frame(data)
                await _drained(session)
        except HandshakeError as error:
            why = str(error)
        except TimeoutError:
            why = "it has not answered in time"
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {why_unreachable(error.details() or '', self._certificates)}"
        except asyncio.CancelledError:
            why = "this side closed the stream"
        finally:
            session.closed(why)
            if feeder is not None:
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
            # grpc's own watches over a call, ends with it, and would tell of a cancel as of a failure.
            if getattr(task.get_coro(), "__qualname__", "") != "_schedule_rpc_coro":
                task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)

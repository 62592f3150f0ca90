"""The router's streams to its workers: one per worker, for all requests, kept open and reopened.

From a decode worker come its requests' records, from a worker of either kind its reports.
A stream begins with the worker's `WorkerInfo`, and to a decode worker with our `RouterHello`. When it
breaks, the hub hears `lost` at once and the link dials again with growing pauses. A worker whose model
is not the one that this router has the tokenizer of is refused, before the hub hears of it: its token
ids are other words. Nothing here waits for a client: what is read goes to the hub, which only queues;
what is sent is collected and leaves as one frame per write. A request's way goes on in `worker/streams.py`.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import grpc
import msgspec

from engine.messages import (
    DecodeRecord,
    PeerAddress,
    Record,
    RouterHello,
    RouterRecord,
    WorkerInfo,
    decode_worker_frame,
    encode,
)
from engine.types import Incarnation
from router.hub import Hub

ATTACH = {
    "prefill": "/headrace.v1.PrefillWorker/Attach",
    "decode": "/headrace.v1.DecodeWorker/Attach",
}
"""A worker of another kind, at an address that was one's before, knows no such method."""
FIRST_FRAME_S = 5.0
PAUSE_S = (0.05, 1.0)
"""First and longest pause between two attempts to reach a worker."""

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    # A frozen peer is noticed within two seconds, but only if all three are set: without the
    # last, gRPC waits a minute. gRPC's threads answer pings, not the engine: a worker in a long
    # step is not taken for dead.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Shared subchannels would also share gRPC's own, slower, pauses between attempts.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.enable_http_proxy", 0),
]

log = logging.getLogger(__name__)


class Outbox:
    """Records for one worker, in order; everything that waits leaves as one frame."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._filled = asyncio.Event()

    def put(self, record: RouterRecord) -> None:
        self._records.append(record)
        self._filled.set()

    async def frame(self) -> bytes:
        """The next frame, as soon as there is something to send."""
        await self._filled.wait()
        self._filled.clear()
        records, self._records = self._records, []
        return encode(records)


class OtherModelError(Exception):
    """The worker serves another model than this router."""


class Links:
    """The streams to all workers. Lives on the router's event loop."""

    # Mutable state: the task of every wanted worker, the outbox of every attached one, tasks that are ending, and as
    # much as is known of the fingerprint.

    def __init__(self, hub: Hub, incarnation: Incarnation, fingerprint: str = "") -> None:
        """`fingerprint` is that of the prepared model; workers of another one are refused, and none if it is empty.
        Where this host has not read the model's weights, the first worker that fits says the rest for all others."""
        self._hub = hub
        self._fingerprint = fingerprint
        self._hello = RouterHello(incarnation)
        self._tasks: dict[tuple[str, PeerAddress], asyncio.Task[None]] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._severed: set[asyncio.Task[None]] = set()
        hub.connect(self.send, self.sever)

    def send(self, worker: str, record: RouterRecord) -> None:
        """Queue a record. Raises KeyError if no stream to the worker is open."""
        self._outboxes[worker].put(record)

    def sever(self, worker: str) -> None:
        """End the stream to a worker that was given up, and dial again in a while: another life may answer then."""
        for (role, peer), task in list(self._tasks.items()):
            if peer.name != worker:
                continue
            task.cancel()
            self._severed.add(task)
            task.add_done_callback(self._severed.discard)
            again = self._keep(role, peer, after_s=PAUSE_S[1])
            self._tasks[role, peer] = asyncio.create_task(again, name=f"link {worker}")

    async def set_workers(self, prefill: Sequence[PeerAddress], decode: Sequence[PeerAddress]) -> None:
        """Dial new workers, and leave those that are not named any more."""
        lives = [(p.name, p.incarnation) for p in (*prefill, *decode) if p.incarnation]
        roles = [*(("prefill", peer) for peer in prefill), *(("decode", peer) for peer in decode)]
        wanted = {(role, PeerAddress(peer.name, peer.address)) for role, peer in roles}
        for key in set(self._tasks) - wanted:
            await _end(self._tasks.pop(key))
            self._hub.lost(key[1].name, for_good=True)
        self._hub.named([peer.name for peer in decode], lives)
        for key in wanted - set(self._tasks):
            self._hub.expect(key[1].name, key[0])
            self._tasks[key] = asyncio.create_task(self._keep(*key), name=f"link {key[1].name}")

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            await _end(task)

    async def _keep(self, role: str, peer: PeerAddress, after_s: float = 0.0) -> None:
        """Hold the stream to one worker open, for ever."""
        await asyncio.sleep(after_s)
        pause_s, refused = PAUSE_S[0], ""
        while True:
            try:
                async with grpc.aio.insecure_channel(peer.address, CHANNEL_OPTIONS) as channel:
                    async for _ in self._listen(role, channel, peer):
                        pause_s = PAUSE_S[0]
                log.warning("worker %s closed its stream", peer.name)
            except (grpc.aio.AioRpcError, msgspec.MsgspecError, TimeoutError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                log.info("no stream to worker %s: %s", peer.name, reason or type(error).__name__)
            except OtherModelError as error:
                if str(error) != refused:
                    log.error("worker %s is refused: %s", peer.name, error)
                refused, pause_s = str(error), PAUSE_S[1]
            except Exception:
                log.exception("the stream to worker %s failed", peer.name)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(pause_s * 2, PAUSE_S[1])

    async def _listen(self, role: str, channel: grpc.aio.Channel, peer: PeerAddress) -> AsyncIterator[None]:
        """One life of a worker's stream; yields once per frame."""
        call = channel.stream_stream(ATTACH[role])()
        writer: asyncio.Task[None] | None = None
        joined = False
        try:
            first = await asyncio.wait_for(call.read(), FIRST_FRAME_S)
            if first is grpc.aio.EOF:
                raise msgspec.ValidationError("the stream ended before its first frame")
            info, rest = self._introduction(first)
            outbox = Outbox()
            if role == "decode":
                outbox.put(self._hello)
            writer = asyncio.create_task(_write(call, outbox), name=f"writer {peer.name}")
            self._outboxes[peer.name] = outbox
            joined = True
            self._hub.joined(peer, info)
            self._hub.heard(peer.name, rest)
            yield
            while (frame := await call.read()) is not grpc.aio.EOF:
                self._hub.heard(peer.name, decode_worker_frame(frame))
                yield
        finally:
            self._outboxes.pop(peer.name, None)
            call.cancel()
            if joined:
                self._hub.lost(peer.name)
            if writer is not None:
                await _end(writer)

    def _introduction(self, frame: bytes) -> tuple[WorkerInfo, Sequence[DecodeRecord]]:
        """Return who the worker is, and what else it said. Raises ValidationError, and OtherModelError."""
        records = decode_worker_frame(frame)
        if not records or not isinstance(records[0], WorkerInfo):
            raise msgspec.ValidationError("the first record is not WorkerInfo")
        info = records[0]
        model = info.fingerprint.partition("/")[0]
        if not model.startswith(self._fingerprint):
            raise OtherModelError(
                f"it serves {info.model}, prepared as {model}; this router's tokenizer is of "
                f"the model prepared as {self._fingerprint}"
            )
        if self._fingerprint:
            self._fingerprint = model
        return info, records[1:]


async def _write(call: grpc.aio.StreamStreamCall, outbox: Outbox) -> None:
    """Write frames until the stream ends; its reader reports how it ended."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await outbox.frame())


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended. If the caller is cancelled meanwhile, it hears of that: whoever awaits
    the task itself cannot tell the task's cancellation from its own, and would go on for ever."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error

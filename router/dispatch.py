"""The router's streams to its workers: one per worker, for all requests, kept open and reopened.

From a decode worker come its requests' records, from a worker of either kind its reports.
A stream begins with the proof of both ends (`engine.handshake`), then with the worker's `WorkerInfo`; on our side with
our `RouterHello`, and then with the list of all workers. When it
breaks, the hub hears `lost` at once and the link dials again with growing pauses. A worker whose model
is not the one that this router has the tokenizer of is refused, before the hub hears of it: its token
ids are other words. Nothing here waits for a client: what is read goes to the hub, which only queues;
what is sent is collected and leaves as one frame per write. A request's way goes on in `worker/streams.py`.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress

import grpc
import msgspec

from access.internal import dial, is_refusal, why_unreachable
from access.tenants import MAX_NAME_CHARS
from access.tls import ServerCertificates
from engine.dialing import prove
from engine.handshake import HandshakeError, Party, Secrets
from engine.messages import (
    PROTOCOL,
    DecodeRecord,
    HoldingTold,
    LifeOfProcess,
    Load,
    Orphan,
    PeerAddress,
    Place,
    ProcessesTold,
    ReadTold,
    Record,
    RouterHello,
    RouterRecord,
    TenantsTold,
    WorkerInfo,
    decode_worker_frame,
    frames,
)
from engine.types import Incarnation
from router.hub import Hub

ATTACH = {
    "prefill": "/headrace.v1.PrefillWorker/Attach",
    "decode": "/headrace.v1.DecodeWorker/Attach",
}
"""A worker of another kind, at an address that was one's before, knows no such method."""
FIRST_FRAME_S = 5.0
RECORDS_AT_ONCE = 1024
"""Records of one frame that are heard before others have their turn on the loop."""
TOKENS_AT_ONCE = 8192
"""The same of requests that a worker has kept, by their tokens: their output so far is made text again."""
MAX_UNSENT_BYTES = 64 << 20
"""Bytes that wait for one worker, by an estimate from above; past it, it is given up as one that does not listen."""
RECORD_BYTES = 1024
"""The most that a record takes beside what a prompt, a list of processes or tenants, or a caller's note adds to it."""
TENANT_BYTES = 4 * MAX_NAME_CHARS + 32
TOKEN_BYTES = 5
WAYS = 2
PAUSE_S = (0.05, 1.0)
"""First and longest pause between two attempts to reach a worker."""

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 8 * 1024 * 1024),
    ("grpc.max_send_message_length", 8 * 1024 * 1024),
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
    """Records for one worker, in order; everything that waits leaves together. `cut` ends the stream."""

    def __init__(self, cut: Callable[[], object]) -> None:
        self._cut = cut
        self._records: list[Record] = []
        self._unsent_bytes = 0
        self._filled = asyncio.Event()

    def put(self, record: RouterRecord) -> None:
        self._records.append(record)
        self._unsent_bytes += _most_bytes(record)
        self._filled.set()
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            log.error("a worker takes nothing, and %d records wait: its stream is ended", len(self._records))
            self._records.clear()
            self._unsent_bytes = 0
            self._cut()

    async def frames(self) -> list[bytes]:
        """The next frames, as soon as there is something to send."""
        await self._filled.wait()
        self._filled.clear()
        records, self._records, self._unsent_bytes = self._records, [], 0
        return frames(records)


def _most_bytes(record: RouterRecord) -> int:
    """Return what a record that waits may take as a frame, without writing it."""
    size = RECORD_BYTES
    if isinstance(record, Place):
        one = record.record
        stops = len(one.stop_token_ids)
        size += TOKEN_BYTES * (len(one.tokens) + stops) + len(one.context)
    elif isinstance(record, ProcessesTold):
        size += RECORD_BYTES * len(record.processes)
    elif isinstance(record, TenantsTold):
        size += TENANT_BYTES * (len(record.uses) + len(record.lines))
    elif isinstance(record, ReadTold):
        size += len(record.blocks)
    return size


class OtherModelError(Exception):
    """The worker serves another model than this router."""


class Links:
    """The streams to all workers. Lives on the router's event loop."""

    # Mutable state: the task of every wanted worker, the outbox of every attached one, tasks that are ending, the
    # processes of all workers, how far each life has told what it holds, and as much as is known of the fingerprint.

    def __init__(
        self,
        hub: Hub,
        incarnation: Incarnation,
        secrets: Secrets,
        fingerprint: str = "",
        name: str = "router",
        certificates: ServerCertificates | None = None,
    ) -> None:
        """`name` is this router's, `fingerprint` that of the prepared model; workers of another one are refused, and
        none if it is empty. Where this host has not read the model's weights, the first worker that fits says the rest
        for all others. With `certificates` the streams have TLS, and workers without it are
        refused."""
        self._hub = hub
        self._secrets = secrets
        self._certificates = certificates
        self._fingerprint = fingerprint
        self._me = Party("router", name, incarnation)
        self._hello = RouterHello(incarnation, name, PROTOCOL)
        self._named: dict[str, LifeOfProcess] = {}
        self._met: dict[str, LifeOfProcess] = {}
        self._heard: dict[str, tuple[Incarnation, int]] = {}
        self._tasks: dict[tuple[str, PeerAddress], asyncio.Task[None]] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._severed: set[asyncio.Task[None]] = set()
        hub.connect(self.send, self.sever)

    def send(self, worker: str, record: RouterRecord) -> None:
        """Queue a record. Raises KeyError if no stream to the worker is open."""
        self._outboxes[worker].put(record)

    def tell_siblings(self, told: TenantsTold) -> None:
        """Send a record that workers pass on to the other routers, by way of two of them where there are so many."""
        for worker in sorted(self._outboxes)[:WAYS]:
            self._outboxes[worker].put(told)

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
        """Dial new workers, and leave those that are not named any more. A worker without an address is down, and will
        be named again: one that is not named at all there will not be."""
        expected = {"prefill": {peer.name for peer in prefill}, "decode": {peer.name for peer in decode}}
        prefill, decode = ([peer for peer in pool if peer.address] for pool in (prefill, decode))
        lives = [(p.name, p.incarnation) for p in (*prefill, *decode) if p.incarnation]
        peers = {peer.name: peer for peer in (*prefill, *decode)}
        self._named = {
            name: LifeOfProcess(name, peer.incarnation, peer.pid, peer.host) for name, peer in peers.items() if peer.pid
        }
        self._met = {name: life for name, life in self._met.items() if name in peers}
        self._tell_processes()
        roles = [*(("prefill", peer) for peer in prefill), *(("decode", peer) for peer in decode)]
        wanted = {(role, PeerAddress(peer.name, peer.address)) for role, peer in roles}
        for key in set(self._tasks) - wanted:
            await _end(self._tasks.pop(key))
            self._heard.pop(key[1].name, None)  # of what it held nothing is known any more
            self._hub.lost(key[1].name, for_good=True)
        for role, names in expected.items():
            self._hub.expect_only(role, names)
        self._hub.named([peer.name for peer in decode], lives)
        for key in wanted - set(self._tasks):
            self._hub.expect(key[1].name, key[0])
            self._tasks[key] = asyncio.create_task(self._keep(*key), name=f"link {key[1].name}")

    def _tell_processes(self) -> None:
        """Tell every worker who there is. One that no supervisor has started is taken at its word, which only one that
        has the secret can give."""
        told = ProcessesTold(list({**self._met, **self._named}.values()))
        for outbox in self._outboxes.values():
            outbox.put(told)

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
                channel, shown = dial(peer.address, CHANNEL_OPTIONS, self._certificates)
                async with channel:
                    async for _ in self._listen(role, channel, peer, shown):
                        pause_s = PAUSE_S[0]
                log.info("worker %s closed its stream", peer.name)
            except (grpc.aio.AioRpcError, msgspec.MsgspecError, TimeoutError) as error:
                reason = str(error)
                if isinstance(error, grpc.aio.AioRpcError):
                    reason = why_unreachable(error.details() or "", self._certificates)
                if is_refusal(reason) and reason != refused:
                    log.error("worker %s is refused: %s", peer.name, reason)
                    refused = reason
                log.info("no stream to worker %s: %s", peer.name, reason or type(error).__name__)
            except (HandshakeError, OtherModelError) as error:
                if str(error) != refused:
                    log.error("worker %s is refused: %s", peer.name, error)
                refused, pause_s = str(error), PAUSE_S[1]
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                log.warning("the stream to worker %s was cut: it has read nothing for too long", peer.name)
            except Exception:
                log.exception("the stream to worker %s failed", peer.name)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(pause_s * 2, PAUSE_S[1])

    async def _listen(
        self, role: str, channel: grpc.aio.Channel, peer: PeerAddress, shown: bytes
    ) -> AsyncIterator[None]:
        """One life of a worker's stream; yields once per frame."""
        call = channel.stream_stream(ATTACH[role])()
        writer: asyncio.Task[None] | None = None
        joined = False
        try:
            party = await prove(call, self._secrets, ATTACH[role], self._me, shown)
            if (party.role, party.name) != (role, peer.name):
                raise HandshakeError(f"{party.role} {party.name!r} answers at its address")
            info, rest = self._introduction(await _read(call), party)
            outbox = Outbox(call.cancel)
            life, heard = self._heard.get(peer.name, (info.incarnation, 0))
            outbox.put(msgspec.structs.replace(self._hello, heard=heard if life == info.incarnation else 0))
            writer = asyncio.create_task(_write(call, outbox), name=f"writer {peer.name}")
            self._outboxes[peer.name] = outbox
            self._met[peer.name] = LifeOfProcess(info.name, info.incarnation, info.pid, info.host)
            self._tell_processes()
            joined = True
            self._hub.joined(peer, info)
            await self._hear(info, rest)
            yield
            while (frame := await call.read()) is not grpc.aio.EOF:
                await self._hear(info, decode_worker_frame(frame))
                yield
        finally:
            self._outboxes.pop(peer.name, None)
            call.cancel()
            if joined:
                self._hub.lost(peer.name)
            if writer is not None:
                await _end(writer)

    async def _hear(self, worker: WorkerInfo, records: Sequence[DecodeRecord]) -> None:
        """Tell the hub, so many records at a time that clients do not wait for a worker that says too much. Raises
        ValidationError for a report that is not sound."""
        if any(isinstance(record, Load) and not record.is_sound for record in records):
            raise msgspec.ValidationError("its report has figures that no worker can have")
        for at, part in enumerate(_portions(records)):
            if at:
                await asyncio.sleep(0)
            self._hub.heard(worker.name, part)
        for record in records:
            if isinstance(record, HoldingTold):
                self._heard[worker.name] = worker.incarnation, record.number

    def _introduction(self, frame: bytes, party: Party) -> tuple[WorkerInfo, Sequence[DecodeRecord]]:
        """Return who the worker is, and what else it said. Raises ValidationError, OtherModelError, and HandshakeError
        where it speaks for another than itself."""
        records = decode_worker_frame(frame)
        if not records or not isinstance(records[0], WorkerInfo):
            raise msgspec.ValidationError("the first record is not WorkerInfo")
        info = records[0]
        sizes = info.blocks, info.host_blocks, info.disk_blocks, info.chunk_tokens, info.growth_tokens or 0
        if info.block_size < 1 or info.context_tokens < 1 or min(sizes) < 0:
            raise msgspec.ValidationError(f"{info.name!r} says that it has sizes which none can have")
        if not party.is_called(info.role, info.name, info.incarnation):
            raise HandshakeError(f"it has proven to be {party}, and says that it is {info.name!r}")
        model = info.fingerprint.partition("/")[0]
        if not model.startswith(self._fingerprint):
            raise OtherModelError(
                f"it serves {info.model}, prepared as {model}; this router's tokenizer is of "
                f"the model prepared as {self._fingerprint}"
            )
        if self._fingerprint:
            self._fingerprint = model
        return info, records[1:]


def _portions(records: Sequence[DecodeRecord]) -> Iterator[Sequence[DecodeRecord]]:
    """Yield what is heard at once, in order; a request that has more tokens than that by itself."""
    begin = tokens = 0
    for at, record in enumerate(records):
        if isinstance(record, Orphan):
            tokens += len(record.record.tokens) + len(record.tokens)
        if at + 1 - begin == RECORDS_AT_ONCE or tokens >= TOKENS_AT_ONCE or at + 1 == len(records):
            yield records[begin : at + 1]
            begin, tokens = at + 1, 0


async def _write(call: grpc.aio.StreamStreamCall, outbox: Outbox) -> None:
    """Write frames until the stream ends; its reader reports how it ended."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            for data in await outbox.frames():
                await call.write(data)


async def _read(call: grpc.aio.StreamStreamCall) -> bytes:
    """Return one of a stream's first frames. Raises TimeoutError, and ValidationError where there is none."""
    frame: bytes = await asyncio.wait_for(call.read(), FIRST_FRAME_S)
    if frame is grpc.aio.EOF:
        raise msgspec.ValidationError("the stream ended before its first frame")
    return frame


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended. If the caller is cancelled meanwhile, it hears of that: whoever awaits
    the task itself cannot tell the task's cancellation from its own, and would go on for ever."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error

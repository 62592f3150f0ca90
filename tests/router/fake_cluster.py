"""Stand-ins: a byte-level text model, and workers that speak the real records over real gRPC."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import grpc
import msgspec

from engine.handshake import NONCE_BYTES, Listener, Party, PartyRole
from engine.messages import (
    PROTOCOL,
    Accepted,
    Cancel,
    Ended,
    Finish,
    LifeOfProcess,
    Load,
    Orphan,
    OrphansTold,
    PeerAddress,
    Place,
    ProcessesTold,
    Record,
    Refused,
    RequestStats,
    RouterHello,
    Tokens,
    WorkerInfo,
    decode_router_frame,
    encode,
)
from engine.text.dialect import Dialect
from engine.text.messages import ChatPrompt
from engine.types import Beam, FinishReason, Incarnation, SamplingParams, TokenLogprobs
from router.dispatch import ATTACH
from tests.secrets_of_tests import SECRETS

END = 256  # the fake model's end-of-message token


def logprobs_of(index: int, token: int, count: int) -> TokenLogprobs:
    """What fake workers say of output token number `index`: numbers that 32 bits do not hold."""
    return TokenLogprobs(token, -0.1 * (index + 1), tuple([((token + at) % 256, -0.3 * at) for at in range(count)]))


class ByteText:
    """Token ids are UTF-8 bytes; 256 ends a message and is written `<end>`."""

    name = "bytes"
    vocab_size = 300
    drawable_tokens = 300
    context_tokens = 512
    stop_ids = frozenset({END})
    dialect = Dialect()
    added_ids: Mapping[str, int] = {}
    model_dir: Path | None = None
    sampling = SamplingParams()

    def encode(self, text: str, *, add_special: bool, is_literal: bool = False) -> list[int]:
        if is_literal:
            return list(text.encode())
        ids: list[int] = []
        for index, part in enumerate(text.split("<end>")):
            ids += ([END] if index else []) + list(part.encode())
        return ids

    def render_chat(self, chat: ChatPrompt) -> str:
        text = "".join(f"[{message.role}]{message.content}<end>" for message in chat.messages)
        return text + ("[assistant]" if chat.add_generation_prompt else "")

    def encode_chat_text(self, rendered: str) -> list[int]:
        return self.encode(rendered, add_special=False)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return ["<end>" if token == END else chr(token) for token in ids]

    def text_of(self, ids: Sequence[int]) -> str:
        return "".join(self.token_strings(ids))

    def tokenizer_files(self) -> dict[str, str]:
        return {"tokenizer.json": "{}"}

    def detokenizer(self, shown: frozenset[str] = frozenset(), *, continues: bool = False) -> ByteDetokenizer:
        return ByteDetokenizer()

    def token_bytes(self, token: int) -> tuple[bytes, bool]:
        return (b"<end>", False) if token == END else (bytes([token]) if token < 256 else b"", True)


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(i for i in ids if i < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


def worker_info(
    name: str,
    role: str,
    incarnation: int = 1,
    blocks: int = 64,
    block_size: int = 16,
    fingerprint: str = "f",
) -> WorkerInfo:
    return WorkerInfo(
        name=name,
        role=role,
        incarnation=Incarnation(incarnation),
        address=f"{name}:1",
        model="bytes",
        fingerprint=fingerprint,
        block_size=block_size,
        blocks=blocks,
        context_tokens=512,
        pid=1,
        host="h",
        protocol=PROTOCOL,
    )


def load(step: int = 1, active: int = 0, blocks: int = 64, **more: object) -> Load:
    return Load(
        step=step,
        free_blocks=blocks - active,
        cached_blocks=0,
        active_blocks=active,
        reserved_blocks=0,
        quarantined_blocks=0,
        **more,  # type: ignore[arg-type]
    )


class FakeWorkers:
    """One decode and one prefill worker on one gRPC server; answers with `answer` plus END, behind the history;
    answer i of a beam search lacks its first i tokens.

    A new stream takes over the old one's voice: what still runs goes on talking on it, as a ghost would. `got` holds
    every record the decode worker received, but for `hellos`. `slow_s` pauses between tokens; `hold` set means that
    nothing is answered to a Place at all; `mute_s` is a silence before every acceptance; `refusals` is how many Places
    to refuse. A router of another incarnation is told of everything that has a context, without end. `deaf` set, its
    hello is not answered.
    """

    def __init__(self, decode: str = "d0", prefill: str = "p0") -> None:
        self.decode, self.prefill = decode, prefill
        self.answer = list(b"hello world")
        self.slow_s = 0.0
        self.mute_s = 0.0
        self.hold = False
        self.deaf = False
        self.orphans: dict[str, Orphan] = {}
        self._ends: dict[str, Ended] = {}
        self._router = 0
        self.refusals = 0
        self.got: list[Place | Cancel | Finish] = []
        self.port = 0
        self.blocks = 64
        self.fingerprint = "f"
        self.secrets = SECRETS
        self.listed: list[LifeOfProcess] = []
        self.hellos: list[RouterHello] = []
        self._server: grpc.aio.Server | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._outbox: asyncio.Queue[Record] = asyncio.Queue()
        self.incarnation = 1

    async def start(self) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.http2.max_ping_strikes", 0),
            ]
        )
        for service, method, handler in (
            ("DecodeWorker", "Attach", grpc.stream_stream_rpc_method_handler(self._attach)),
            ("PrefillWorker", "Attach", grpc.stream_stream_rpc_method_handler(self._watch)),
        ):
            generic = grpc.method_handlers_generic_handler(f"headrace.v1.{service}", {method: handler})
            self._server.add_generic_rpc_handlers((generic,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        for task in self._running.values():
            task.cancel()
        # Stopped once only: a second stop of an aio server can wait for ever.
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    @property
    def peers(self) -> tuple[list[PeerAddress], list[PeerAddress]]:
        address = f"127.0.0.1:{self.port}"
        return [PeerAddress(self.prefill, address)], [PeerAddress(self.decode, address)]

    async def _prove(self, role: PartyRole, name: str, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Say what a worker says before its first frame."""
        me = Party(role, name, Incarnation(self.incarnation))
        listener = Listener(self.secrets, ATTACH[role], me, frozenset({"router"}), bytes(NONCE_BYTES))
        yield listener.welcome(await anext(frames))
        listener.check(await anext(frames))

    async def _watch(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for word in self._prove("prefill", self.prefill, aiter(requests)):
            yield word
        info = worker_info(self.prefill, "prefill", self.incarnation, fingerprint=self.fingerprint)
        yield encode([info])
        while True:
            yield encode([load(s_per_token=1e-3)])
            await asyncio.sleep(0.1)

    async def _attach(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        frames = aiter(requests)
        async for word in self._prove("decode", self.decode, frames):
            yield word
        outbox: asyncio.Queue[Record] = asyncio.Queue()
        self._outbox = outbox

        async def read() -> None:
            async for frame in frames:
                for record in decode_router_frame(frame):
                    if isinstance(record, RouterHello):
                        self._hello(record)
                        continue
                    if isinstance(record, ProcessesTold):
                        self.listed = record.processes
                        continue
                    self.got.append(record)
                    self._take(record)

        reader = asyncio.create_task(read())
        try:
            info = worker_info(self.decode, "decode", self.incarnation, self.blocks, fingerprint=self.fingerprint)
            yield encode([info])
            while True:
                try:
                    record: Record = await asyncio.wait_for(outbox.get(), 0.1)
                except TimeoutError:
                    record = load(blocks=self.blocks)
                if self.mute_s and isinstance(record, Accepted):
                    await asyncio.sleep(self.mute_s)
                yield encode([record])
        finally:
            reader.cancel()

    def _hello(self, hello: RouterHello) -> None:
        self.hellos.append(hello)
        if self.deaf:
            return
        if hello.incarnation != self._router:
            for name, orphan in self.orphans.items():
                lists = {"tokens": list(orphan.tokens), "logprobs": list(orphan.logprobs)}
                self._outbox.put_nowait(msgspec.structs.replace(orphan, **lists))
                if name in self._ends:
                    self._outbox.put_nowait(self._ends[name])
        self._router = hello.incarnation
        self._outbox.put_nowait(OrphansTold())

    def _take(self, record: Place | Cancel | Finish) -> None:
        if isinstance(record, Place):
            if self.refusals:
                self.refusals -= 1
                self._outbox.put_nowait(Refused(record.record.request, record.placement, 3))
            elif not self.hold:
                task = asyncio.create_task(self._run(record))
                self._running[record.record.request] = task
            return
        task = self._running.pop(record.request, None)
        if task is not None:
            task.cancel()
        finish = isinstance(record, Finish)
        self._ended(
            record.request,
            record.placement,
            FinishReason.STOP if finish else record.reason,
            record.tokens_kept if finish else 0,
        )

    async def _run(self, place: Place) -> None:
        record = place.record
        self._outbox.put_nowait(Accepted(record.request, place.placement, 0))
        ids = [*self.answer, END]
        reason = FinishReason.STOP
        if record.max_tokens < len(ids):
            ids, reason = ids[: record.max_tokens], FinishReason.LENGTH
        if record.beams is not None:
            self._running.pop(record.request, None)
            beams = [Beam(ids[at:], -0.5 * at, reason) for at in range(record.beams.answers)]
            self._ended(record.request, place.placement, reason, 0, beams)
            return
        history = len(record.tokens) - record.prompt_tokens
        if record.context:
            self.orphans[record.request] = Orphan(
                record=record,
                placement=place.placement,
                prefill=self.prefill,
                tokens=ids[:history],
                logprobs=list(record.emitted_logprobs),
                age_s=0.5,
            )
        for index, token in enumerate(ids):
            if index < history:
                continue
            if self.slow_s:
                await asyncio.sleep(self.slow_s)
            logprobs = [] if record.logprobs is None else [logprobs_of(index, token, record.logprobs)]
            self._outbox.put_nowait(Tokens(record.request, place.placement, index, [token], logprobs))
            if record.context:
                self.orphans[record.request].tokens.append(token)
                self.orphans[record.request].logprobs.extend(logprobs)
        self._running.pop(record.request, None)
        self._ended(record.request, place.placement, reason, len(ids))

    def _ended(
        self,
        request: str,
        placement: int,
        reason: FinishReason,
        output: int,
        beams: Sequence[Beam] = (),
    ) -> None:
        stats = RequestStats(
            stages={"decode_run": 1e-4},
            output_tokens=output,
            migrated_blocks=2,
            transport="shm",
            prefill_worker=self.prefill,
            decode_worker=self.decode,
        )
        end = Ended(
            request=request,  # type: ignore[arg-type]
            placement=placement,
            reason=reason,
            stats=stats,
            beams=list(beams),
        )
        self._ends[request] = end
        self._outbox.put_nowait(end)


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Wait for something that another task does."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)

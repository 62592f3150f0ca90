"""Measures moving KV blocks between two workers on one GPU, over `cuda_ipc` and `nccl`.

Two processes, each with a pool and the transfer thread of a worker; chunks of blocks are digested, moved and verified
as in a handoff. Reported are the time from posting a receive to its verified end, the bytes per second in it, what a
pair costs in device memory, and how soon the receiver is free after the sender was killed in the middle.
"""

import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from benchmarks.gpu.card import Card
from engine.backends.gpu.pool import DeviceKV
from engine.kv.layout import KVLayout
from engine.messages import Endpoint, Handoff
from engine.storage.paged import PagedKV
from engine.types import BlockId, Incarnation, RequestId
from transfer.config import NcclConfig, TransferConfig, nccl_environment
from transfer.handoff.commands import (
    Connect,
    IncomingBlock,
    MoverEvent,
    OutgoingBlock,
    Posted,
    PostRecv,
    PostSend,
    Received,
    Rows,
    Unreachable,
)
from transfer.handoff.negotiation import WP64, Agreement
from transfer.mover import Mover
from transfer.registry import open_transport
from transfer.transport import Move, Transport

SENDER, RECEIVER = Incarnation(1), Incarnation(2)
MODEL = KVLayout(kv_heads=8, layers=32, block_size=16, head_dim=128, dtype="bfloat16")
"""2 MiB a block: an 8B model with grouped queries."""
SMALL = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=8)
"""The model of a dry run."""
CHUNKS = (1, 8, 64, 512, 2048)
LIMIT_S = 60.0

WAYS = {
    "cuda_ipc": ("cuda_ipc", NcclConfig()),
    "nccl, multi_rank": ("nccl", NcclConfig(share_gpu="multi_rank")),
    "nccl, multi_rank, one-sided": ("nccl", NcclConfig(share_gpu="multi_rank", one_sided=True)),
    "nccl, two_hosts": ("nccl", NcclConfig(share_gpu="two_hosts")),
}

Line = dict[str, str | int | float]
Opener = Callable[[str, Any, Incarnation], Transport]


def opened(kind: str, pool: Any, me: Incarnation) -> Transport:
    """Open a transport of a kind of `WAYS`. The process's environment is NCCL's, so each way needs a process of its
    own."""
    name, nccl = WAYS[kind]
    os.environ.update(nccl_environment(nccl, f"{me}"))
    return open_transport(name, pool, me, TransferConfig(nccl=nccl))


def by_name(name: str, pool: Any, me: Incarnation) -> Transport:
    return open_transport(name, pool, me, TransferConfig())


def on_gpu(layout: KVLayout, blocks: int) -> DeviceKV:
    return DeviceKV(layout, blocks, "cuda:0")


class TransportWorker:
    """One end: a pool, a transport, and the thread that drives it."""

    def __init__(
        self, kind: str, me: Incarnation, layout: KVLayout, blocks: int, pool_of: Any, opener: Opener
    ) -> None:
        self.pool = pool_of(layout, blocks)
        self.transport = opener(kind, self.pool, me)
        self.events: queue.Queue[MoverEvent] = queue.Queue()
        self.mover = Mover({self.transport.name: self.transport}, self.pool, layout, self.events.put)
        self.agreement = Agreement(layout, digest=WP64)
        self.mover.start()

    def connect(self, peer: Incarnation, endpoint: Endpoint) -> None:
        self.mover.submit(Connect(peer, endpoint, self.agreement))

    def event(self, kind: type[MoverEvent], may_break: bool = False) -> Any:
        """Return the next event of a kind. Raises RuntimeError if the way breaks and may not, queue.Empty after a
        while."""
        while True:
            found = self.events.get(timeout=LIMIT_S)
            if isinstance(found, Unreachable) and not may_break:
                raise RuntimeError(found.error)
            if isinstance(found, kind):
                return found

    def close(self) -> None:
        self.mover.stop()
        self.pool.close()


def _move(seq: int, count: int) -> tuple[Handoff, tuple[BlockId, ...]]:
    name = Handoff(RequestId("bench"), 1, seq, RECEIVER, SENDER)
    return name, tuple(BlockId(block) for block in range(count))


def _send(pipe: Connection, kind: str, layout: KVLayout, blocks: int, pool_of: Any, opener: Opener) -> None:
    """Run the sender's process: post a chunk for each number that it is told."""
    worker = TransportWorker(kind, SENDER, layout, blocks, pool_of, opener)
    worker.pool.memory.random_(0, 256)
    pipe.send(msgspec.msgpack.encode(worker.transport.describe(RECEIVER)))
    worker.connect(RECEIVER, msgspec.msgpack.decode(pipe.recv(), type=Endpoint))
    pipe.send("connected")
    while (told := pipe.recv()) is not None:
        seq, count = told
        name, local = _move(seq, count)
        out = tuple(OutgoingBlock(b, 0, b, layout.block_size, b"") for b in local)
        worker.mover.submit(PostSend(RECEIVER, Move(name, 0, local=local), out))
        pipe.send(worker.event(Posted).digests)
    worker.close()


class TransportBench:
    """A receiver here, and its sender in another process."""

    def __init__(
        self,
        kind: str,
        layout: KVLayout = MODEL,
        blocks: int = CHUNKS[-1],
        pool_of: Any = on_gpu,
        opener: Opener = opened,
    ) -> None:
        self.kind = kind
        self.layout = layout
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        arguments = (there, kind, layout, blocks, pool_of, opener)
        self.sender = context.Process(target=_send, args=arguments)
        self.sender.start()
        there.close()
        self.worker = TransportWorker(kind, RECEIVER, layout, blocks, pool_of, opener)
        endpoint = msgspec.msgpack.decode(self._hear(), type=Endpoint)
        self.pipe.send(msgspec.msgpack.encode(self.worker.transport.describe(SENDER)))
        self._hear()
        self.worker.connect(SENDER, endpoint)
        self._seq = 0

    def _hear(self) -> Any:
        if not self.pipe.poll(LIMIT_S):
            raise RuntimeError(f"the sender did not answer within {LIMIT_S:g} s")
        return self.pipe.recv()

    def begin(self, count: int) -> None:
        """Have a chunk sent, and post the receive for it."""
        self._seq += 1
        self.pipe.send((self._seq, count))
        digests = self._hear()
        name, blocks = _move(self._seq, count)
        size = self.layout.block_size
        incoming = tuple(
            IncomingBlock((Rows(0, block, 0, size),), 0, size, b"", digest)
            for block, digest in zip(blocks, digests, strict=True)
        )
        remote = tuple((block, 0) for block in blocks)
        self.worker.mover.submit(PostRecv(SENDER, Move(name, 0, remote=remote), incoming))

    def seconds(self, count: int) -> float:
        """Time a receive of `count` blocks from its posting to its verified end."""
        self.begin(count)
        received = self.worker.event(Received)
        if received.error:
            raise RuntimeError(received.error)
        return float(received.seconds)

    def line(self, count: int, rounds: int) -> Line:
        self.seconds(count)
        found = [self.seconds(count) for _ in range(rounds)]
        middle = statistics.median(found)
        nbytes = count * self.layout.block_bytes
        return {
            "transport": self.kind,
            "blocks": count,
            "bytes": nbytes,
            "ms": middle * 1e3,
            "ms_min": min(found) * 1e3,
            "ms_max": max(found) * 1e3,
            "gib_per_s": nbytes / middle / 2**30,
        }

    def freed_after_kill_s(self, count: int) -> float:
        """Kill the sender in the middle of a chunk, if that is quick enough; returns how long its receive lives on."""
        self.begin(count)
        self.sender.kill()
        self.sender.join()
        began_s = time.monotonic()
        self.worker.event(Received, may_break=True)
        return time.monotonic() - began_s

    def close(self) -> None:
        if self.sender.is_alive():
            self.pipe.send(None)
            self.sender.join(LIMIT_S)
        self.worker.close()
        self.pipe.close()


def measure(kind: str, rounds: int, **options: Any) -> list[Line]:
    """Return all lines of one transport. Raises RuntimeError where a transfer fails."""
    began_s = time.monotonic()
    bench = TransportBench(kind, **options)
    try:
        bench.seconds(1)
        first: Line = {"transport": kind, "meet_s": time.monotonic() - began_s}
        lines = [bench.line(count, rounds) for count in CHUNKS]
        report = getattr(bench.worker.transport, "report", None)
        if report is not None:
            first |= {"pair_mib": report.pair_bytes / 2**20, "slots_mib": report.slot_bytes / 2**20}
            first["rings"] = report.rings  # 0: what was to be put was sent
        first["freed_after_kill_s"] = bench.freed_after_kill_s(CHUNKS[-1])
        return [first, *lines]
    finally:
        bench.close()


def transport(card: Card) -> Iterator[Line]:
    """Run as a part of `benchmarks.gpu`: every way, each in processes of its own. Where one of NCCL does not work,
    which depends on its version, a line says so; where `cuda_ipc` does not, this raises."""
    if card.device.type == "cpu":
        yield from measure("shm", card.sizes.rounds, layout=SMALL, pool_of=PagedKV, opener=by_name)
        return
    spawn = multiprocessing.get_context("spawn")
    for kind in WAYS:
        with ProcessPoolExecutor(1, mp_context=spawn) as alone:
            try:
                yield from alone.submit(measure, kind, card.sizes.rounds).result()
            except Exception as error:
                if kind == "cuda_ipc":
                    raise
                yield {"transport": kind, "works": 0, "why": f"{type(error).__name__}: {error}"}

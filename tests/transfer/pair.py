"""A prefill and a decode worker, as far as their transfer threads and the pure sides of a handoff: no schedulers."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from engine.kv.layout import KVLayout
from engine.messages import Handoff
from engine.storage.paged import KVTensors, PagedKV
from engine.types import BlockId, Incarnation, RequestId
from tests.transfer.wire import ON_DEVICE, open_any
from transfer.config import TransferConfig
from transfer.digest import WP64, XXH3
from transfer.handoff.commands import (
    Arrived,
    Broken,
    Command,
    Connect,
    Disconnect,
    Emit,
    ExpectedBlock,
    Fenced,
    MoverEvent,
    OutgoingBlock,
    Posted,
    Received,
    Rows,
    Sent,
    Settled,
)
from transfer.handoff.negotiation import AS_STORED, Agreement
from transfer.handoff.receiver import KVReceiver
from transfer.handoff.sender import KVSender
from transfer.host.loopback import LoopbackHub
from transfer.mover import Mover
from transfer.ranks.movers import RankMovers, Way
from transfer.transport import Transport

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=8)
BLOCKS = 40
PREFILL, DECODE = Incarnation(11), Incarnation(22)
H = Handoff(RequestId("r"), 1, 1, DECODE, PREFILL)


class Opened(NamedTuple):
    """The movers of a worker that is there already, the ways to it by transport, and where its events come."""

    mover: RankMovers
    ways: Mapping[str, Way]
    inbox: list[MoverEvent]
    layout: KVLayout


class Worker:
    """One pool with its transfer thread; events wait in `inbox` for the engine."""

    def __init__(
        self,
        kind: str,
        me: Incarnation,
        hub: LoopbackHub,
        layout: KVLayout,
        stall_s: float = 10.0,
        pool: KVTensors | None = None,
        opened: Opened | None = None,
    ) -> None:
        """`pool`: of a worker that goes on without this transfer thread. `opened`: of one that has its own."""
        self.me = me
        self.opened = opened
        self.borrowed = pool is not None
        self.pool: Any = pool or PagedKV(layout, BLOCKS)
        self.layout = layout
        self.inbox: list[MoverEvent] = []
        self.transport: Transport
        self.mover: Mover | RankMovers
        self.way: Way
        if opened is not None:
            self.mover, self.way, self.inbox = opened.mover, opened.ways[kind], opened.inbox
            return
        config = TransferConfig(stall_s=stall_s)
        self.way = self.transport = open_any(kind, self.pool, me, hub, config)
        self.mover = Mover({kind: self.transport}, self.pool, layout, self.inbox.append)

    def connect(self, other: "Worker", digest_share: float, wire: str = AS_STORED) -> None:
        agreement = Agreement(other.layout, digest_share, WP64 if self.way.name in ON_DEVICE else XXH3, wire)
        endpoint = other.way.describe(self.me)
        if self.opened is not None:  # the other is too, and its answer knows how many ranks this one has
            endpoint = other.way.describe(self.me, len(self.way.describe(other.me).ranks) or 1)
        self.mover.submit(Connect(other.me, endpoint, agreement))


class Pair:
    """A prefill and a decode worker, and the engine loops that the real workers have."""

    def __init__(
        self,
        kind: str,
        threaded: bool = False,
        digest_share: float = 1.0,
        layouts: tuple[KVLayout, KVLayout] = (LAYOUT, LAYOUT),
        stall_s: float = 10.0,
        wire: str = AS_STORED,
        pools: tuple[KVTensors | None, KVTensors | None] = (None, None),
        opened: tuple[Opened | None, Opened | None] = (None, None),
    ) -> None:
        self.hub = LoopbackHub()
        self.threaded = threaded
        self.prefill = Worker(kind, PREFILL, self.hub, layouts[0], stall_s, pools[0], opened[0])
        self.decode = Worker(kind, DECODE, self.hub, layouts[1], stall_s, pools[1], opened[1])
        self.sender, self.receiver = KVSender(), KVReceiver()
        self.told: list[Command] = []
        self.events: list[MoverEvent] = []
        self.connect(digest_share, wire)
        if threaded:
            self.prefill.mover.start()
            self.decode.mover.start()
        else:
            # The decode worker must be known before anybody dials.
            self.prefill.mover.run_once()
            self.decode.mover.run_once()

    def connect(self, digest_share: float = 1.0, wire: str = AS_STORED) -> None:
        """What the hellos of a new stream make both ends do."""
        self.prefill.connect(self.decode, digest_share, wire)
        self.decode.connect(self.prefill, digest_share, wire)

    def at_prefill(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Emit(record=record):
                    self.at_decode(self.receiver.offer(record))  # type: ignore[arg-type]
                case Settled() | Broken():
                    self.told.append(command)
                case _:
                    self.prefill.mover.submit(command)  # type: ignore[arg-type]

    def at_decode(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Emit(record=record):
                    is_stop = type(record).__name__ == "Stop"
                    hear: Any = self.sender.stop if is_stop else self.sender.landed
                    self.at_prefill(hear(record))
                case Arrived() | Fenced() | Broken():
                    self.told.append(command)
                case _:
                    self.decode.mover.submit(command)  # type: ignore[arg-type]

    def turn(self) -> None:
        if not self.threaded:
            self.prefill.mover.run_once()
            self.decode.mover.run_once()
        for worker in (self.prefill, self.decode):
            while worker.inbox:
                event = worker.inbox.pop(0)
                self.events.append(event)
                match event:
                    case Posted():
                        self.at_prefill(self.sender.posted(event.handoff, event.seq, event.digests, event.more))
                    case Sent():
                        self.at_prefill(self.sender.sent(event.handoff, event.seq, event.error))
                    case Received():
                        self.at_decode(
                            self.receiver.received(event.handoff, event.seq, event.error)
                        )

    def until(self, holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < end_s, f"{self.told} {self.sender} {self.receiver}"
            self.turn()
            time.sleep(0.0005)

    def start(self, blocks: int, last_tokens: int = 4, handoff: Handoff = H) -> None:
        """Source block i goes to target block 39 - i."""
        rng = np.random.default_rng(5)
        self.expected = {}
        self.outgoing = []
        for index in range(blocks):
            source = BlockId(index)
            self.prefill.pool.block(source)[:] = rng.bytes(LAYOUT.block_bytes)
            tokens = last_tokens if index == blocks - 1 else 4
            identity = bytes([index]) * 16
            generation = self.prefill.pool.generation(source)
            self.outgoing.append(OutgoingBlock(source, generation, index, tokens, identity))
            rows = (Rows(0, BlockId(BLOCKS - 1 - index), 0, tokens),)
            self.expected[index] = ExpectedBlock(rows, identity, tokens)
        self.receiver.expect(handoff, self.expected)
        self.sender.open(handoff, self.prefill.transport.reads_remotely)

    def begin(
        self, handoff: Handoff, prompt_tokens: int, size: int, sources: list[BlockId], targets: list[BlockId]
    ) -> list[OutgoingBlock]:
        """Expect a prompt's blocks of `size` tokens, which are in `sources`, at `targets`; return what is to be
        offered. Nothing is told of before."""
        offered, expected = list[OutgoingBlock](), dict[int, ExpectedBlock]()
        for at in range(-(-prompt_tokens // size)):
            tokens, identity = min(size, prompt_tokens - size * at), bytes([at]) * 16
            generation = self.prefill.pool.generation(sources[at])
            offered.append(OutgoingBlock(sources[at], generation, at, tokens, identity))
            expected[at] = ExpectedBlock((Rows(0, targets[at], 0, tokens),), identity, tokens)
        self.told.clear()
        self.events.clear()
        self.receiver.expect(handoff, expected)
        self.sender.open(handoff, self.prefill.way.reads_remotely)
        return offered

    def offer(self, *indices: int, handoff: Handoff = H) -> None:
        self.at_prefill(self.sender.offer(handoff, [self.outgoing[i] for i in indices]))

    def same(self, index: int) -> bool:
        source = self.prefill.pool.block(BlockId(index))
        return bytes(source) == bytes(self.decode.pool.block(BlockId(BLOCKS - 1 - index)))

    def close(self) -> None:
        for worker, other in ((self.prefill, self.decode), (self.decode, self.prefill)):
            if worker.opened is not None:
                worker.mover.submit(Disconnect(other.me))
                worker.mover.run_once()
                continue
            worker.mover.stop()
            if not worker.borrowed:
                worker.pool.close()

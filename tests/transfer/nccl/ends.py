"""Workers as the nccl transport sees them, in this process: pools, transports on fake devices, chunks between them."""

import time
from collections.abc import Callable

import msgspec

from engine.kv.layout import KVLayout
from engine.messages import Handoff
from engine.storage.paged import PagedKV
from engine.types import BlockId, Incarnation, RequestId
from tests.transfer.fake_device import TESTS, FakeDevice
from tests.transfer.fake_device import library_path as fake_path
from tests.transfer.wire import IntoDevice, get, put, whole
from transfer.config import NcclConfig
from transfer.nccl.library import NcclLibrary
from transfer.nccl.transport import NcclTransport
from transfer.transport import Completion, Move, Outcome, Ticket

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=8)
BLOCKS = 48
QUICK: NcclConfig = msgspec.structs.replace(TESTS, limit_s=0.5, join_s=1.0, drain_s=1.0, piece_bytes=4096)


class End:
    """One worker of a test."""

    def __init__(
        self, me: int, config: NcclConfig = QUICK, device: FakeDevice | None = None, layout: KVLayout = LAYOUT
    ) -> None:
        self.me = Incarnation(me)
        self.pool = PagedKV(layout, BLOCKS)
        self.device = device or FakeDevice()
        library = NcclLibrary(fake_path())
        self.transport = NcclTransport(
            self.pool, self.me, "127.0.0.1", 10.0, config, self.device, library
        )
        self.ended: dict[Ticket, Completion] = {}
        self.most_communicators = 0

    def meet(self, other: "End") -> None:
        every = whole(self.pool.layout)
        self.transport.connect(other.me, other.transport.describe(self.me), every, every)

    def fill(self, block: int, byte: int) -> None:
        put(self.pool, block, bytes([byte]) * self.pool.block_bytes)

    def has(self, block: int, byte: int) -> bool:
        return get(self.pool, block) == bytes([byte]) * self.pool.block_bytes

    def turn(self) -> None:
        for completion in self.transport.poll(0.0):
            assert completion.ticket not in self.ended, "a transfer ended twice"
            self.ended[completion.ticket] = completion
        self.most_communicators = max(self.most_communicators, self.transport.communicators)

    def close(self) -> None:
        self.transport.close()
        self.pool.close()


class Ends:
    """All of a test's workers."""

    def __init__(self) -> None:
        self.all: list[End] = []
        self._chunks = 0

    def end(self, me: int, config: NcclConfig = QUICK, device: FakeDevice | None = None) -> End:
        self.all.append(End(me, config, device))
        return self.all[-1]

    def pair(self, one: int, other: int, config: NcclConfig = QUICK) -> tuple[End, End]:
        ends = self.end(one, config), self.end(other, config)
        self.join(*ends)
        return ends

    def join(self, one: End, other: End) -> None:
        one.meet(other)
        other.meet(one)

    def chunk(
        self, source: End, target: End, blocks: list[int], targets: list[int]
    ) -> tuple[Ticket, Ticket]:
        """Post a chunk at both ends; returns the sender's and the receiver's ticket."""
        self._chunks += 1
        name = Handoff(RequestId(f"r{self._chunks}"), 1, 1, target.me, source.me)
        sent = Move(name, 0, local=tuple(BlockId(block) for block in blocks))
        wanted = Move(name, 0, remote=tuple((BlockId(block), 0) for block in blocks))
        landing = IntoDevice(target.transport, target.pool, targets)
        ticket = source.transport.send(target.me, sent)
        return ticket, target.transport.recv(source.me, wanted, landing)

    def turn(self) -> None:
        for end in self.all:
            end.turn()
        time.sleep(0.0005)

    def until(self, holds: Callable[[], bool], timeout_s: float = 10.0) -> float:
        """Wait until it holds; returns how long it took."""
        began_s = time.monotonic()
        while not holds():
            assert time.monotonic() - began_s < timeout_s, f"not within {timeout_s} s: {self.all}"
            self.turn()
        return time.monotonic() - began_s

    def outcome(self, end: End, ticket: Ticket, timeout_s: float = 10.0) -> Outcome:
        self.until(lambda: ticket in end.ended, timeout_s)
        return end.ended[ticket].outcome

    def arrives(self, source: End, target: End, byte: int) -> None:
        source.fill(1, byte)
        sent, received = self.chunk(source, target, [1], [2])
        assert self.outcome(target, received) is Outcome.DONE
        assert self.outcome(source, sent) is Outcome.DONE
        assert target.has(2, byte)

    def close(self) -> None:
        for end in self.all:
            end.close()

"""How blocks come into a pool on a device: what waits for what, and how often the host and the device speak."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch import Tensor

from engine.kv.layout import KVLayout
from engine.messages import Handoff
from engine.types import BlockId, Incarnation, RequestId
from tests.transfer.fake_device import CALL, FakeDevice, FakeEvent, FakeStream, fake
from transfer.digest import Binding, Tally, Verifier, block_digest
from transfer.gpu.device import words_of
from transfer.gpu.landing import DeviceInPlace, DeviceRepacked
from transfer.gpu.pulse import Pulse
from transfer.gpu.scatter import Copy, Scatter
from transfer.handoff.commands import IncomingBlock, Rows
from transfer.handoff.negotiation import WP64
from transfer.transport import BlockSlice

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=8)
H = Handoff(RequestId("r"), 1, 1, Incarnation(2), Incarnation(1))
BLOCKS, PIECE = 12, 4
POISON = -7


class CountedStream(FakeStream):
    def __init__(self, device: "SlowHost") -> None:
        super().__init__()
        self._device = device
        self.records = 0

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        self._device.current = self
        yield

    def record(self) -> FakeEvent:
        self.records += 1
        return super().record()


class SlowHost(FakeDevice):
    """What is fetched from it comes a while after the stream has come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.current: CountedStream | None = None
        self.early: list[bool] = []
        self._calls: list[object] = []

    def stream(self) -> CountedStream:
        return CountedStream(self)

    def fetch(self, words: Tensor) -> Tensor:
        host = torch.full_like(words, POISON)

        def bring() -> None:
            time.sleep(0.02)
            host.copy_(words)

        assert self.current is not None
        self._calls.append(call := CALL(bring))
        fake().fake_call(self.current.handle, call)
        self.early.append(bool((host == POISON).all()))
        return host


@dataclasses.dataclass
class Arrival:
    device: SlowHost
    scatter: Scatter
    landing: DeviceInPlace
    pool: Tensor
    source: Tensor

    @property
    def records(self) -> int:
        stream = self.scatter._stream
        assert isinstance(stream, CountedStream)
        return stream.records

    def run(self) -> int:
        """Land all blocks, every copy begun before the first has ended. Return how often the device was looked at."""
        words = words_of(self.source, BlockSlice(0, self.source.shape[1], self.source.shape[1]))
        places = self.scatter.numbers(range(BLOCKS - 1, -1, -1))
        for first in range(0, BLOCKS, PIECE):
            self.scatter.begin(Copy(self, self.landing, first, words, places[first : first + PIECE]))
        looks, until_s = 0, time.monotonic() + 20
        while self.scatter:
            assert time.monotonic() < until_s
            self.scatter.poll()
            looks += 1
        return looks


def arrival(block_size: int, spoiled: int | None = None) -> Arrival:
    device = SlowHost()
    unit = msgspec.structs.replace(LAYOUT, block_size=block_size)
    source = torch.randint(0, 256, (BLOCKS, unit.block_bytes), dtype=torch.uint8)
    pool = torch.zeros(BLOCKS + 3, LAYOUT.block_bytes, dtype=torch.uint8)
    blocks = []
    for at in range(BLOCKS):
        view = memoryview(source[BLOCKS - 1 - at].numpy())
        digest = block_digest(view, unit, block_size, Binding(H).of(b"i", 0), WP64) ^ (at == spoiled)
        per_target = LAYOUT.block_size // block_size
        rows = Rows(0, BlockId(3 + at // per_target), at % per_target * block_size, block_size)
        blocks.append(IncomingBlock((rows,), 0, block_size, b"i", digest))
    kind = DeviceInPlace if unit == LAYOUT else DeviceRepacked
    landing = kind(device, pool, LAYOUT, unit, blocks, Verifier(H, 1.0, Tally()))
    return Arrival(device, Scatter(device), landing, pool, source)


def test_blocks_that_stay_where_they_land_need_one_event_and_one_upload() -> None:
    one = arrival(LAYOUT.block_size)
    before = one.device.uploads
    one.run()
    assert one.landing.wrong == 0 and torch.equal(one.pool[3:], one.source.flip(0))
    assert one.records == BLOCKS // PIECE
    assert one.device.uploads == before + 2, "where the blocks are, and where they go: once each for all copies"


def test_digests_are_not_read_before_they_have_come() -> None:
    """Guards the verdict on a receive: what lies in the host's buffer before is anything."""
    one = arrival(LAYOUT.block_size)
    looks = one.run()
    assert all(one.device.early) and looks > BLOCKS // PIECE, "the digests came late, and were waited for"
    assert one.landing.wrong == 0


def test_what_is_stored_behind_its_digests_has_an_event_of_its_own() -> None:
    one = arrival(LAYOUT.block_size // 2)
    one.run()
    stored, beyond = one.pool[3 : 3 + BLOCKS // 2], one.pool[3 + BLOCKS // 2 :]
    assert one.landing.wrong == 0 and stored.any(1).all() and not beyond.any()
    assert one.records == 2 * (BLOCKS // PIECE)


@pytest.mark.parametrize("block_size", [LAYOUT.block_size, LAYOUT.block_size // 2])
def test_a_wrong_block_is_found_and_nothing_behind_it_is_stored(block_size: int) -> None:
    one = arrival(block_size, spoiled=BLOCKS - 1)
    one.run()
    assert one.landing.wrong == 1
    if block_size != LAYOUT.block_size:
        assert one.records == 2 * (BLOCKS // PIECE) - 1 and not one.pool[-4:].any()


def test_who_waits_for_a_copy_looks_again_at_once_for_a_while() -> None:
    pulse = Pulse()
    assert pulse.set(True, 1.0)
    assert pulse.set(True, 1.0 + 0.9 * pulse.SPIN_S) and not pulse.set(True, 1.0 + 1.1 * pulse.SPIN_S)
    assert pulse.set(True, 2.0, afresh=True), "something has ended: more may soon"
    assert not pulse.set(False, 2.0)
    pulse.close()

"""Blocks whose heads lie in the pools of several ranks, to host memory and disk and back: whole there, in parts
here."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.kv.tiers.commands import (
    Loaded,
    OnDisk,
    Place,
    Save,
    Spill,
    Spilled,
    Store,
    Stored,
    TierEvent,
    TierLoad,
    TiersDied,
    TierSlot,
)
from engine.storage.paged import PoolPart
from engine.storage.tiers.mover import HostMemory, TierMover
from engine.storage.tiers.segments import SegmentFolder
from engine.types import BlockId
from tests.engine.storage.tiers.test_segments import BLOCK_BYTES, KIND, _content, _ident

HALF = BLOCK_BYTES // 2
STARTS = (0, 0, HALF, HALF)
"""Four ranks of two heads: two ranks have each."""
FROM, TO = BlockId(1), BlockId(2)


class Bench:
    """A mover without a thread over four pools of three blocks, with content 7 in all of block 1."""

    def __init__(self, path: Path) -> None:
        self.pools = [torch.zeros(3, HALF, dtype=torch.uint8) for _ in STARTS]
        for start, pool in zip(STARTS, self.pools, strict=True):
            pool[FROM].numpy().data[:] = _content(7)[start : start + HALF]
        parts = [PoolPart(start, pool) for start, pool in zip(STARTS, self.pools, strict=True)]
        self.host = HostMemory(2, BLOCK_BYTES)
        self.folder = SegmentFolder(path, KIND, BLOCK_BYTES)
        self.events: list[TierEvent | TiersDied] = []
        self.mover = TierMover(parts, self.host, self.folder, self.events.append)

    def do(self, *commands: Store | Spill | TierLoad) -> list[TierEvent | TiersDied]:
        self.events.clear()
        self.mover.submit(commands)
        self.mover.run_once()
        return [*self.events]

    def load(self, place: Place) -> int:
        """Return how many blocks were loaded into block 2."""
        (loaded,) = self.do(TierLoad(1, (_ident(7),), (place,), (TO,)))
        assert isinstance(loaded, Loaded)
        return loaded.blocks


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.mover.stop()


@pytest.mark.parametrize("way", ["save", "store", "disk"])
def test_a_block_is_whole_below_and_comes_back_to_every_rank(bench: Bench, way: str) -> None:
    """Guards heads of one rank that are taken for the whole block, and a rank that has none of it back."""
    slot = TierSlot(0)
    place: Place = slot
    if way == "save":
        bench.mover.save([Save(FROM, slot)])
    else:
        (stored,) = bench.do(Store(1, (_ident(7),), (FROM,), (slot,)))
        assert isinstance(stored, Stored) and stored.blocks == 1
    assert bench.host.block(slot) == _content(7)
    if way == "disk":
        assert bench.do(Spill(0, (_ident(7),), (slot,))) == [Spilled(0)]
        place = OnDisk(0, 0)
    for pool in bench.pools:
        pool[FROM] = 0
    assert bench.load(place) == 1
    for start, pool in zip(STARTS, bench.pools, strict=True):
        assert pool[TO].numpy().data == _content(7)[start : start + HALF]
        assert not pool[0].any() and not pool[FROM].any(), "another block was written"


@pytest.mark.parametrize("at", [0, BLOCK_BYTES - 1])
def test_a_block_with_a_wrong_byte_in_one_part_is_not_loaded(bench: Bench, at: int) -> None:
    """Guards digests of what rank 0 has alone."""
    bench.do(Store(1, (_ident(7),), (FROM,), (TierSlot(0),)))
    bench.host.block(TierSlot(0))[at] ^= 1
    assert bench.load(TierSlot(0)) == 0


def test_a_block_that_has_changed_in_host_memory_is_not_whole_on_disk_either(bench: Bench) -> None:
    """Guards a wrong answer: what was stored has a digest, and one that was made anew for the file was that of whatever
    was in host memory by then."""
    bench.do(Store(1, (_ident(7),), (FROM,), (TierSlot(0),)))
    bench.host.block(TierSlot(0))[5] ^= 1
    assert bench.do(Spill(0, (_ident(7),), (TierSlot(0),))) == [Spilled(0)]
    assert bench.load(OnDisk(0, 0)) == 0

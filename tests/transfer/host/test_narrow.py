"""Blocks that travel in 8 bits: what arrives, how far off, in how many bytes, and where not."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from engine.kv.layout import KVLayout
from engine.messages import Hello, WorkerInfo
from engine.storage.paged import pool_views
from engine.types import BlockId, Incarnation
from tests.transfer.pair import BLOCKS, PREFILL, H, Pair, Worker
from tests.transfer.wire import WAYS
from transfer.config import TransferConfig
from transfer.gpu import narrow as device_narrow
from transfer.handoff.commands import (
    Arrived,
    Broken,
    ExpectedBlock,
    OutgoingBlock,
    Received,
    Settled,
)
from transfer.handoff.conversion import rows_by_block
from transfer.handoff.negotiation import AS_STORED, WIRED, NegotiationError, negotiate, unit
from transfer.host.repacked import convert

WORST = {"int8": 0.5 / 127, "fp8": 16 / 448}
"""Half of the largest step, of a row's largest value. All of int8's steps are as large; E4M3's shrink with values."""
ROUNDING = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 5e-3}


def layout(dtype: str = "float32", block_size: int = 4, heads: range = range(2)) -> KVLayout:
    return KVLayout(
        kv_heads=len(heads), first_head=heads.start, total_heads=2,
        layers=2, block_size=block_size, head_dim=16, dtype=dtype,
    )  # fmt: skip


def values(worker: Worker, blocks: list[BlockId], heads: slice = slice(None)) -> Tensor:
    """float32 `[tokens, heads, layers, 2, head_dim]` of a worker's blocks, one after the other."""
    payload, _ = pool_views(worker.pool.memory[blocks], worker.pool.layout)
    return payload[:, heads].float().movedim(4, 1).flatten(0, 1)


class Case:
    """A sequence of `tokens` in the sender's blocks; the receiver has none of it."""

    def __init__(self, pair: Pair, tokens: int) -> None:
        self.pair = pair
        self.tokens = tokens
        there, here = pair.prefill.pool, pair.decode.pool
        self.sources = [BlockId(3 + n) for n in range(there.layout.blocks_for(tokens))]
        self.targets = [BlockId(BLOCKS - 1 - n) for n in range(here.layout.blocks_for(tokens))]
        generator = torch.Generator().manual_seed(1)
        shape = there.tensor[self.sources].shape
        rows = torch.randn(shape, generator=generator) * torch.logspace(-2, 2, shape[4]).view(-1, 1)
        rows[0, 0, 0, 0, 0] = 0.0  # a scale of zero
        there.tensor[self.sources] = rows.to(there.tensor.dtype)
        here.memory.fill_(0xA5)
        size = there.layout.block_size
        rows_of = rows_by_block(tokens, 0, size, here.layout.block_size, self.targets)
        expected, self.outgoing = {}, []
        for index, of_block in rows_of.items():
            valid, identity = min(size, tokens - index * size), bytes([index]) * 16
            expected[index] = ExpectedBlock(of_block, identity, valid)
            source = self.sources[index]
            generation = there.generation(source)
            self.outgoing.append(OutgoingBlock(source, generation, index, valid, identity))
        pair.receiver.expect(H, expected)
        pair.sender.open(H, pair.prefill.transport.reads_remotely)

    def move(self) -> None:
        half = len(self.outgoing) // 2
        self.pair.at_prefill(self.pair.sender.offer(H, self.outgoing[:half]))
        self.pair.at_prefill(self.pair.sender.offer(H, self.outgoing[half:]))
        self.pair.at_prefill(self.pair.sender.close(H))
        self.pair.until(lambda: Arrived(H) in self.pair.told and Settled(H) in self.pair.told)

    @property
    def received_bytes(self) -> int:
        return sum(event.nbytes for event in self.pair.events if isinstance(event, Received))

    def errors(self) -> Tensor:
        """Return the error of every value, relative to the largest of its row."""
        sent = values(self.pair.prefill, self.sources)[: self.tokens]
        got = values(self.pair.decode, self.targets)[: self.tokens]
        return (got - sent).abs() / sent.abs().amax(-1, keepdim=True).clamp_min(1e-30)


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def one(*args: Any, **options: Any) -> Pair:
        pairs.append(Pair(*args, **options))
        return pairs[-1]

    yield one
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wire", ["int8", "fp8"])
@pytest.mark.parametrize("kind", WIRED)
def test_values_come_within_the_rounding_and_in_fewer_bytes(
    make: Callable[..., Pair], kind: str, wire: str, dtype: str
) -> None:
    """Guards codes and scales of the wrong row, a digest of other bytes than those that travel, and a wire that carries
    what it always did."""
    pair = make(kind, layouts=(layout(dtype), layout(dtype)), wire=wire)
    assert not pair.prefill.transport.reads_remotely
    case = Case(pair, tokens=30)
    before = pair.prefill.pool.memory.clone()
    case.move()
    errors = case.errors()
    assert float(errors.max()) <= WORST[wire] + ROUNDING[dtype]
    assert float(errors.max()) > WORST[wire] / 4, "nothing was rounded"
    assert float(values(pair.decode, case.targets)[0, 0, 0, 0].abs().max()) == 0.0
    assert torch.equal(pair.prefill.pool.memory, before), "the sender's blocks were changed"
    per_value = (16 + 4) / 16 / {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    assert case.received_bytes == 8 * layout(dtype).block_bytes * per_value
    made, verified = pair.prefill.mover.digests.made, pair.decode.mover.digests.verified
    assert made == verified == 8 and pair.decode.mover.digests.mismatched == 0


def test_at_a_head_of_128_the_wire_carries_half() -> None:
    """The figure of the documentation."""
    wide = KVLayout(kv_heads=8, layers=32, block_size=64, head_dim=128, dtype="bfloat16")
    assert unit(wide, wide, "int8").block_bytes / wide.block_bytes == (128 + 4) / 256


@pytest.mark.parametrize("kind", [way for way in WAYS if way not in WIRED])
def test_who_reads_the_senders_memory_gets_what_is_stored(
    make: Callable[..., Pair], kind: str
) -> None:
    """Guards a loss of precision that nobody gains anything from."""
    pair = make(kind, layouts=(layout(), layout()), wire="int8")
    assert pair.prefill.transport.reads_remotely
    case = Case(pair, tokens=32)
    case.move()
    assert torch.equal(values(pair.decode, case.targets), values(pair.prefill, case.sources))
    assert case.received_bytes == 8 * layout().block_bytes


@pytest.mark.parametrize("sizes", [(8, 4), (4, 8)], ids=str)
@pytest.mark.parametrize("kind", WIRED)
def test_with_another_block_size(
    make: Callable[..., Pair], kind: str, sizes: tuple[int, int]
) -> None:
    """Guards the rows that are cut out of a widened block; those behind the last token stay as they were."""
    pair = make(kind, layouts=tuple(layout(block_size=size) for size in sizes), wire="int8")
    case = Case(pair, tokens=29)
    case.move()
    assert 0.0 < float(case.errors().max()) <= WORST["int8"] + ROUNDING["float32"]
    rest = values(pair.decode, case.targets)[29:]
    poison = torch.full((1,), 0xA5, dtype=torch.uint8).expand(4).contiguous().view(torch.float32)
    assert bool((rest == poison).all())


@pytest.mark.parametrize("kind", WIRED)
def test_senders_with_half_the_heads(make: Callable[..., Pair], kind: str) -> None:
    """Guards heads that are widened into another head's place."""
    held = range(1, 2)
    pair = make(kind, layouts=(layout(heads=held), layout()), wire="int8")
    case = Case(pair, tokens=16)
    case.move()
    got, sent = values(pair.decode, case.targets, slice(1, 2)), values(pair.prefill, case.sources)
    error = (got - sent).abs() / sent.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    assert 0.0 < float(error.max()) <= WORST["int8"] + ROUNDING["float32"]
    untouched = pair.decode.pool.memory[case.targets].view(len(case.targets), 2, -1)[:, 0]
    assert bool((untouched == 0xA5).all())


@pytest.mark.parametrize("kind", WIRED)
def test_a_byte_that_changes_on_the_way_is_caught(
    make: Callable[..., Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a digest of what was stored, which says nothing of what was sent. The pool behind it stays poisoned."""
    struck: list[int] = []

    def send(self: Any, peer: Incarnation, move: Any, packed: Any = None, real: Any = None) -> Any:
        if kind == "tcp":
            packed[0][5] ^= 0x10
            struck.append(5)
        return real(peer, move, packed)

    def pack(self: Any, first: int, words: Tensor, real: Any = device_narrow.DevicePacked.pack) -> None:
        real(self, first, words)
        words[0, 1] ^= 0x10
        struck.append(1)

    pair = make(kind, layouts=(layout(), layout()), wire="int8")
    monkeypatch.setattr(device_narrow.DevicePacked, "pack", pack)
    real = pair.prefill.transport.send
    monkeypatch.setattr(
        pair.prefill.transport, "send", lambda peer, move, packed: send(None, peer, move, packed, real)
    )
    case = Case(pair, tokens=8)
    pair.at_prefill(pair.sender.offer(H, case.outgoing))
    pair.until(lambda: bool(pair.told))
    assert struck, "the fault did not take effect"
    assert isinstance(pair.told[0], Broken) and "digest mismatch in 1 of 2 blocks" in pair.told[0].why
    assert bool((pair.decode.pool.memory[case.targets[0]] == 0xA5).all())


@pytest.mark.parametrize("wire", ["int8", "fp8"])
def test_a_second_trip_loses_nothing_more(wire: str) -> None:
    """Guards a conversation that moves between workers again and again, in 32 bits: it rounds to the same codes."""
    stored = layout()
    form = unit(stored, stored, wire)
    rows = torch.randn(stored.pool_shape(1), generator=torch.Generator().manual_seed(2)) * 3
    once = convert(rows.view(torch.uint8).view(-1).numpy().data, stored, form)
    back = convert(once, form, stored)
    payload, _ = pool_views(torch.frombuffer(convert(back, stored, form), dtype=torch.uint8).view(1, -1), form)
    first, _ = pool_views(torch.frombuffer(once, dtype=torch.uint8).view(1, -1), form)
    assert torch.equal(payload.view(torch.uint8), first.view(torch.uint8))


def hello(wire: str = AS_STORED, **change: Any) -> Hello:
    info = WorkerInfo(
        name="w", role="prefill", incarnation=PREFILL, address="a:1", model="m", fingerprint="f",
        block_size=4, blocks=8, context_tokens=64, pid=1, host="h",
    )  # fmt: skip
    shape = msgspec.structs.replace(layout(), **change)
    return Hello(info=info, layout=shape.describe(), endpoints=[], wire=wire)


@pytest.mark.parametrize(
    ("mine", "theirs", "change", "settled"),
    [
        ("int8", "int8", {}, "int8"),
        ("fp8", "fp8", {"dtype": "bfloat16"}, "fp8"),
        ("int8", AS_STORED, {}, AS_STORED),
        ("int8", "fp8", {}, AS_STORED),
        ("int8", "int8", {"dtype": "int8"}, AS_STORED),
        (AS_STORED, AS_STORED, {}, AS_STORED),
    ],
)
def test_both_must_ask_for_it(mine: str, theirs: str, change: dict[str, Any], settled: str) -> None:
    """Guards an end that expects other bytes than come, and a loss that only one of them agreed to."""
    one, other = hello(mine, **change), hello(theirs, **change)
    assert negotiate(one, other).wire == negotiate(other, one).wire == settled


def test_what_cannot_travel_so_is_refused() -> None:
    with pytest.raises(NegotiationError, match="there is no form 'int4'"):
        negotiate(hello("int4"), hello("int4"))
    with pytest.raises(NegotiationError, match="cannot travel as int8: head_dim 6 leaves the scales"):
        negotiate(hello("int8", head_dim=6), hello("int8", head_dim=6))
    wp64 = [msgspec.structs.replace(hello("int8", head_dim=12), digest="wp64") for _ in range(2)]
    with pytest.raises(NegotiationError, match="no wp64 digest"):
        negotiate(*wp64)


def test_it_is_off_by_default() -> None:
    assert TransferConfig().wire == hello().wire == AS_STORED

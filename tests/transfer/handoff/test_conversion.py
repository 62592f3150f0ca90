"""Blocks of another size, and of another range of KV heads: every row in its place, nothing else touched.
Blocks in 8 bits are in tests/transfer/host/test_repacked.py, what two workers settle in test_negotiation.py."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.layout import KVLayout
from engine.messages import Handoff
from engine.types import BlockId, Incarnation, RequestId
from fakes.model import kv_pattern
from tests.transfer import fake_device
from tests.transfer.pair import DECODE, PREFILL, H, Pair, Worker
from tests.transfer.wire import WAYS
from transfer.digest import block_rows
from transfer.gpu import cuda_ipc
from transfer.handoff.commands import (
    Arrived,
    Broken,
    ExpectedBlock,
    Fenced,
    OutgoingBlock,
    Received,
    Rows,
    Settled,
)
from transfer.handoff.conversion import landed_tokens, rows_by_block
from transfer.handoff.migration import HandoffError
from transfer.handoff.negotiation import unit
from transfer.handoff.receiver import KVReceiver
from transfer.host import pull
from transfer.host.loopback import FaultKind, ScriptedFault
from transfer.host.tcp import link

BASE = {"layers": 2, "head_dim": 4}
POISON = 0xA5


def layout(block_size: int, heads: range = range(2), total: int = 2) -> KVLayout:
    return KVLayout(
        kv_heads=len(heads), first_head=heads.start, total_heads=total, block_size=block_size, **BASE
    )


def table(worker: Worker, tokens: int, first: int = 0) -> list[BlockId]:
    return [BlockId(first + at) for at in range(worker.pool.layout.blocks_for(tokens))]


def rows_of(worker: Worker, blocks: Sequence[BlockId]) -> np.ndarray:
    """A view `[tokens, heads, layers, 2, row_bytes]` per block, in the order of the sequence."""
    views = [block_rows(worker.pool.block(b), worker.pool.layout)[0] for b in blocks]
    return np.concatenate([np.moveaxis(view, 3, 0) for view in views])


def truth(tokens: int, heads: range, total: int = 2) -> np.ndarray:
    """What the rows of `tokens` tokens must be: each differs by token, head, layer, and K or V."""
    whole = layout(1, range(total), total)
    rows = [kv_pattern(at * 31 + 7, at, whole)[heads.start : heads.stop] for at in range(tokens)]
    return np.stack(rows)


def fill(worker: Worker, blocks: Sequence[BlockId], tokens: int) -> None:
    """The rows of the sequence into a sender's blocks; behind the last one stays what was there."""
    size = worker.pool.layout.block_size
    rows = truth(tokens, worker.pool.layout.heads, worker.pool.layout.total_heads)
    for at in range(tokens):
        (view,) = block_rows(worker.pool.block(blocks[at // size]), worker.pool.layout)
        view[:, :, :, at % size] = rows[at]


def poison(worker: Worker) -> None:
    for block in range(worker.pool.blocks):
        worker.pool.block(BlockId(block))[:] = bytes([POISON]) * worker.pool.block_bytes


class Sequences:
    """One sequence at the sender, and the blocks for it at the receiver, of which the first hold `have` tokens."""

    def __init__(self, pair: Pair, tokens: int, have: int, handoff: Handoff = H) -> None:
        self.pair = pair
        self.tokens, self.have, self.handoff = tokens, have, handoff
        self.sources = table(pair.prefill, tokens, first=3)
        self.targets = table(pair.decode, tokens, first=5)
        self.sender_size = pair.prefill.pool.layout.block_size
        self.size = pair.decode.pool.layout.block_size
        assert have % self.size == 0
        poison(pair.decode)
        fill(pair.prefill, self.sources, tokens)

    def begin(self) -> None:
        rows = rows_by_block(self.tokens, self.have, self.sender_size, self.size, self.targets)
        expected, self.outgoing = {}, {}
        for index, of_block in rows.items():
            valid = min(self.sender_size, self.tokens - index * self.sender_size)
            identity = bytes([index]) * 16
            source = self.sources[index]
            generation = self.pair.prefill.pool.generation(source)
            expected[index] = ExpectedBlock(of_block, identity, valid)
            self.outgoing[index] = OutgoingBlock(source, generation, index, valid, identity)
        self.before = {block: self.bytes_of(block) for block in self.others()}
        self.pair.receiver.expect(self.handoff, expected)
        self.pair.sender.open(self.handoff, self.pair.prefill.transport.reads_remotely)

    def offer(self, *indices: int) -> None:
        blocks = [self.outgoing[index] for index in indices]
        self.pair.at_prefill(self.pair.sender.offer(self.handoff, blocks))

    def is_whole(self) -> bool:
        here, there = self.pair.decode.pool.layout.heads, self.pair.prefill.pool.layout.heads
        got = rows_of(self.pair.decode, self.targets)[self.have : self.tokens]
        shared = [h - here.start for h in there if h in here]
        want = truth(self.tokens, range(there.start, there.stop), self.pair.decode.pool.layout.total_heads)
        mine = [h - there.start for h in there if h in here]
        return bool((got[:, shared] == want[self.have :][:, mine]).all())

    def others(self) -> list[int]:
        """Blocks that are no targets: those of other sequences, and what is here already of this one."""
        mine = set(self.targets[self.have // self.size :])
        return [block for block in range(self.pair.decode.pool.blocks) if block not in mine]

    def bytes_of(self, block: int) -> bytes:
        return bytes(self.pair.decode.pool.block(BlockId(block)))

    def untouched(self) -> bool:
        return all(self.bytes_of(block) == kept for block, kept in self.before.items())


SIZES = [(8, 4), (4, 8), (4, 6), (6, 4), (16, 24), (24, 16), (5, 3), (1, 7)]


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_another_block_size_arrives_row_by_row(kind: str, sizes: tuple[int, int]) -> None:
    """Guards against a row in the wrong block, and against writes into blocks that others share."""
    pair = Pair(kind, layouts=(layout(sizes[0]), layout(sizes[1])))
    case = Sequences(pair, tokens=3 * max(sizes) + 1, have=sizes[1])
    case.begin()
    indices = sorted(case.outgoing)
    for at in range(0, len(indices), 2):
        case.offer(*indices[at : at + 2])
    pair.at_prefill(pair.sender.close(H))
    pair.until(lambda: Arrived(H) in pair.told and Settled(H) in pair.told)
    assert case.is_whole() and case.untouched()
    received = [event for event in pair.events if isinstance(event, Received)]
    assert sum(event.nbytes for event in received) == len(indices) * pair.prefill.pool.block_bytes
    assert pair.decode.mover.digests.verified == len(indices)
    pair.close()


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_sizes_prefixes_chunks_and_failures(data: st.DataObject) -> None:
    """Every row equals the source, no cached block is written, after failed and stopped attempts as well."""
    sizes = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)), label="sizes")
    heads = data.draw(st.sampled_from([range(2), range(1), range(1, 2)]), label="held by the sender")
    pair = Pair("loopback", layouts=(layout(sizes[0], heads), layout(sizes[1])))
    tokens = data.draw(st.integers(1, 30), label="tokens")
    cached = data.draw(st.integers(0, (tokens - 1) // sizes[1]), label="cached blocks") * sizes[1]
    case = Sequences(pair, tokens, cached)
    first, fault = case.have, None
    for attempt in range(1, 4):
        name = Handoff(RequestId("r"), 1, attempt, DECODE, PREFILL)
        case.handoff = name
        if attempt < 3 and data.draw(st.booleans(), label="a fault"):
            kinds = (FaultKind.CORRUPT, FaultKind.FAIL, FaultKind.DROP)
            fault = ScriptedFault(data.draw(st.sampled_from(kinds)), seq=data.draw(st.integers(0, 2)))
            pair.hub.faults[:] = [fault]
        case.begin()
        indices = sorted(case.outgoing)
        while indices:
            count = data.draw(st.integers(1, len(indices)), label="chunk")
            case.offer(*indices[:count])
            indices = indices[count:]
        for _ in range(60):
            pair.turn()
        struck = fault is not None and fault.applied == 1
        assert case.untouched()
        if not struck:
            assert Arrived(name) in pair.told
            break
        fault = None
        pair.at_decode(pair.receiver.stop(name))
        pair.until(lambda name=name: any(isinstance(t, Fenced) and t.handoff == name for t in pair.told))  # type: ignore[misc]
        (fenced,) = [t for t in pair.told if isinstance(t, Fenced) and t.handoff == name]
        there = landed_tokens(fenced.landed, case.have, sizes[0], tokens - 1)
        case.have = there // sizes[1] * sizes[1]
    case.have = first
    assert case.is_whole()
    pair.close()


def test_a_wrong_block_is_never_scattered() -> None:
    """Guards against bytes that are stored first and checked afterwards, where they need not be."""
    pair = Pair("loopback", layouts=(layout(4), layout(8)))
    case = Sequences(pair, tokens=16, have=0)
    fault = ScriptedFault(FaultKind.CORRUPT, flip=(3,))
    pair.hub.faults.append(fault)
    case.begin()
    case.offer(0, 1)
    pair.until(lambda: bool(pair.told))
    (broken,) = pair.told
    assert fault.applied == 1, "the fault did not take effect"
    assert isinstance(broken, Broken) and "digest mismatch in 1 of 2 blocks" in broken.why
    assert bytes(pair.decode.pool.block(case.targets[0])) == bytes([POISON]) * layout(8).block_bytes
    pair.close()


@pytest.mark.parametrize("kind", [FaultKind.STALL, FaultKind.DROP])
def test_nothing_is_scattered_behind_the_fence(kind: FaultKind) -> None:
    """Guards the bug family of the fence where a block reaches its target by way of a buffer."""
    pair = Pair("loopback", layouts=(layout(4), layout(8)))
    case = Sequences(pair, tokens=16, have=0)
    fault = ScriptedFault(kind, seq=0)
    pair.hub.faults.append(fault)
    case.begin()
    case.offer(0, 1)
    pair.until(lambda: pair.decode.mover.outstanding == 1)
    pair.at_decode(pair.receiver.stop(H))
    pair.until(lambda: Fenced(H, ()) in pair.told)
    poison(pair.decode)
    pair.hub.release()
    for _ in range(20):
        pair.turn()
    assert fault.applied == 1, "the fault did not take effect"
    assert case.untouched()
    poisoned = bytes([POISON]) * pair.decode.pool.block_bytes
    assert all(case.bytes_of(block) == poisoned for block in case.targets)
    pair.close()


@pytest.mark.parametrize("kind", WAYS)
def test_a_stop_in_the_middle_of_a_chunk_is_a_fence(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rows of a chunk's later blocks that are written when its targets are somebody else's by now."""
    monkeypatch.setattr(pull, "BLOCKS_PER_RUN", 2)
    monkeypatch.setattr(link, "BYTES_PER_TURN", 2 * layout(4).block_bytes)
    monkeypatch.setattr(cuda_ipc, "BLOCKS_PER_COPY", 2)
    monkeypatch.setattr(cuda_ipc, "COPIES", 1)
    pieces = msgspec.structs.replace(fake_device.TESTS, piece_bytes=2 * layout(4).block_bytes)
    monkeypatch.setattr(fake_device, "TESTS", pieces)
    pair = Pair(kind, layouts=(layout(4), layout(8)))
    case = Sequences(pair, tokens=32, have=0)
    case.begin()
    case.offer(*case.outgoing)
    first, last = case.bytes_of(case.targets[0]), case.bytes_of(case.targets[-1])
    pair.until(lambda: case.bytes_of(case.targets[0]) != first)
    assert pair.decode.mover.outstanding == 1, "the chunk was repacked in one go"
    assert case.bytes_of(case.targets[-1]) == last
    pair.at_decode(pair.receiver.stop(H))
    pair.until(lambda: Fenced(H, ()) in pair.told)
    poison(pair.decode)
    pair.until(lambda: Settled(H) in pair.told)
    for _ in range(20):
        pair.turn()
    assert all(case.bytes_of(block) == last for block in case.targets)
    pair.close()


@pytest.mark.parametrize("kind", WAYS)
def test_two_senders_with_half_the_heads_fill_one_receiver(kind: str) -> None:
    """The head split, with another block size on top: what a tensor-parallel prefill pool will need."""
    both = Pair(kind, layouts=(layout(4, range(1)), layout(6)))
    other = Worker(kind, Incarnation(33), both.hub, layout(4, range(1, 2)))
    other.connect(both.decode, 1.0)
    both.decode.connect(other, 1.0)
    case = Sequences(both, tokens=17, have=6)
    first = both.prefill
    for worker in (first, other):
        both.prefill = worker
        if worker is other:
            fill(other, case.sources, case.tokens)
            both.prefill.mover.run_once()
        case.handoff = Handoff(RequestId("r"), 1, 1, DECODE, worker.me)
        case.begin()
        case.offer(*sorted(case.outgoing))
        both.until(lambda: Arrived(case.handoff) in both.told)
        assert case.is_whole() and case.untouched()
    both.prefill = first
    got = rows_of(both.decode, case.targets)[case.have : case.tokens]
    assert (got == truth(case.tokens, range(2))[case.have :]).all()
    other.mover.stop()
    other.pool.close()
    both.close()


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("held", [range(1), range(1, 3), range(2, 3)], ids=str)
def test_one_sender_with_all_heads_fills_receivers_with_some(kind: str, held: range) -> None:
    """Guards against heads that are taken from the wrong place, and against bytes that nobody asked for."""
    pair = Pair(kind, layouts=(layout(4, range(3), 3), layout(4, held, 3)))
    case = Sequences(pair, tokens=10, have=4)
    case.begin()
    case.offer(*sorted(case.outgoing))
    pair.until(lambda: Arrived(H) in pair.told)
    assert case.is_whole() and case.untouched()
    received = [event for event in pair.events if isinstance(event, Received)]
    blocks = len(case.outgoing)
    assert sum(e.nbytes for e in received) == blocks * len(held) * layout(4).head_bytes
    pair.close()


def test_heads_that_nobody_shares_have_no_form() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        unit(layout(4, range(1)), layout(4, range(1, 2)))
    pair = Pair("loopback", layouts=(layout(4, range(1)), layout(4, range(1, 2))))
    pair.turn()
    assert all("at least 1" in event.error for event in pair.events)  # type: ignore[union-attr]
    assert len(pair.events) == 2, "two workers without a common head were connected"
    pair.close()


def test_a_row_that_is_expected_twice_raises() -> None:
    """Guards `each row of a target once`: the later of two copies would win."""
    rows = rows_by_block(8, 0, 4, 8, [BlockId(1)])
    block = ExpectedBlock(rows[0], b"i" * 16, 4)
    with pytest.raises(HandoffError, match="distinct"):
        KVReceiver().expect(H, {0: block, 1: block})
    KVReceiver().expect(H, {0: block, 1: ExpectedBlock(rows[1], b"j" * 16, 4)})


def test_rows_are_cut_where_either_side_cuts_its_blocks() -> None:
    """The picture of `transfer.handoff.conversion`: 40 tokens in blocks of 16, of which a block of 24 is here."""
    here = [BlockId(7), BlockId(9)]
    assert rows_by_block(40, 24, 16, 24, here) == {
        1: (Rows(8, BlockId(9), 0, 8),),
        2: (Rows(0, BlockId(9), 8, 8),),
    }
    assert rows_by_block(20, 0, 16, 12, here) == {
        0: (Rows(0, BlockId(7), 0, 12), Rows(12, BlockId(9), 0, 4)),
        1: (Rows(0, BlockId(9), 4, 4),),
    }

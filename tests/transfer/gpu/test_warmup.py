"""Nothing is compiled for blocks that move: Triton's own keys of whole handoffs are those of the worker's start, or,
for a peer of another kind, of when the two met."""

import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch

from engine.kv.layout import KVLayout
from engine.types import BlockId
from kernels.compilations import OWN
from tests.kernels.cases import DEVICE
from tests.kernels.specializations import Key, launched
from tests.transfer import fake_device
from tests.transfer.pair import BLOCKS, H, Pair
from tests.transfer.wire import ON_DEVICE
from transfer.gpu.kernels import DeviceKernels
from transfer.gpu.route import DeviceRoute
from transfer.handoff.commands import Arrived, ExpectedBlock, OutgoingBlock, Settled
from transfer.handoff.conversion import rows_by_block
from transfer.handoff.negotiation import AS_STORED
from transfer.liveness import Watchdog

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="counts launches of Triton's interpreter")

ROW = KVLayout(kv_heads=1, layers=4, block_size=1, head_dim=16)
"""A block of one token, of which the strides of more than one tell nothing."""


class KernelDevice(fake_device.FakeDevice):
    """The fake device, whose copies are those of a GPU's."""

    def __init__(self) -> None:
        super().__init__()
        kernels = DeviceKernels(torch.device("cpu"), 90)
        self.numbers = kernels.numbers  # type: ignore[method-assign]
        self.copy = kernels.copy  # type: ignore[method-assign]
        self.convert = kernels.convert  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return fake devices; whatever is opened on them launches kernels, and cuts chunks into pieces of a few blocks."""
    monkeypatch.setattr(fake_device, "FakeDevice", KernelDevice)
    pieces = msgspec.structs.replace(fake_device.TESTS, piece_bytes=4096)
    monkeypatch.setattr(fake_device, "TESTS", pieces)
    yield


def sized(block_size: int, heads: range = range(2)) -> KVLayout:
    return KVLayout(
        kv_heads=len(heads), first_head=heads.start, total_heads=2, layers=2, block_size=block_size, head_dim=16
    )


def handed_off(pair: Pair, lengths: list[int]) -> set[Key]:
    """Return the keys of handoffs of so many tokens each, in chunks of one block, of three, and of all the rest."""
    there, here = pair.prefill.pool, pair.decode.pool
    size = there.layout.block_size
    with launched() as seen:
        for number, tokens in enumerate(lengths):
            handoff = msgspec.structs.replace(H, attempt=number + 1)
            targets = [BlockId(BLOCKS - 1 - n) for n in range(here.layout.blocks_for(tokens))]
            rows = rows_by_block(tokens, 0, size, here.layout.block_size, targets)
            valid = {index: min(size, tokens - index * size) for index in rows}
            outgoing = [
                OutgoingBlock(BlockId(3 + index), there.generation(BlockId(3 + index)), index, count, b"i" * 16)
                for index, count in valid.items()
            ]
            pair.receiver.expect(
                handoff, {index: ExpectedBlock(of, b"i" * 16, valid[index]) for index, of in rows.items()}
            )
            pair.sender.open(handoff, pair.prefill.transport.reads_remotely)
            for some in (outgoing[:1], outgoing[1:4], outgoing[4:]):
                if some:
                    pair.at_prefill(pair.sender.offer(handoff, some))
            pair.at_prefill(pair.sender.close(handoff))
            pair.until(lambda of=handoff: Arrived(of) in pair.told and Settled(of) in pair.told)  # type: ignore[misc]
    return seen


@pytest.mark.parametrize("layout", [sized(4), ROW], ids=["blocks of 4", "blocks of 1"])
@pytest.mark.parametrize("wire", [AS_STORED, "int8", "fp8"])
@pytest.mark.parametrize("kind", ON_DEVICE)
def test_blocks_move_by_what_was_compiled_at_the_start(kind: str, wire: str, layout: KVLayout) -> None:
    """Guards a handoff that waits for the compiler, in the thread that all handoffs share: a kernel that only few
    blocks take, or many, or those whose numbers lie elsewhere."""
    first = Pair(kind, layouts=(layout, layout))
    with launched() as compiled:
        for worker in (first.prefill, first.decode):
            worker.mover.warm_up(wire)
    first.close()
    assert compiled, "nothing was warmed up"
    with launched() as met:
        pair = Pair(kind, layouts=(layout, layout), wire=wire)
    size = layout.block_size
    moved = handed_off(pair, [size, 2 * size, 3 * size - size // 2, 5 * size, 20 * size])
    pair.close()
    assert (met | moved) - compiled == set() and moved


@pytest.mark.parametrize("wire", [AS_STORED, "int8"])
@pytest.mark.parametrize(
    "layouts",
    [(sized(4), sized(8)), (sized(8), sized(4)), (sized(4, range(1, 2)), sized(4)), (sized(4), sized(8, range(1)))],
    ids=["to 8", "to 4", "of one head", "of one head, to 8"],
)
@pytest.mark.parametrize("kind", ON_DEVICE)
def test_for_a_peer_of_another_kind_all_is_compiled_when_they_meet(
    kind: str, layouts: tuple[KVLayout, KVLayout], wire: str
) -> None:
    with launched() as met:
        pair = Pair(kind, layouts=layouts, wire=wire)
    moved = handed_off(pair, [9, 8, 33])
    pair.close()
    assert moved - met == set() and moved


@pytest.mark.parametrize("part", ["_send_nothing", "_receive_nothing"])
@pytest.mark.parametrize("kind", ON_DEVICE)
def test_every_part_of_the_warm_up_is_needed(kind: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRoute, part, lambda self: None)
    with launched() as met:
        pair = Pair(kind)
    moved = handed_off(pair, [9])
    pair.close()
    assert moved - met != set()


def test_a_warm_up_leaves_the_pool_alone() -> None:
    """Guards blocks that others use: a peer may come while requests run."""
    pair = Pair("nccl", wire="int8")
    for worker in (pair.prefill, pair.decode):
        worker.pool.memory.fill_(0x5A)
        worker.mover.warm_up("int8")
        assert worker.pool.block(BlockId(0)) == bytes([0x5A]) * worker.pool.block_bytes
        assert (worker.pool.memory == 0x5A).all()
    pair.close()


def test_who_compiles_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a worker that is ended while it meets a peer of another kind, for which several kernels are compiled
    within one call: each of them is progress, and nothing else is. The start is nobody's hang: no thread runs yet."""
    pair, meeting, done = Pair("nccl"), threading.Event(), threading.Event()
    mover, beats = pair.prefill.mover, list[int | None]()
    real = DeviceRoute.warm_up

    def slow(route: DeviceRoute) -> None:
        beats.append(mover.beat)
        if len(beats) > 1:
            meeting.set()
            assert done.wait(30)
        real(route)

    monkeypatch.setattr(DeviceRoute, "warm_up", slow)
    mover.warm_up(AS_STORED)
    assert beats == [None]
    dog = Watchdog(2.0)
    mover.start()
    try:
        pair.prefill.connect(pair.decode, 1.0)
        assert meeting.wait(30)
        assert not any(dog.is_stuck(mover.beat, float(second)) for second in range(2))
        OWN.compiled("copy_blocks_kernel")
        assert not any(dog.is_stuck(mover.beat, 2.0 + second) for second in range(2))
        assert dog.is_stuck(mover.beat, 4.0)
    finally:
        done.set()
        pair.close()

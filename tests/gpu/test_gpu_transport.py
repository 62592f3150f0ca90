"""What only a GPU can show: real kernels and libraries, a peer that is killed or frozen under them."""

import os
import signal
import time

import pytest

from tests.transfer.conftest import LARGE, ProcessPeer, RigFactory
from tests.transfer.fake_device import TESTS
from transfer.transport import Outcome

pytestmark = pytest.mark.gpu


def test_both_libraries_are_one() -> None:
    """Guards against two libnccl in one process, and against a constant that has changed."""
    from cupy.cuda import nccl

    from transfer.gpu.cuda import loaded_nccl
    from transfer.nccl.library import ID_BYTES, UINT8, NcclLibrary

    assert NcclLibrary(loaded_nccl()).version == nccl.get_version()
    assert nccl.NCCL_UINT8 == UINT8 and len(bytes(nccl.get_unique_id())) == ID_BYTES


def test_copies_equal_their_reference() -> None:
    """Guards the border that the fake device stands in for."""
    import torch

    from kernels.block_shape import BlockShape
    from kernels.reference_blocks import wp64
    from transfer.gpu.cuda import CudaDevice

    device = CudaDevice("cuda:0")
    shape = BlockShape(2, 8, 32)
    source = torch.randint(-(2**62), 2**62, (9, 3, shape.words), device="cuda:0")
    target = torch.zeros_like(source)
    stream = device.stream()
    torch.cuda.synchronize()
    with stream.use():
        sources, targets, valid = device.numbers([4, 1], [0, 8], [8, 3])
        made = device.copy(source, target, sources, targets, shape, valid)
        event = stream.record()
    while not event.done():
        time.sleep(1e-4)
    assert made is not None
    assert torch.equal(target[0], source[4]) and torch.equal(target[8], source[1])
    for row, (block, tokens) in enumerate(((4, 8), (1, 3))):
        assert torch.equal(made[row], wp64(source[block], shape, tokens))


def test_slots_are_not_what_the_engine_has_just_given_back() -> None:
    """Guards a piece that arrives in memory which a kernel of the engine's, still to come, writes to."""
    import torch

    from transfer.gpu.cuda import CudaDevice

    device, count = CudaDevice("cuda:0"), 1 << 22
    there = torch.empty(count, dtype=torch.int64, device="cuda:0").data_ptr()
    assert torch.empty(count, dtype=torch.int64, device="cuda:0").data_ptr() == there, "nothing is shown"
    assert device.words(count).data_ptr() != there


@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_is_lost_in_the_middle(make_rig: RigFactory, deed: signal.Signals) -> None:
    """Guards against a survivor that spins for ever. The sender is lost with its chunks posted and partly moved."""
    rig = make_rig("nccl", LARGE, 64, in_process=False)
    victim, other = rig.peer(), rig.peer()
    assert isinstance(victim, ProcessPeer)
    victim.fill({block: block for block in range(60)})
    tickets = []
    for seq in range(40):
        victim.send(2**64 - 5, "r", seq, list(range(60)))
        tickets.append(rig.recv(victim, "r", seq, [(b, 0) for b in range(60)], list(range(60))))
    rig.until(lambda: tickets[0] in rig.ended)
    os.kill(victim.pid, deed)
    began_s = time.monotonic()
    try:
        rig.until(lambda: all(ticket in rig.ended for ticket in tickets))
        outcomes = [rig.ended[ticket].outcome for ticket in tickets]
        if Outcome.LOST not in outcomes:
            pytest.skip("all had moved before the fault took effect")
        limit_s = 1.0 if deed is signal.SIGKILL else TESTS.limit_s + 1.0
        assert time.monotonic() - began_s < limit_s
        other.fill({0: 7})
        other.send(2**64 - 5, "after", 0, [0])
        assert rig.outcome(rig.recv(other, "after", 0, [(0, 0)], [63])) is Outcome.DONE
    finally:
        if deed is signal.SIGSTOP:
            os.kill(victim.pid, signal.SIGCONT)

"""The words in which GPU transports see blocks: the copy kernel (interpreted where there is no GPU) does with them what
the fake device does."""

import pytest
import torch

from engine.kv.layout import KVLayout
from engine.storage.paged import PagedKV
from engine.types import Incarnation
from kernels.block_copy import copy_blocks
from kernels.configs import ConfigKey, config_for
from tests.transfer.fake_device import FakeDevice
from tests.transfer.nccl.ends import LAYOUT as ENDS_LAYOUT
from tests.transfer.nccl.ends import Ends
from transfer.config import TransferConfig
from transfer.digest import Tally
from transfer.gpu.device import flat, words_of
from transfer.gpu.pulse import Pulse
from transfer.handoff.negotiation import WP64, Agreement, digest_shape
from transfer.registry import open_route, open_transport, open_transports
from transfer.transport import BlockSlice, TransferError

LAYOUT = KVLayout(kv_heads=3, layers=2, block_size=4, head_dim=8, dtype="float16")
CONFIG = config_for(ConfigKey("copy_blocks", 0, 0, 0, "int64", 90))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pool(blocks: int) -> torch.Tensor:
    return torch.randint(0, 256, (blocks, LAYOUT.block_bytes), dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("heads", [range(3), range(1, 3), range(2, 3)], ids=str)
def test_the_kernel_packs_a_range_of_heads(heads: range) -> None:
    """Guards against a slice that the kernel reads from another place than the transports mean."""
    size = LAYOUT.head_bytes
    span = BlockSlice(heads.start * size, len(heads) * size, LAYOUT.block_bytes)
    memory = pool(6)
    source, shape = flat(words_of(memory, span))
    slot = torch.full((2, span.nbytes // 8), -1, dtype=torch.int64, device=DEVICE)
    rows = torch.tensor([[5, 2], [0, 1]], dtype=torch.int32, device=DEVICE)
    copy_blocks(source, flat(slot)[0], rows[0], rows[1], shape, CONFIG)
    packed = slot.view(torch.uint8)
    for at, block in enumerate((5, 2)):
        assert torch.equal(packed[at], memory[block, span.offset : span.offset + span.nbytes])


def test_the_kernel_digests_what_lands_as_the_fake_does() -> None:
    whole = BlockSlice(0, LAYOUT.block_bytes, LAYOUT.block_bytes)
    there = words_of(pool(4), whole).unflatten(1, (3, -1))
    ours, theirs = (torch.zeros_like(there) for _ in range(2))
    shape = digest_shape(LAYOUT)
    rows = torch.tensor([[3, 0], [1, 2], [4, 3]], dtype=torch.int32, device=DEVICE)
    made = copy_blocks(there, ours, rows[0], rows[1], shape, CONFIG, tokens=rows[2])
    told = FakeDevice().copy(there, theirs, *FakeDevice().numbers([3, 0], [1, 2]), shape, torch.tensor([4, 3]))
    assert made is not None and told is not None
    assert torch.equal(made, told) and torch.equal(ours, theirs)


def test_what_is_not_whole_words_is_refused() -> None:
    with pytest.raises(TransferError, match="64-bit"):
        words_of(pool(2), BlockSlice(4, 64, LAYOUT.block_bytes))


def test_peers_cost_no_streams(ends: Ends) -> None:
    """Guards a worker whose peers come and go: torch has 32 streams and hands them out in turn, so that digests, which
    the transfer thread waits for, would come to stand in line behind an operation that only this thread can end."""
    one, counts = ends.end(1), []
    for _ in range(3):
        open_route(one.transport, one.pool, ENDS_LAYOUT, Agreement(ENDS_LAYOUT, digest=WP64), Tally())
        counts.append(len(one.device.streams))
    assert counts[0] == counts[2] < 10


def test_a_pool_of_this_host_has_no_gpu_transport() -> None:
    """The message must say why: it answers a line of somebody's configuration."""
    kv = PagedKV(LAYOUT, 2)
    for kind in ("cuda_ipc", "nccl"):
        with pytest.raises(TransferError, match="on a GPU"):
            open_transport(kind, kv, Incarnation(1), TransferConfig())
    opened = open_transports(kv, Incarnation(1), TransferConfig(), "127.0.0.1")
    assert set(opened) == {"shm", "tcp"}
    for transport in opened.values():
        transport.close()
    kv.close()


def test_a_pulse_beats_only_while_it_is_on() -> None:
    import select

    pulse = Pulse()
    poller = select.poll()
    poller.register(pulse, select.POLLIN)
    assert not poller.poll(20)
    pulse.set(True, 0.0)
    assert poller.poll(1000)
    pulse.hush()
    pulse.set(True, pulse.TIRED_S * 2)
    assert poller.poll(1000)
    pulse.set(False, 1.0)
    pulse.hush()
    assert not poller.poll(20)
    pulse.close()

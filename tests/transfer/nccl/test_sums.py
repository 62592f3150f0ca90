"""Sums of ranks that have a device each, over the fake libnccl: their bits, both ways, and a decode step that is
recorded with them."""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from engine.model.reduction import add_in_order
from engine.model.split import Share
from engine.ranks.device_sums import DeviceSums
from tests.engine.model.checkpoints import build, save_hf
from tests.transfer.fake_device import FAIL, STALL, Fault, fake, library_path
from tests.transfer.nccl import recorded_rank
from tests.transfer.nccl.recorded_rank import WaitedExchange, unique_id
from transfer.nccl.library import LateError, NcclError, NcclLibrary

VOCAB = 101


class Ranks:
    """Ranks as threads of this process, with a device, a stream and a communicator's end each."""

    def __init__(self, ranks: int, at_once_bytes: int, limit_s: float = 20.0) -> None:
        self._threads = ThreadPoolExecutor(ranks)
        name = unique_id()

        def opened(rank: int) -> WaitedExchange:
            return WaitedExchange(NcclLibrary(library_path()), name, Share(rank, ranks), limit_s)

        self.links = list(self._threads.map(opened, range(ranks)))
        self.sums = [
            DeviceSums(Share(rank, ranks), (12, 12), VOCAB, link, at_once_bytes) for rank, link in enumerate(self.links)
        ]

    def sum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(self._threads.map(lambda rank: self.sums[rank].sum(parts[rank].clone()), range(len(parts))))

    def gathered(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(self._threads.map(lambda rank: self.sums[rank].gathered(parts[rank]), range(len(parts))))

    def close(self) -> None:
        self._threads.shutdown()
        for link in self.links:
            link.abort()


@pytest.mark.parametrize("at_once_bytes", [0, 1 << 20], ids=["in pieces", "at once"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_have_the_same_bits_on_every_rank_and_either_way(ranks: int, at_once_bytes: int) -> None:
    """Guards answers that depend on how many rows a step has: both ways add up in the order of the ranks, in 32 bits;
    and pieces of sizes that do not divide, or that some ranks do not have."""
    group = Ranks(ranks, at_once_bytes)
    try:
        draws = torch.Generator().manual_seed(ranks)
        for shape in ((1, 1), (1, 3), (7, 33), (5, 1024)):
            for dtype in (torch.float32, torch.bfloat16):
                parts = [torch.randn(shape, generator=draws).mul_(10.0**rank).to(dtype) for rank in range(ranks)]
                wanted = add_in_order(parts)
                assert all(torch.equal(found, wanted) for found in group.sum(parts))
        with pytest.raises(ValueError, match="contiguous"):
            group.sums[0].sum(torch.ones(4, 4).T)
    finally:
        group.close()


def test_rank_0_has_the_columns_of_all() -> None:
    """Guards logits of tokens in another rank's place, where the vocabulary does not divide."""
    group = Ranks(3, 0)
    try:
        whole = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
        cuts = [Share(rank, 3).even(VOCAB) for rank in range(3)]
        parts = [whole[:, cut.start : cut.stop] for cut in cuts]
        first, *others = group.gathered(parts)
        assert torch.equal(first, whole)
        assert all(map(torch.equal, others, parts[1:]))
        nothing, *_ = group.gathered([part[:0] for part in parts])  # of a chunk that draws nothing
        assert nothing.shape == (0, VOCAB)
    finally:
        group.close()


def test_what_the_library_refuses_is_told() -> None:
    """Guards a sum that goes on with parts which never left: the rank says so, and its worker ends."""
    group = Ranks(2, 1 << 20, limit_s=0.3)
    parts = [torch.ones(1, 8)] * 2
    try:
        fault = Fault("send", FAIL, rank=1)
        with pytest.raises(NcclError, match="ncclSend"):
            group.sums[1].sum(parts[1].clone())
        assert fault.taken
        fault = Fault("settle", STALL, rank=0)
        with pytest.raises(LateError, match="not enqueued within"):
            group.sums[0].sum(parts[0].clone())
        assert fault.taken
    finally:
        fake().fake_reset()
        group.close()


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_recorded_decode_steps_add_up_over_ranks(tmp_path: Path, kv_heads: int) -> None:
    """Guards sums that are not part of a recording, and addresses that one keeps of parts: every rank is a process with
    a pool of its own heads, which Triton's kernels read, and records its decode steps, NCCL's calls among them. With
    one KV head, both have it."""
    ranks = 2
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    sizes["num_hidden_layers"] = 2
    folder = prepare(save_hf(build("qwen2", **sizes), tmp_path / "model"), tmp_path / "cache")
    name = unique_id().hex()
    command = [sys.executable, "-m", "tests.transfer.nccl.recorded_rank", str(folder), str(ranks), name, str(tmp_path)]
    library_path()  # compiled once, for all of them
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(ranks)]
    try:
        assert [process.wait(timeout=150) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told, *others = [recorded_rank.Seen(*torch.load(tmp_path / f"rank{rank}")) for rank in range(ranks)]
    alone = recorded_rank.steps(load_model(folder, packed=False), None)
    assert told.replays == alone.replays and told.exchanges > 0
    for own, theirs in zip(told.logits, alone.logits, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)
    for rank, seen in enumerate([told, *others]):
        head = rank * kv_heads // ranks
        torch.testing.assert_close(seen.pool[:, 0], alone.pool[:, head], atol=1e-4, rtol=0, equal_nan=True)

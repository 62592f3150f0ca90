"""The transport part of the GPU benchmark, run on the fake device: it measures nothing here, but it runs."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import transport as part
from benchmarks.gpu.card import Line
from benchmarks.gpu.dry import dry_card
from benchmarks.gpu.transport import CHUNKS, measure
from engine.kv.layout import KVLayout
from engine.storage.paged import PagedKV
from engine.types import Incarnation
from tests.transfer.fake_device import library_path
from tests.transfer.wire import open_any
from transfer.transport import Transport

SMALL = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=8)


def on_host(kind: str, pool: PagedKV, me: Incarnation) -> Transport:
    return open_any(kind, pool, me)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])
def test_every_line_is_there(kind: str) -> None:
    """Guards against a benchmark that fails on the day when there is a GPU."""
    library_path()
    first, *lines = measure(kind, 2, layout=SMALL, pool_of=PagedKV, opener=on_host)
    assert [line["blocks"] for line in lines] == list(CHUNKS)
    assert all(float(line["ms"]) > 0 for line in lines)
    assert float(first["freed_after_kill_s"]) < 5
    assert ("pair_mib" in first) == (kind == "nccl")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it works")
def test_a_way_of_nccl_that_does_not_work_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards the figures of `cuda_ipc` on a card whose NCCL cannot do one of its two ways. Without a GPU none works."""
    monkeypatch.setattr(part, "WAYS", {"nccl, multi_rank": None, "cuda_ipc": None})
    lines: list[Line] = []
    with pytest.raises(Exception, match=r"CUDA|NVIDIA"):
        for line in part.transport(replace(dry_card(), device=torch.device("cuda"))):
            lines.append(line)
    assert [(line["transport"], line["works"]) for line in lines] == [("nccl, multi_rank", 0)]
    assert lines[0]["why"]

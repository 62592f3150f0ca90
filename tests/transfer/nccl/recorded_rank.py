"""One of several ranks, each a process with a device of its own, which only pretends: recorded decode steps over a pool
of its own heads, with sums by the fake libnccl. `python -m tests.transfer.nccl.recorded_rank FOLDER RANKS ID OUT RANK`
writes what it saw to OUT."""

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.backends.gpu.attention import TritonAttention
from engine.backends.gpu.graphs import DecodeGraphs, Recording
from engine.backends.gpu.pool import DeviceKV
from engine.batch import ForwardBatch
from engine.model.config import ModelConfig
from engine.model.llama import Llama, load_model
from engine.model.split import Share
from engine.ranks.device_sums import DeviceSums
from tests.engine.backends.gpu.recording import FakeRecorder
from tests.engine.backends.gpu.test_step import row
from tests.transfer.fake_device import FakeStream, fake, library_path
from transfer.nccl.exchange import NcclExchange
from transfer.nccl.library import NcclLibrary

BLOCK = 16
BLOCKS = 12
TABLES = ([3, 7], [1, 9])


def unique_id() -> bytes:
    found = ctypes.create_string_buffer(128)
    assert fake().ncclGetUniqueId(found) == 0
    return found.raw


class WaitedExchange(NcclExchange):
    """On a stream of the fake device: what is called next here runs at once, so each exchange is waited for."""

    def __init__(self, library: NcclLibrary, name: bytes, share: Share, limit_s: float = 20.0) -> None:
        self._own = FakeStream()
        self.count = 0
        super().__init__(library, name, share.rank, share.ranks, lambda: self._own.handle, limit_s)

    def exchange(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        super().exchange(outgoing, incoming)
        self.count += 1
        event, deadline_s = self._own.record(), time.monotonic() + 60
        while not event.done():
            assert time.monotonic() < deadline_s, "another rank does not exchange"
            time.sleep(0.0005)


class ExchangeRecorder(FakeRecorder):
    """Records calls of NCCL too, with the addresses that they were called with."""

    def __init__(self, link: WaitedExchange | None) -> None:
        super().__init__()
        self._link = link

    def record(self, work: Callable[[], Tensor]) -> Recording:
        if self._link is None:
            return super().record(work)
        with self.calls(self._link.exchange):
            return super().record(work)

    @contextmanager
    def calls(self, plain: Callable[..., None]) -> Iterator[None]:
        def noted(outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
            self.note(plain, outgoing, incoming)

        assert self._link is not None
        self._link.exchange = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._link.exchange


class Seen(NamedTuple):
    """Saved as a plain tuple."""

    logits: list[Tensor]
    pool: Tensor
    replays: dict[tuple[str, int], int]
    exchanges: int


@torch.inference_mode()
def steps(model: Llama, link: WaitedExchange | None) -> Seen:
    """Two prompts, then decode steps of one and of two sequences, which are replayed. The pool has the heads that the
    model has."""
    layout = model.config.kv_layout(BLOCK, "float32")
    kv = DeviceKV(layout, BLOCKS, "cpu")
    kv.memory.fill_(0x7F)
    attention = TritonAttention(model.config, layout, "cpu", max_batch=2, programs=3)
    graphs = DecodeGraphs(model, kv, attention, ExchangeRecorder(link), [2])
    graphs.prepare()
    texts = [list(range(20, 39)), list(range(50, 67))]
    logits = []
    for text, table in zip(texts, TABLES, strict=True):
        one = row(0, text, 0, table, draw=True)
        batch = ForwardBatch.build([one], BLOCK, row_multiple=attention.row_multiple)
        attention.begin(batch, kv)
        logits.append(model.forward(batch, kv, attention).clone())
    for names in ((0,), (0, 1), (1,), (1, 0)):
        rows = []
        for name in names:
            texts[name].append(30 + len(texts[name]))
            rows.append(row(name, texts[name], len(texts[name]) - 1, TABLES[name]))
        found = graphs.replay(graphs.load(rows))
        logits.append(found[: len(rows)].clone())
    return Seen(logits, kv.tensor.clone(), dict(graphs.replays), 0 if link is None else link.count)


def main(folder: str, ranks: str, name: str, out: str, rank: str) -> None:
    torch.set_num_threads(1)
    config, share = ModelConfig.load(Path(folder)), Share(int(rank), int(ranks))
    link = WaitedExchange(NcclLibrary(library_path()), bytes.fromhex(name), share)
    sums = DeviceSums(share, (config.heads, config.kv_heads), config.vocab, link, at_once_bytes=64)
    seen = steps(load_model(Path(folder), packed=False, ranks=sums), link)
    torch.save(tuple(seen), Path(out, f"rank{rank}"))


if __name__ == "__main__":
    main(*sys.argv[1:])

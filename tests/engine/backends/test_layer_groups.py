"""Attention over a block table per layer group, against the same with one table and masks: the same bits, with nothing
in the pool but what the windows need. What is not held is poisoned."""

from pathlib import Path

import pytest
import torch

from engine.backends.attention import TorchAttention
from engine.backends.native_attention import NativeAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.kv.groups import GONE
from engine.kv.layout import KVLayout
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import prepare
from engine.step import Row
from engine.storage.paged import PagedKV
from engine.types import BlockId
from kernels.native import native
from tests.engine.model.checkpoints import VOCAB, build, save_hf

SIZE, BLOCKS = 4, 120
PROMPT, TOKENS = 53, 66
CHUNK = 10


class _Tables:
    """One sequence's tables; every group's window slides as far as the next position lets it."""

    def __init__(self, kv: PagedKV, first: int) -> None:
        self.kv = kv
        self._free = [BlockId(block) for block in range(first, first + BLOCKS // 2 - 1)]
        self.tables: list[list[BlockId]] = [[] for _ in range(kv.layout.group_count)]

    def reach(self, end: int) -> None:
        for table in self.tables:
            while len(table) * SIZE < end:
                table.append(self._free.pop(0))

    def slide(self, position: int) -> None:
        for table, group in zip(self.tables[1:], self.kv.layout.windows, strict=True):
            for at in range(group.first_needed(position, SIZE)):
                if table[at] != GONE:
                    self.kv.memory[table[at]] = 0xFF
                    self._free.append(table[at])
                    table[at] = GONE

    @property
    def held(self) -> int:
        return sum(block != GONE for table in self.tables for block in table)


def _logits(
    model: Llama, attention: TorchAttention, layout: KVLayout, tokens: list[list[int]]
) -> tuple[torch.Tensor, int]:
    """Return the logits of every step of two sequences, prefilled in chunks and then decoded together, and the blocks
    that were held at the end."""
    kv = PagedKV(layout, BLOCKS)
    kv.memory.fill_(0xFF)  # no number as a float, or as a scale
    kv.memory[0] = 0  # what a masked key is read from
    tables = [_Tables(kv, 1), _Tables(kv, BLOCKS // 2)]
    steps = [[(which, at, min(at + CHUNK, PROMPT))] for which in (0, 1) for at in range(0, PROMPT, CHUNK)]
    steps += [[(0, at, at + 1), (1, at, at + 1)] for at in range(PROMPT, TOKENS)]
    found = []
    for step in steps:
        rows = list[Row]()
        for which, start, end in step:
            tables[which].reach(end)
            own, *windows = tables[which].tables
            row = trial_row(tokens[which][:end], start, own)
            rows.append(Row(row.request, row.record, row.tokens, start, end, own, draw=True, windows=tuple(windows)))
        batch = ForwardBatch.build(rows, SIZE, row_multiple=attention.row_multiple)
        attention.begin(batch, kv)
        found.append(model.forward(batch, kv, attention)[: len(rows)].clone())
        for which, _, end in step:
            tables[which].slide(end)
    held = sum(one.held for one in tables)
    kv.close()
    return torch.cat(found), held


@pytest.mark.parametrize(
    ("kernels", "kv_dtype"), [("torch", "float32"), ("native", "float32"), ("native", "int8"), ("native", "fp8")]
)
@pytest.mark.parametrize("case", ["gemma3", "gemma2", "olmo3", "gpt-oss", "qwen2-window"])
def test_the_same_bits_as_with_one_table(case: str, kernels: str, kv_dtype: str, tmp_path: Path) -> None:
    """Guards a layer that reads another group's table, and a window that is cut too short."""
    found = native()
    if kernels == "native" and found is None:
        pytest.skip("the native kernels were not built here")
    folder = prepare(save_hf(build(case), tmp_path / "model"), tmp_path / "cache")
    model = load_model(folder, panels=kernels == "native")
    config = model.config
    if kernels == "native" and found is not None:
        attention: TorchAttention = NativeAttention(config.heads, found)
    else:
        attention = TorchAttention(config.heads)
    generator = torch.Generator().manual_seed(4)
    tokens = [torch.randint(VOCAB, (TOKENS,), generator=generator).tolist() for _ in range(2)]
    one, grouped = config.kv_layout(SIZE, kv_dtype), config.kv_layout(SIZE, kv_dtype, grouped=True)
    assert len(grouped.groups) > 1
    want, held = _logits(model, attention, one, tokens)
    got, less = _logits(model, attention, grouped, tokens)
    assert torch.isfinite(want).all() and torch.equal(got, want)
    assert less * grouped.block_bytes < 0.8 * held * one.block_bytes

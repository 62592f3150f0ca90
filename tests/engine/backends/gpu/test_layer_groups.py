"""Layers kept in groups on the GPU kernels: each reads and writes by its group's table. Tokens are those of PyTorch's
kernels over one table, as steps are, recorded, planned ahead; what a window has left behind is poisoned."""

from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from engine.backends.attention import TorchAttention
from engine.backends.gpu.attention import SHARED, TritonAttention
from engine.backends.gpu.graphs import DecodeGraphs
from engine.backends.gpu.mixed_graphs import MixedGraphs
from engine.backends.gpu.pool import DeviceKV
from engine.kv.groups import GONE
from engine.model.config import LayerOptions
from engine.model.llama import Llama
from engine.runner import Launched, ModelRunner
from engine.step import Drawn, Row, StepPlan
from engine.storage.paged import KVTensors, PagedKV
from engine.types import BlockId
from tests.engine.backends.gpu.test_graphs import recorder
from tests.engine.backends.gpu.test_step import row
from tests.engine.backends.test_layer_options import SHAPE as OPTIONS
from tests.engine.backends.test_layer_options import placed, prompt, weights_of
from tests.kernels.cases import DEVICE

BLOCK, BLOCKS = 16, 60
LAYERS = (LayerOptions(window=40, rope=1), LayerOptions(), LayerOptions(window=40))
SHAPE = replace(OPTIONS, layers=3, layer_options=LAYERS, heads=2, kv_heads=1)
WEIGHTS = weights_of(SHAPE)
GREEDY = row(0, [1], 0, [0]).record.sampling


class Side:
    """A runner over a pool whose bytes are NaN wherever nothing was written, and a table per group and sequence."""

    def __init__(self, kernels: str, *, share_tokens: int = 256, recorded: bool = False) -> None:
        grouped = kernels == "triton"
        self.model = Llama(SHAPE, {name: placed(name, weight, kernels) for name, weight in WEIGHTS.items()})
        layout = SHAPE.kv_layout(BLOCK, "float32", grouped)
        self.kv: KVTensors = DeviceKV(layout, BLOCKS, DEVICE) if grouped else PagedKV(layout, BLOCKS)
        self.kv.memory.fill_(0x7F)
        self.graphs: DecodeGraphs | None = None
        self.mixed: MixedGraphs | None = None
        if grouped:
            attention = TritonAttention(SHAPE, layout, DEVICE, max_batch=4, programs=3, share_tokens=share_tokens)
            self.triton = attention
            if recorded:
                self.graphs = DecodeGraphs(self.model, self.kv, attention, recorder(), [4])
                attention.keep_chunks(40, 2)
                self.mixed = MixedGraphs(self.model, self.kv, attention, recorder(), [40], 2, 2)
                with torch.inference_mode():
                    self.graphs.prepare()
                    self.mixed.prepare()
        backend = self.triton if grouped else TorchAttention(SHAPE.heads, dtype=torch.float32)
        self.runner = ModelRunner(self.model, self.kv, backend, self.graphs, mixed=self.mixed)
        self.logits = torch.empty(0)
        forward = self.model.forward

        def seen(*given: object) -> torch.Tensor:
            self.logits = forward(*given)  # type: ignore[arg-type]
            return self.logits

        self.model.forward = seen  # type: ignore[method-assign]
        self._free = [BlockId((7 * at + 3) % BLOCKS) for at in range(BLOCKS)]
        self.tables: dict[int, list[list[BlockId]]] = {}
        self.gone = 0

    def row(self, name: int, tokens: list[int], start: int, *, draw: bool = True) -> Row:
        """The row that computes `tokens[start:]`, with blocks for it."""
        return self._on_tables(row(name, tokens, start, [], GREEDY, draw))

    def behind(self, name: int, tokens: list[int]) -> Row:
        """The row that computes the token which follows `tokens`, whatever the step before draws."""
        held = row(name, tokens, len(tokens), [], GREEDY)
        return self._on_tables(replace(held, end=len(tokens) + 1, follows=True))

    def _on_tables(self, made: Row) -> Row:
        tables = self.tables.setdefault(int(made.request), [[] for _ in range(self.kv.layout.group_count)])
        for table in tables:
            while len(table) * BLOCK < made.end:
                table.append(self._free.pop(0))
        return replace(made, blocks=tables[0], windows=tuple(tables[1:]))

    def ended(self, rows: Sequence[Row]) -> None:
        """Let go what the windows of the next positions do not show, and poison it."""
        for one in rows:
            for table, group in zip(self.tables[int(one.request)][1:], self.kv.layout.windows, strict=True):
                for at in range(group.first_needed(one.end, BLOCK)):
                    if table[at] != GONE:
                        self.kv.memory[table[at]] = 0x7F
                        self._free.append(table[at])
                        table[at] = GONE
                        self.gone += 1


LENGTHS = {1: 53, 2: 69, 3: 14}
"""While some tokens are decoded, a window leaves a block in the first two, and the third needs another."""
TEXTS = {name: prompt(name, length) for name, length in LENGTHS.items()}
PREFILL = [[(1, 0, 21), (2, 0, 19)], [(2, 19, 43), (3, 0, 14)], [(1, 21, 53)], [(2, 43, 69)]]
DECODE = [[1, 2], [1, 2], [3, 2, 1], [2, 3]]


def run(side: Side) -> list[list[Drawn]]:
    """Prefill in chunks, one of which stands beside a decoding row; then decode, one step at a time."""
    texts, told = dict(TEXTS), list[list[Drawn]]()

    def step(rows: list[Row]) -> list[Drawn]:
        told.append(list(side.runner.run(StepPlan(tuple(rows)))))
        side.ended(rows)
        return told[-1]

    for number, parts in enumerate(PREFILL):
        rows = [side.row(name, texts[name][:end], start, draw=end == LENGTHS[name]) for name, start, end in parts]
        if number == 3:
            rows.insert(0, side.row(1, texts[1], len(texts[1]) - 1))
        for one, token in zip([one for one in rows if one.draw], step(rows), strict=True):
            texts[int(one.request)] = [*texts[int(one.request)], int(token)]  # type: ignore[arg-type]
    for names in DECODE:
        rows = [side.row(name, texts[name], len(texts[name]) - 1) for name in names]
        for name, token in zip(names, step(rows), strict=True):
            texts[name] = [*texts[name], int(token)]  # type: ignore[arg-type]
    return told


@torch.inference_mode()
def test_each_layer_reads_and_writes_by_its_group_s_table() -> None:
    """Guards a layer that reads, or writes, by another group's table, in chunks, mixed steps and decode steps; a window
    that is cut too short, and one that reads what it has left behind."""
    ours, reference = Side("triton"), Side("torch")
    assert [group.window for group in ours.kv.layout.groups] == [0, 40, 40], "one window has two groups"
    wanted, last = run(reference), reference.logits
    assert run(ours) == wanted
    torch.testing.assert_close(ours.logits[:2].cpu(), last[:2], atol=2e-4, rtol=0)
    assert last.std() > 0.5, "a flat reference would prove nothing"
    assert ours.gone >= 6, "nothing was let go"
    assert ours.triton.planning.ahead >= 1


@torch.inference_mode()
@pytest.mark.slow
def test_recorded_steps_find_the_tables_of_every_group() -> None:
    """Guards tables and slots of a group that are frozen into a recording, or lie where another group's do."""
    ours = Side("triton", recorded=True)
    assert run(ours) == run(Side("torch")) and ours.gone >= 6
    assert ours.graphs is not None and ours.mixed is not None
    assert sum(ours.graphs.replays.values()) == len(DECODE)
    assert sum(ours.mixed.replays.values()) == len(PREFILL)


@torch.inference_mode()
@pytest.mark.slow
def test_steps_behind_steps_that_were_not_waited_for() -> None:
    """Guards a window of which a block is let go when a step has ended, while the next one is under way."""
    ours, reference = Side("triton", recorded=True), Side("torch")
    for side in (ours, reference):
        rows = [side.row(name, TEXTS[name], 0, draw=False) for name in (1, 2)]
        for one in rows:
            side.runner.run(StepPlan((one,)))
        side.ended(rows)
    wanted, texts = list[list[Drawn]](), {name: [*TEXTS[name], 5] for name in (1, 2)}
    for _ in range(4):
        rows = [reference.row(name, texts[name], len(texts[name]) - 1) for name in (1, 2)]
        wanted.append(list(reference.runner.run(StepPlan(tuple(rows)))))
        texts = {name: [*texts[name], int(token)] for name, token in zip((1, 2), wanted[-1], strict=True)}  # type: ignore[arg-type]
    texts, got = {name: [*TEXTS[name], 5] for name in (1, 2)}, list[list[Drawn]]()
    before: tuple[Launched, list[Row]] | None = None
    for number in range(5):
        known = number == 0
        rows = [ours.row(n, texts[n], len(texts[n]) - 1) if known else ours.behind(n, texts[n]) for n in (1, 2)]
        launched = ours.runner.launch(StepPlan(tuple(rows))) if number < 4 else None
        if before is not None:
            got.append(list(before[0].wait()))
            ours.ended(before[1])
            texts = {n: [*texts[n], int(token)] for n, token in zip((1, 2), got[-1], strict=True)}  # type: ignore[arg-type]
        if launched is not None:
            before = launched, rows
    assert got == wanted and ours.gone >= 6
    assert ours.graphs is not None and sum(ours.graphs.replays.values()) == 4


@torch.inference_mode()
def test_rows_that_share_a_prefix_read_a_window_s_by_the_row_that_sees_the_most_of_it() -> None:
    """Guards a shared item that is read by the table of a row which has let go what another one still sees."""
    ours, reference = Side("triton", share_tokens=BLOCK), Side("torch")
    stem = prompt(4, 48)
    texts = {name: stem + prompt(10 + name, more) for name, more in ((1, 7), (2, 3), (3, 20))}
    for side in (ours, reference):
        rows = [side.row(0, stem, 0, draw=False)]
        side.runner.run(StepPlan(tuple(rows)))
        for name in texts:
            side.tables[name] = [list(table) for table in side.tables[0]]
            own = [side.row(name, texts[name], 48, draw=False)]
            side.runner.run(StepPlan(tuple(own)))
            for table, group in zip(side.tables[name][1:], side.kv.layout.windows, strict=True):
                first = group.first_needed(len(texts[name]), BLOCK)
                table[:first] = [GONE] * first
    steps = [[side.row(name, [*text, 3], len(text)) for name, text in texts.items()] for side in (ours, reference)]
    window = [one.windows[0] for one in steps[0]]
    assert [table[0] == GONE for table in window] == [True, False, True], "all of them see as much"
    assert ours.runner.run(StepPlan(tuple(steps[0]))) == reference.runner.run(StepPlan(tuple(steps[1])))
    torch.testing.assert_close(ours.logits[:3].cpu(), reference.logits[:3], atol=2e-4, rtol=0)
    assert ours.triton._step is not None
    assert ours.triton._step.launches[40].kind == SHARED
    assert ours.triton._latest is not None
    plan = ours.triton._plans(ours.triton._latest)[40]
    shared = {
        (item.owner, tuple(plan.rows[item.first : item.first + item.size])) for item in plan.items if item.size > 1
    }
    assert shared == {(1, (1, 0))}, "the first row has let go what the second sees"

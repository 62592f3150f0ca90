"""Runs one step: a torch-free plan in, tokens out. The only place where decisions meet tensors. What becomes of the
logits is said in `engine/sampling.py`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.backends.attention import AttentionBackend
from engine.backends.gpu.graphs import DecodeGraphs
from engine.batch import ForwardBatch
from engine.cores import Cores
from engine.model.llama import Llama
from engine.step import Drawn, Row, StepPlan
from engine.storage.paged import KVTensors


class Runner(Protocol):
    """Fulfilled by `ModelRunner` and by `fakes.model.FakeRunner`."""

    kv: KVTensors

    def run(self, plan: StepPlan) -> Sequence[Drawn]:
        """Carry out one step. Returns a token, or candidates, for each row with `draw`, in the order of the rows."""


class ModelRunner:
    """A model over paged KV. Mixed rows (decode and prefill chunks) run as one batch, decoding ones first. Steps that
    `graphs` takes are replayed."""

    def __init__(
        self,
        model: Llama,
        kv: KVTensors,
        attention: AttentionBackend,
        graphs: DecodeGraphs | None = None,
        cores: Cores | None = None,
    ) -> None:
        self.kv = kv
        self._model = model
        self._attention = attention
        self._graphs = graphs
        self._at_work: Callable[[], AbstractContextManager[None]] = nullcontext if cores is None else cores.at_work
        # Kernels are launched on the current device, and a thread's first one is number 0.
        self._on_device: Callable[[], AbstractContextManager[None]] = (
            partial(torch.cuda.device, model.device) if model.device.type == "cuda" else nullcontext
        )

    def run(self, plan: StepPlan) -> Sequence[Drawn]:
        with self._at_work(), self._on_device(), torch.inference_mode():
            return self._run(plan)

    def _run(self, plan: StepPlan) -> Sequence[Drawn]:
        self.kv.copy(list(plan.copies))
        if not plan.rows:
            return []
        order = sorted(range(len(plan.rows)), key=lambda at: plan.rows[at].end - plan.rows[at].start > 1)
        rows = [plan.rows[at] for at in order]
        if self._graphs is not None and self._graphs.takes(rows):
            logits = self._graphs.run(rows)
        else:
            logits = self._forward(rows)
        drawn = self._attention.sample(logits, [row for row in rows if row.draw])
        drawing = [at for at in order if plan.rows[at].draw]
        return [token for _, token in sorted(zip(drawing, drawn, strict=True))]

    def _forward(self, rows: list[Row]) -> Tensor:
        batch = ForwardBatch.build(rows, self.kv.layout.block_size, self._model.device, self._attention.row_multiple)
        self._attention.begin(batch, self.kv)
        return self._model.forward(batch, self.kv, self._attention)


class Opened(NamedTuple):
    """A pool and the runner over it. `workspace_bytes`: what steps take beside weights and pool, where it is known."""

    kv: KVTensors
    runner: ModelRunner
    workspace_bytes: int = 0

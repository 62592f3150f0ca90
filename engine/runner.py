"""Runs one step: a torch-free plan in, tokens out. The only place where decisions meet tensors."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.attention import AttentionBackend
from engine.batch import ForwardBatch, SequenceSlice
from engine.kv.paged import PagedKV
from engine.model.llama import Llama
from engine.sampling import Draw, sample
from engine.step import Drawn, StepPlan


class Runner(Protocol):
    """Fulfilled by `ModelRunner` and by `engine.fake.FakeRunner`."""

    kv: PagedKV

    def run(self, plan: StepPlan) -> Sequence[Drawn]:
        """Carry out one step. Returns a token, or candidates, for each row with `draw`, in the order of the rows."""


class ModelRunner:
    """A model over paged KV. Mixed rows (decode and prefill chunks) run as one batch."""

    def __init__(self, model: Llama, kv: PagedKV, attention: AttentionBackend) -> None:
        self.kv = kv
        self._model = model
        self._attention = attention

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Sequence[Drawn]:
        self.kv.copy(list(plan.copies))
        if not plan.rows:
            return []
        slices = [
            SequenceSlice(list(row.tokens[row.start : row.end]), row.start, list(row.blocks), row.draw)
            for row in plan.rows
        ]
        batch = ForwardBatch.build(slices, self.kv.layout.block_size)
        self._attention.begin(batch, self.kv)
        logits = self._model.forward(batch, self.kv, self._attention)
        wanted = [Draw(r.record, r.tokens, r.banned, r.candidates) for r in plan.rows if r.draw]
        return sample(logits, wanted)

"""Scores tokens that another backend has chosen, by the logits of the CPU's.

The model is led through each prompt and the answer that it was given, so one near-tie that fell the other way changes
nothing about the positions behind it. At each position the chosen token is held against the CPU's logits.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.attention import TorchAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.model.llama import load_model
from engine.storage.paged import TORCH_DTYPES, PagedKV
from engine.types import BlockId

BLOCK = 16
CHUNK = 512


class Reference:
    """A prepared model on the CPU, in whatever type it was prepared."""

    def __init__(self, model_dir: Path, context_tokens: int) -> None:
        self._model = load_model(model_dir, packed=False)
        shape = self._model.config
        layout = shape.kv_layout(BLOCK)
        self._kv = PagedKV(layout, layout.blocks_for(context_tokens))
        self._attention = TorchAttention(shape.heads, dtype=TORCH_DTYPES[shape.dtype])

    @property
    def vocab(self) -> int:
        return self._model.config.vocab

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Return float32 `[len(answer), vocab]`: what was to be chosen from at each position of the answer."""
        tokens, rows = [*prompt, *answer[:-1]], []
        for start in range(0, len(tokens), CHUNK):
            rows.append(self._rows(tokens, start, min(start + CHUNK, len(tokens))))
        return self._model.logits(torch.cat(rows)[len(prompt) - 1 :])

    def without_a_block(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Return the same, after `logits` of the same tokens, with zeros where the KV of the prompt's middle block was:
        what a block that is lost in a migration makes of the answer."""
        lost = len(prompt) // BLOCK // 2
        self._kv.memory[lost] = 0
        tokens = [*prompt, *answer[:-1]]
        return self._model.logits(self._rows(tokens, len(prompt) - 1, len(tokens)))

    def close(self) -> None:
        self._kv.close()

    @torch.inference_mode()
    def _rows(self, tokens: list[int], start: int, end: int) -> Tensor:
        blocks = [BlockId(n) for n in range(self._kv.blocks)]
        piece = trial_row(tokens[:end], start, blocks)
        batch = ForwardBatch.build([piece], BLOCK)
        self._attention.begin(batch, self._kv)
        return self._model.hidden(batch, self._kv, self._attention)[: end - start]


def gaps(logits: Tensor, chosen: Sequence[int]) -> Tensor:
    """Return `[positions]`: by how much the chosen token's logit stays behind the best one's; 0 where it is the best.
    """
    taken = logits.gather(1, torch.tensor(chosen).unsqueeze(1)).squeeze(1)
    return logits.max(1).values - taken

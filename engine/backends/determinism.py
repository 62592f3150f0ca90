"""A check that every token is a function of its own sequence alone, on this machine, for this model.

The promise: whatever else is in the batch, however a prompt was cut into chunks, and whether a token was decoded or
recomputed after a worker was lost, the same bits come out. It is kept by construction (rows in multiples of four, the
key widths of a stable attention plan, tables instead of vector functions), which rests on what the matrix library does
with each shape. So it is tried: one real layer of each kind and the output matrix over a prompt that passes every width
where the attention kernel changes, computed in several ways, every KV byte and logit compared.
"""

from collections.abc import Callable
from contextlib import closing
from random import Random

import torch
from torch import Tensor

from engine.backends.attention import TorchAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.model.llama import Llama
from engine.storage.paged import PagedKV
from engine.types import BlockId

Part = tuple[int, int, int]  # sequence, start, end

PROMPT_TOKENS = 720
"""Past one key tile of 512, and 192 into the next."""
OTHER_TOKENS = 37
_WATCHED = (15, 16, 17, 130, 191, 192, 193, 255, 300, 383, 384, 385, 500, 511, 512, 513, 600, 703, 704, 719)
"""Tokens that are recomputed one at a time, as decoding computes them."""


def deviations(model: Llama, block_size: int, attention: TorchAttention, kv_dtype: str | None = None) -> list[str]:
    """The ways of computing the same tokens that gave other bits here; none where the promise holds. KV is kept in
    `kv_dtype`, by default the model's: other kernels may attend to it."""
    model = model.layer_of_each_kind()
    tokens = min(PROMPT_TOKENS, model.config.context_tokens)
    lengths = tokens, min(OTHER_TOKENS, tokens)
    layout = model.config.kv_layout(block_size, kv_dtype)
    with closing(PagedKV(layout, sum(map(layout.blocks_for, lengths)))) as kv:
        return _Probe(model, kv, attention, lengths).deviations()


class _Probe:
    """Two sequences over a pool of their own: one is watched, the other keeps it company."""

    def __init__(self, model: Llama, kv: PagedKV, attention: TorchAttention, lengths: tuple[int, int]) -> None:
        random = Random(0)
        blocks = [BlockId(block) for block in range(kv.blocks)]
        random.shuffle(blocks)
        own = kv.layout.blocks_for(lengths[0])
        self._tables = (blocks[:own], blocks[own:])
        self._tokens = tuple([random.randrange(model.config.vocab) for _ in range(n)] for n in lengths)
        self._model = model
        self._kv = kv
        self._attention = attention

    @torch.inference_mode()
    def deviations(self) -> list[str]:
        total, other = map(len, self._tokens)
        watched = [at for at in _WATCHED if at < total]
        want = self._in_chunks(128)
        kv = self._own_kv()
        ways: dict[str, Callable[[], bool]] = {
            "one chunk": lambda: torch.equal(self._in_chunks(total), want),
            "chunks of 50": lambda: torch.equal(self._in_chunks(50), want),
            "one token alone": lambda: all(torch.equal(self._step((0, at, at + 1))[0], want[at]) for at in watched),
            "one token in company": lambda: all(
                torch.equal(self._step((1, 0, other), (0, at, at + 1))[-1], want[at]) for at in watched
            ),
            "logits of more rows": lambda: self._logits_agree(want),
        }
        return [name for name, same in ways.items() if not (same() and torch.equal(self._own_kv(), kv))]

    def _in_chunks(self, size: int) -> Tensor:
        total = len(self._tokens[0])
        return torch.cat([self._step((0, at, min(at + size, total))) for at in range(0, total, size)])

    def _step(self, *parts: Part) -> Tensor:
        """Compute these tokens in one batch; returns `[rows, hidden]` in their order."""
        rows = [trial_row(self._tokens[which][:end], start, self._tables[which]) for which, start, end in parts]
        batch = ForwardBatch.build(rows, self._kv.layout.block_size, row_multiple=self._attention.row_multiple)
        self._attention.begin(batch, self._kv)
        return self._model.hidden(batch, self._kv, self._attention)[: batch.rows]

    def _own_kv(self) -> Tensor:
        return self._kv.memory[self._tables[0]]

    def _logits_agree(self, rows: Tensor) -> bool:
        least = self._attention.row_multiple
        alone = self._model.logits(rows[:least])
        return all(torch.equal(self._model.logits(rows[:n])[:least], alone) for n in (4, 8, 12, 32) if n <= len(rows))

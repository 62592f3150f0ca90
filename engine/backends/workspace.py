"""The workspace of an engine: what a step holds at its peak beside weights and KV pool.

The largest step of a worker is one chunk of a prompt together with a full batch of decoding sequences, all at the end
of a full context. Its peak is found in two ways, by the same count of live tensor bytes:

- **measured**: the step is run, with the real runner and a sampler with every option on, and with weights of zeros:
  pages that are only read take no memory, and all rows go to the same experts, which is the most that can be;
- **estimated**: the engine's own forward pass is run over tensors without memory, for any shape of model.

Nothing but the residual stream outlives a layer, so two layers reach the peak of all of them. What operators hold
inside themselves is not seen; `docs/capacity.md` compares the count with a process's resident memory.
"""

import weakref
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from engine.backends.attention import LayerInput, Mixture, TorchAttention
from engine.batch import ForwardBatch
from engine.config import StepLimits
from engine.model.config import ModelConfig
from engine.model.families import FAMILIES, layer_key
from engine.model.llama import Llama
from engine.runner import ModelRunner
from engine.step import Row, StepPlan
from engine.storage.paged import TORCH_DTYPES, KVTensors, PagedKV, PoolFile
from engine.types import BlockId, RequestId, RequestRecord, SamplingParams
from kernels.experts import combine
from kernels.linear import linear

LAYERS = 2
"""The second finds what the first has left behind."""

SAMPLER_BYTES = 60
"""Live bytes per vocabulary entry while one row is drawn with penalties, top-k, top-p and min-p in 64 bits."""

EVERY_OPTION = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
)


class LiveBytes(TorchDispatchMode):
    """Counts, while active, the bytes of every storage that an operator returned and that is still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, Tensor):
                self._see(item.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._storages.discard(key)
        self.live -= nbytes


def trial_row(tokens: Sequence[int], start: int, blocks: Sequence[BlockId]) -> Row:
    """A row that no request asks for: compute `tokens[start:]`, and draw what follows with every option on."""
    record = RequestRecord(
        request=RequestId("trial"),
        tokens=list(tokens),
        prompt_tokens=1,
        max_tokens=1,
        seed=0,
        sampling=EVERY_OPTION,
    )
    return Row(record.request, record, record.tokens, start, len(tokens), blocks, draw=True)


def blank_row(tokens: int, end: int, block_size: int, groups: int = 1) -> Row:
    """`tokens` new ones at the end of a context of `end`, all of it in block 0 of every layer group: what is read makes
    no difference to memory, nor to which kernels run."""
    blocks = [BlockId(0)] * -(-end // block_size)
    row = trial_row([0] * end, end - tokens, blocks)
    return msgspec.structs.replace(row, windows=(blocks,) * (groups - 1)) if groups > 1 else row


def measure_workspace(model_dir: Path, block_size: int, limits: StepLimits, kv_dtype: str | None = None) -> int:
    """Bytes; runs two small steps and one maximal one, over a pool of one block. `kv_dtype` is the model's unless
    given. Raises ModelError."""
    shape = _shallow(ModelConfig.load(model_dir))
    model = Llama(shape, _weights(shape, TORCH_DTYPES[shape.dtype]))
    one, two = blank_row(1, 2, block_size), blank_row(2, 2, block_size)
    with closing(PagedKV(shape.kv_layout(block_size, kv_dtype), 1)) as kv, LiveBytes() as counter:
        for rows in ([two], [one, two], _largest(limits, shape, block_size)):
            # What is there before a step, weights and pool, is counted as it is first seen.
            before = counter.peak = counter.live
            # An attention of its own: one keeps the plan of its latest step.
            attention = TorchAttention(shape.heads, dtype=TORCH_DTYPES[shape.dtype])
            ModelRunner(model, kv, attention).run(StepPlan(tuple(rows)))
            del attention
    return counter.peak - before


def estimate_workspace(
    shape: ModelConfig,
    dtype: str,
    block_size: int,
    limits: StepLimits,
    in_place: bool = False,
    kv_dtype: str | None = None,
) -> int:
    """Bytes for a model that need not exist: `shape` is that of one rank. `in_place`: for attention kernels that read
    KV where it lies and keep their scores on the chip; otherwise for the CPU's kernels, which gather some of it at a
    time. `kv_dtype` is `dtype` unless given."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    shape = _shallow(shape)
    layout = shape.kv_layout(block_size, kv_dtype or dtype)
    kind, counter = TORCH_DTYPES[dtype], LiveBytes()
    backend = (_InPlace if in_place else _Unfilled)(shape.heads, dtype=kind)
    with FakeTensorMode(), torch.inference_mode():
        memory = torch.empty(1, layout.block_bytes, dtype=torch.uint8)
        kv = KVTensors(layout, memory, PoolFile("headrace-estimate", 1))
        model = Llama(msgspec.structs.replace(shape, dtype=dtype), _weights(shape, kind))
        with counter:
            # Steps see the pool, through views of it; it is not theirs.
            memory.view(-1)
            before = counter.live
            batch = ForwardBatch.build(_largest(limits, shape, block_size), block_size)
            backend.begin(batch, kv)
            logits = model.forward(batch, kv, backend)
            drawing = counter.live + SAMPLER_BYTES * shape.vocab
            del logits
    return max(counter.peak, drawing) - before


class _Unfilled(TorchAttention):
    """The CPU's kernels for tensors without content, of which nobody can say which experts they choose."""

    def mix(self, x: Tensor, mixture: Mixture) -> Tensor:
        weights, chosen = mixture.experts, mixture.routing.chosen
        if not isinstance(weights.gate_up, Tensor) or not isinstance(weights.down, Tensor):
            raise TypeError("weights without content are in no panels, and no codes")
        logits = mixture.logits(x)
        # At most all rows go to one expert; their answers are kept for all.
        answers = x.new_empty(len(x), chosen, x.shape[1])
        answers[:, 0] = linear(self.gate(linear(x, weights.gate_up[0])), weights.down[0])
        return combine(answers, logits[:, :chosen])


class _InPlace(_Unfilled):
    """Attention for tensors without content: allocates rotated queries and the answer alone."""

    def begin(self, batch: ForwardBatch, kv: KVTensors) -> None:
        pass

    def attend(self, given: LayerInput) -> Tensor:
        q = torch.empty_like(given.qkv[:, : self._heads])
        return torch.empty_like(q).view(len(q), -1)


def _shallow(shape: ModelConfig) -> ModelConfig:
    """Two layers, or one of each window where there are more: a step keeps a plan for each."""
    first = {shape.layer(number).window: number for number in reversed(range(shape.layers))}
    numbers = (sorted(first.values()) + list(range(shape.layers)))[: min(shape.layers, max(LAYERS, len(first)))]
    options = tuple(shape.layer(number) for number in numbers)
    return msgspec.structs.replace(shape, layers=len(numbers), layer_options=options)


def _weights(shape: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    family = FAMILIES[shape.family]
    named = [(weight.name, weight) for weight in family.weights if weight.present(shape)]
    for layer in range(shape.layers):
        wanted = (weight for weight in family.layer_weights if weight.present(shape, layer))
        named += [(layer_key(layer, weight.name), weight) for weight in wanted]
    return {name: torch.zeros(weight.shape(shape), dtype=dtype) for name, weight in named}


def _largest(limits: StepLimits, shape: ModelConfig, block_size: int) -> list[Row]:
    end = limits.context_tokens or shape.context_tokens
    decoding = [blank_row(1, end, block_size)] * limits.batch
    return [*decoding, blank_row(min(limits.chunk_tokens, end), end, block_size)]

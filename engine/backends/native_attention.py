"""The CPU's native kernels behind the engine's seam."""

import torch
from torch import Tensor

from engine.backends.attention import LayerInput, Mixture, TorchAttention
from engine.batch import ROW_MULTIPLE, ForwardBatch
from engine.model.config import Activation
from engine.storage.paged import KVTensors
from kernels.experts import mix
from kernels.native import STORAGE, Native, PoolShape, Sequences
from kernels.panels import PanelStack

_LANES = 16


class NativeAttention(TorchAttention):
    """Attention for a model in float32, over KV of any type. Rows need no padding: none of these kernels looks at two
    at once. With heads whose size is no multiple of 16 PyTorch's kernels attend."""

    row_multiple = 1

    def __init__(self, heads: int, kernels: Native) -> None:
        super().__init__(heads, stable=True, dtype=torch.float32)
        self._kernels = kernels
        self._sequences: list[Sequences] | None = None
        """By layer group."""

    def begin(self, batch: ForwardBatch, kv: KVTensors) -> None:
        if not attends(kv):
            super().begin(batch, kv)
            return
        self._sequences = [
            Sequences.of(batch.query_counts, batch.context_lens, tables.block_tables) for tables in batch.groups
        ]

    def attend(self, given: LayerInput) -> Tensor:
        layer, qkv, rotation, batch, kv, norms, options, group = given
        if not attends(kv):
            return super().attend(given)
        if self._sequences is None:
            raise RuntimeError("attend before begin")
        _, kv_heads, layers, _, block_size, head_dim = kv.tensor.shape
        shape = PoolShape(kv_heads, layers, block_size, head_dim)
        tables = None if rotation is None else (rotation.cos, rotation.sin)
        self._kernels.rotate_and_write(
            qkv, self._heads, tables, batch.positions, norms, kv.tensor, shape, layer, batch.groups[group].slots
        )
        out = torch.empty(len(qkv), self._heads * head_dim)
        out[batch.rows :] = 0
        window, scale, softcap, sinks = options
        self._kernels.attend(
            *(qkv, self._heads, self._sequences[group], kv.tensor, shape, layer, out),
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        return out

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.norm(x, delta, weight, eps)

    def mix(self, x: Tensor, mixture: Mixture) -> Tensor:
        routed = self._kernels.route(mixture.logits(x), mixture.routing)
        if isinstance(mixture.experts.gate_up, PanelStack):
            return self._kernels.mix(x, routed, mixture.experts)
        return mix(x, routed, mixture.experts, ROW_MULTIPLE)

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        return self._kernels.gate(gate_up, activation == "gelu_tanh")


def attends(kv: KVTensors) -> bool:
    """True where the native kernels can read and write this pool."""
    return attends_to(kv.tensor.dtype, kv.tensor.shape[-1])


def attends_to(dtype: torch.dtype, head_dim: int) -> bool:
    """The same of a pool of this type and head size."""
    return dtype in STORAGE and head_dim % _LANES == 0

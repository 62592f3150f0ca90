"""The seam between a model and the kernels that its step runs on: six calls, everything passed in."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from engine.backends.token_counts import CountedTokens
from engine.batch import ROW_MULTIPLE, ForwardBatch
from engine.logprobs import QueuedDraws
from engine.model.config import Activation
from engine.sampling import sample
from engine.step import Drawn, Row
from engine.storage.paged import KVTensors
from kernels.experts import ExpertWeights, Routing, mix, route
from kernels.kv_write import plan_kv_write, write_kv
from kernels.linear import Weight, linear
from kernels.paged_attention import AttentionPlan, paged_attention, plan_attention


class Rotation:
    """One step's rotary embedding. `cos`, `sin`: one of the model's tables, `[context, dims / 2]`; `positions`: of the
    step's rows. The first `dims` of each head's dimensions turn, the others are left alone."""

    def __init__(self, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        self.cos = cos
        self.sin = sin
        self.positions = positions

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """`[rows, 1, dims]` each, so that `x * cos + roll(x, half) * sin` rotates one half against the other."""
        cos, sin = self.cos[self.positions], self.sin[self.positions]
        return torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)


class HeadNorms(NamedTuple):
    """RMS norms of each head's query and key before they are rotated: weights `[head_dim]` (Qwen3)."""

    q: Tensor
    k: Tensor
    eps: float


class AttentionOptions(NamedTuple):
    """How a layer's queries weigh keys, where it is not by the softmax of plain products over all of them."""

    window: int = 0
    """How many keys a query sees, its own included; 0: all."""
    scale: float | None = None
    """The factor of scores; None: 1 / sqrt(head_dim)."""
    softcap: float = 0.0
    """Scores s, scaled, become cap * tanh(s / cap) before they are masked; 0: they are left alone."""
    sinks: Tensor | None = None
    """`[heads]`, in the pool's or a wider type: one more logit of each head's softmax, which has no value and is
    not scaled; counted once."""


class LayerInput(NamedTuple):
    """The input of one layer's attention. `qkv` is `[rows, heads + 2 * kv_heads, head_dim]`: all rows of the step
    `batch`. Without `rotation`, nothing is rotated. `layer` is a block's, in the tables of the layer group `group`."""

    layer: int
    qkv: Tensor
    rotation: Rotation | None
    batch: ForwardBatch
    kv: KVTensors
    norms: HeadNorms | None = None
    options: AttentionOptions = AttentionOptions()
    group: int = 0


class Mixture(NamedTuple):
    """The experts of a layer, and its router `[experts, hidden]`, in 32 bits, with its bias."""

    router: Weight
    router_bias: Tensor | None
    routing: Routing
    experts: ExpertWeights

    def logits(self, x: Tensor) -> Tensor:
        """Return the router's product `[rows, experts]`, float32."""
        return linear(x.float(), self.router, self.router_bias)


class AttentionBackend(Protocol):
    """The computations of a step beside products of one matrix. One step at a time."""

    row_multiple: int
    """Rows of a step, and rows of logits, are padded to a multiple of it."""

    def begin(self, batch: ForwardBatch, kv: KVTensors) -> None:
        """Plan a step; called once before its first layer."""

    def attend(self, given: LayerInput) -> Tensor:
        """Norm (where the model does so) and rotate queries and keys, write keys and values into the pool, then attend.
        Returns `[rows, heads * head_dim]`; padding rows are zero, and write nothing."""

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `x` `[rows, hidden]` in place; return the RMS norm of the sum, times `weight`, which may be of
        a wider type: the product is rounded once."""

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        """`[rows, 2 * width]`, the gate first -> activation(gate) * up, `[rows, width]`. May write to its argument."""

    def mix(self, x: Tensor, mixture: Mixture) -> Tensor:
        """Send every row of `x` `[rows, hidden]` through the experts that the layer's router chooses for it."""

    def sample(self, logits: Tensor, draws: list[Row]) -> Tensor | QueuedDraws | Sequence[Drawn]:
        """A token, or candidates, for each draw, row i of `logits` for draw i: when all work of the step has ended, or
        tokens as int64 `[draws]` on the device, which may not have come to them; with their log probabilities, where
        any are asked for."""


class TorchAttention:
    """The CPU kernels over block tables. `stable`: a row's bits depend on its own prefix alone. `dtype`: of the model,
    where the pool keeps another."""

    row_multiple = ROW_MULTIPLE

    def __init__(self, heads: int, stable: bool = True, dtype: torch.dtype | None = None) -> None:
        self._heads = heads
        self._stable = stable
        self._dtype = dtype
        self._plans: dict[tuple[int, int], AttentionPlan] = {}
        """By layer group and window: layers of the same one share theirs."""
        self._rows: list[Tensor] | None = None
        """By layer group."""
        self._counted = CountedTokens()

    def begin(self, batch: ForwardBatch, kv: KVTensors) -> None:
        self._plans.clear()
        self._rows = [plan_kv_write(tables.slots, kv.tensor) for tables in batch.groups]

    def attend(self, given: LayerInput) -> Tensor:
        layer, qkv, rotation, batch, kv, norms, options, group = given
        if self._rows is None:
            raise RuntimeError("attend before begin")
        kv_heads = kv.tensor.shape[1]
        qk = qkv[:, : self._heads + kv_heads]
        if norms is not None:
            q, k = qk.split([self._heads, kv_heads], 1)
            qk = torch.cat([norm_rows(q, norms.q, norms.eps), norm_rows(k, norms.k, norms.eps)], 1)
        if rotation is not None:
            qk = _rotated(qk, rotation)
        q, k = qk.split([self._heads, kv_heads], 1)
        write_kv(k, qkv[:, -kv_heads:], kv.tensor, layer, self._rows[group], kv.scales)
        out = torch.empty_like(q)
        out[batch.rows :] = 0
        window, scale, softcap, sinks = options
        plan = self._plan(group, window, batch, kv)
        paged_attention(q, kv.tensor, layer, plan, out, kv.scales, scale=scale, softcap=softcap, sinks=sinks)
        return out.view(q.shape[0], -1)

    def _plan(self, group: int, window: int, batch: ForwardBatch, kv: KVTensors) -> AttentionPlan:
        """Return the step's plan for layers of this group and window, made for the first of them."""
        kind = group, window
        if kind not in self._plans:
            rows = batch.query_counts, batch.context_lens, batch.groups[group].block_tables
            self._plans[kind] = plan_attention(
                *rows, kv.tensor, self._heads, self._stable, dtype=self._dtype, window=window
            )
        return self._plans[kind]

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            x += delta
        return norm_rows(x, weight, eps)

    def gate(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")).mul_(up)

    def mix(self, x: Tensor, mixture: Mixture) -> Tensor:
        routed = route(mixture.logits(x), mixture.routing)
        return mix(x, routed, mixture.experts, self.row_multiple)

    def sample(self, logits: Tensor, draws: list[Row]) -> Sequence[Drawn]:
        return sample(logits, draws, self._counted)


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of each row, times `weight`, which may be of a wider type: the product is rounded once."""
    if weight.dtype is x.dtype:
        return rms_norm(x, weight.shape, weight, eps)
    return rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def _rotated(qk: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation.rows
    dims = cos.shape[-1]
    turned = qk[..., :dims]
    turned = torch.addcmul(turned * cos, turned.roll(dims // 2, -1), sin)
    return turned if dims == qk.shape[-1] else torch.cat([turned, qk[..., dims:]], -1)

"""The forward pass of the families in `families.py` over paged KV. Everything is passed in, nothing kept.

Row independence: with products over a multiple of four rows, a row's bits do not depend on the other rows (fewer rows
take other kernels, with other bits); `engine.backends.determinism` checks it on each machine. Only attention mixes
rows.
"""

import math
from collections.abc import Mapping
from copy import copy
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from engine.backends.attention import AttentionBackend, HeadNorms, LayerInput, Rotation
from engine.batch import ForwardBatch
from engine.model.config import (
    FactorsRope,
    LinearRope,
    Llama3Rope,
    ModelConfig,
    ModelError,
    Progress,
)
from engine.model.families import FAMILIES, layer_key
from engine.model.prepared.loading import load_weights
from engine.model.prepared.packed import packed_weights
from engine.model.prepared.panels import panel_weights
from engine.model.prepared.shards import fingerprint_of
from engine.storage.paged import KVTensors
from kernels.linear import Weight, linear
from kernels.native import native
from kernels.panels import Panels

Weights = Mapping[str, Weight]
"""Weights by name; norms, biases and the embedding are plain."""


class _Layer:
    """One layer's weights: `[rows, columns]` matrices as `torch.nn.functional.linear` wants them, biases or None."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        def need(name: str) -> Tensor:
            return _plain(weights[layer_key(layer, name)])

        def matrix(name: str) -> Weight:
            return weights[layer_key(layer, name)]

        def maybe(name: str) -> Tensor | None:
            return need(name) if layer_key(layer, name) in weights else None

        self.attention_norm = need("attention_norm")
        self.qkv, self.qkv_bias = matrix("qkv"), maybe("qkv_bias")
        self.head_norms = HeadNorms(need("q_norm"), need("k_norm"), config.norm_eps) if config.qk_norm else None
        self.output, self.output_bias = matrix("output"), maybe("output_bias")
        self.mlp_norm = need("mlp_norm")
        self.gate_up, self.gate_up_bias = matrix("gate_up"), maybe("gate_up_bias")
        self.down, self.down_bias = matrix("down"), maybe("down_bias")


class Llama:
    """A loaded model. `forward` changes nothing but the KV rows that `attention` writes."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._embedding = _plain(weights["embedding"])
        self._norm = _plain(weights["norm"])
        self._head = weights.get("head", self._embedding)
        self._layers = [_Layer(config, weights, layer) for layer in range(config.layers)]
        tables = rope_tables(config, self._embedding.dtype)
        self._cos, self._sin = (table.to(self._embedding.device) for table in tables)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def table_bytes(self) -> int:
        """The size of the rotary tables, which every process computes for itself."""
        return int(self._cos.nbytes + self._sin.nbytes)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, kv: KVTensors, attention: AttentionBackend, out: Tensor | None = None
    ) -> Tensor:
        """Return float32 logits `[len(batch.logit_rows), vocab]`, in `out` if given. `attention` has begun this batch.

        Tokens and positions must be in range: the caller has checked them.
        """
        return self.logits(self.hidden(batch, kv, attention)[batch.logit_rows], out)

    @torch.inference_mode()
    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits `[rows, vocab]` in float32 from what the last layer leaves, in `out` if given."""
        if isinstance(self._head, Panels) and (kernels := native()) is not None:
            normed = kernels.norm(rows.contiguous(), None, self._norm, self.config.norm_eps)
            product = kernels.linear(normed, self._head)
        else:
            wanted = rms_norm(rows, (self.config.hidden,), self._norm, self.config.norm_eps)
            product = linear(wanted, self._head)
        return product.float() if out is None else out.copy_(product)

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, kv: KVTensors, attention: AttentionBackend) -> Tensor:
        """Return what the last layer leaves of every row, `[padded rows, hidden]`; see `forward`."""
        eps, head_dim = self.config.norm_eps, self.config.head_dim
        rotation = Rotation(self._cos, self._sin, batch.positions)
        x = self._embedding[batch.tokens]
        delta: Tensor | None = None
        for number, layer in enumerate(self._layers):
            normed = attention.norm(x, delta, layer.attention_norm, eps)
            qkv = linear(normed, layer.qkv, layer.qkv_bias).view(len(x), -1, head_dim)
            attended = attention.attend(LayerInput(number, qkv, rotation, batch, kv, layer.head_norms))
            delta = linear(attended, layer.output, layer.output_bias)
            normed = attention.norm(x, delta, layer.mlp_norm, eps)
            gated = attention.gate(linear(normed, layer.gate_up, layer.gate_up_bias))
            delta = linear(gated, layer.down, layer.down_bias)
        return x if delta is None else x.add_(delta)

    def first_layer(self) -> "Llama":
        """Return a model of this one's first layer and output matrix: its shapes, at a fraction of the work."""
        short = copy(self)
        short.config = msgspec.structs.replace(self.config, layers=1)
        short._layers = self._layers[:1]
        return short


def load_model(
    model_dir: Path,
    packed: bool = True,
    device: torch.device | str = "cpu",
    panels: bool = False,
    progress: Progress | None = None,
) -> Llama:
    """Load a prepared model's weights and build the model on them. On the CPU they are mapped: no copy, pages shared by
    all workers of the host. With `packed`, its matrices are those packed for this processor, made by the first process
    that needs them. `panels`: matrices in panels instead, for the native kernels. Another `device` gets a copy of the
    plain ones, streamed from their files; `progress` hears of it.

    Raises ModelError where the folder is not whole or its family is not one of this file's, ValueError for panels of
    a model in another dtype than float32.
    """
    config = ModelConfig.load(model_dir)
    if config.family not in FAMILIES:
        raise ModelError(model_dir, f"unknown family {config.family!r}")
    if panels and config.dtype != "float32":
        raise ValueError(f"panels are for float32, not {config.dtype}")
    device = torch.device(device)
    weights, digests = load_weights(model_dir, device, progress)
    config = msgspec.structs.replace(config, fingerprint=fingerprint_of(config.fingerprint, digests))
    if panels:
        return Llama(config, {**weights, **panel_weights(model_dir, weights)})
    if packed and device.type == "cpu":
        return Llama(config, weights | packed_weights(model_dir, weights))
    return Llama(config, weights)


def _plain(weight: Weight) -> Tensor:
    if isinstance(weight, Panels):
        raise TypeError("only matrices that are multiplied with can be in panels")
    return weight


def rope_tables(config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin `[context_tokens, head_dim / 2]` of the rotary embedding (RoFormer, arXiv 2104.09864).

    A table, not a computation at each step: vectorised cosines of the same angle differ in their last bit by where the
    angle lies in the tensor, which would make a row depend on its batch.
    """
    # 32 bits throughout, as the models were trained: position 8000 differs visibly from a 64-bit table.
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = _scaled(1.0 / config.rope_theta**exponents, config)
    angles = torch.outer(torch.arange(config.context_tokens).float(), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _scaled(frequencies: Tensor, config: ModelConfig) -> Tensor:
    match scaling := config.rope_scaling:
        case None:
            return frequencies
        case LinearRope():
            return frequencies / scaling.factor
        case FactorsRope():
            return frequencies / torch.tensor(scaling.factors)
        case Llama3Rope():
            wavelengths = 2 * math.pi / frequencies
            original = scaling.original_context_tokens
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
            return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies

"""The forward pass of the families in `families.py` over paged KV. Everything is passed in, nothing kept.

Row independence: with products over a multiple of four rows, a row's bits do not depend on the other rows (fewer rows
take other kernels, with other bits); `engine.backends.determinism` checks it on each machine. Only attention mixes
rows.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.backends.attention import (
    AttentionBackend,
    AttentionOptions,
    HeadNorms,
    LayerInput,
    Mixture,
    Rotation,
    norm_rows,
)
from engine.batch import ForwardBatch
from engine.model.config import ModelConfig, ModelError, Progress
from engine.model.families import FAMILIES, layer_key
from engine.model.prepared.float8 import float8_weights
from engine.model.prepared.loading import PreparedWeights, load_weights, widened
from engine.model.prepared.packed import packed_weights, wide_weights
from engine.model.prepared.panels import panel_weights
from engine.model.prepared.shards import by_reference, fingerprint_of
from engine.model.prepared.sliced import PartWeights
from engine.model.reduction import ColumnSlices, Reduction, WholeNorm, add_in_order, embedded
from engine.model.rope import rope_table
from engine.model.split import Share, check_split, local_config
from engine.storage.paged import TORCH_DTYPES, KVTensors
from kernels.coded_weight import CodedStack, CodedWeight
from kernels.experts import ClampedGate, ExpertWeights, Routing, Stack
from kernels.linear import Weight, linear
from kernels.native import native
from kernels.panels import IntegerBits, Panels, PanelStack, in_integers
from kernels.scaled_linear import Float8Weight

Held = Weight | Stack
"""One matrix, or those of all experts of a layer."""

Weights = Mapping[str, Held]
"""Weights by name; norms, biases and the embedding are plain."""

_CODED = CodedWeight | CodedStack | Float8Weight

Summed = Weight | ColumnSlices
"""A weight whose product is a sum over columns that ranks may have in part."""


class _Layer:
    """One layer's weights: `[rows, columns]` matrices as `torch.nn.functional.linear` wants them. What its
    family does not have is None."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, rank: int = 0) -> None:
        dtype = TORCH_DTYPES[config.dtype]

        def maybe(name: str) -> Tensor | None:
            key = layer_key(layer, name)
            return _plain(weights[key]).to(dtype) if key in weights else None

        def matrix(name: str) -> Weight:
            return _matrix(weights[layer_key(layer, name)])

        def norm(name: str) -> Tensor | None:
            return None if (weight := maybe(name)) is None else _norm_weight(weight, config)

        self.attention_norm, self.attention_post_norm = norm("attention_norm"), norm("attention_post_norm")
        self.qkv, self.qkv_bias = matrix("qkv"), maybe("qkv_bias")
        q_norm, k_norm = norm("q_norm"), norm("k_norm")
        norms = HeadNorms(q_norm, k_norm, config.norm_eps) if q_norm is not None and k_norm is not None else None
        self.head_norms = norms if config.qk_norm == "head" else None
        self.whole_norms = norms if config.qk_norm == "whole" else None
        self.output: Summed = matrix("output")
        self.output_bias = maybe("output_bias")
        self.mlp_norm, self.mlp_post_norm = norm("mlp_norm"), norm("mlp_post_norm")
        self.mixture: Mixture | list[Mixture] | None = None
        if config.is_mixture(layer):
            self.mixture = _mixture(config, weights, layer, rank)
        if self.mixture is None:
            self.gate_up, self.gate_up_bias = matrix("gate_up"), maybe("gate_up_bias")
            self.down: Summed = matrix("down")
            self.down_bias = maybe("down_bias")
        self.rope = config.layer(layer).rope
        self.options = AttentionOptions(
            window=config.layer(layer).window,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            sinks=maybe("sinks"),
        )

    def divide(self, parts: "Sequence[_Layer]") -> None:
        """Compute each sum over columns in the slices that ranks have, `parts` in their order."""
        self.output = _columns([part.output for part in parts])
        if self.mixture is None:
            self.down = _columns([part.down for part in parts])
        else:
            self.mixture = [part.mixture for part in parts if isinstance(part.mixture, Mixture)]


class Llama:
    """A loaded model, or a rank's part of one: `config` has the heads and widths of that part. `forward` changes
    nothing but the KV rows that `attention` writes. `integer`: the bits of the integers that some of its
    products are taken in, or 0."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ranks: Reduction | None = None,
        slices: Sequence[tuple[ModelConfig, Weights]] = (),
    ) -> None:
        """`ranks` adds up what this rank computes and what the others do; None: there is one. `slices`: what each of so
        many ranks would have, whose products this one adds up as they would."""
        self.config = config
        self._ranks = ranks
        self.integer: IntegerBits = max(
            (item.integer for item in weights.values() if isinstance(item, Panels | PanelStack)), default=0
        )
        dtype = TORCH_DTYPES[config.dtype]
        self.float8_ways = sorted({item.way for item in weights.values() if isinstance(item, Float8Weight)})
        """Some of its products round activations to 8-bit floats."""
        self._embedding = _matrix(weights["embedding"])
        self._norm = _norm_weight(_plain(weights["norm"]).to(dtype), config)
        self._head = _matrix(weights.get("head", self._embedding))
        self.weights_bytes = sum(_held_bytes(weight) for weight in weights.values())
        """What the weights take as they are multiplied with."""
        rank = 0 if ranks is None else ranks.share.rank
        self._layers = [_Layer(config, weights, layer, rank) for layer in range(config.layers)]
        for number, layer in enumerate(self._layers if slices else ()):
            layer.divide([_Layer(part, own, number, at) for at, (part, own) in enumerate(slices)])
        self._split_norms: tuple[WholeNorm, WholeNorm] | None = None
        if config.qk_norm == "whole" and (ranks is not None or slices):
            heads = (config.heads, config.kv_heads) if ranks is None else ranks.heads
            self._split_norms = (
                WholeNorm(heads[0], ranks, len(slices) or 1),
                WholeNorm(heads[1], ranks, len(slices) or 1),
            )
        self._tables = [
            tuple(part.to(self.device) for part in rope_table(config, table, dtype))
            for table in config.ropes
        ]
        # Rounded to the type of what it multiplies, as Gemma's is.
        self._embed_scale = float(torch.tensor(config.embed_scale, dtype=dtype))

    @property
    def device(self) -> torch.device:
        return self._norm.device

    @property
    def table_bytes(self) -> int:
        """The size of the rotary tables, which every process computes for itself."""
        return sum(int(part.nbytes) for table in self._tables for part in table)

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
            wanted = norm_rows(rows, self._norm, self.config.norm_eps)
            product = linear(wanted, self._head)
        if self._ranks is not None:
            product = self._ranks.gathered(product.float())
            if self._ranks.share.rank:
                return product  # rank 0 has the whole rows, and draws
        wide = product.float() if out is None else out.copy_(product)
        self._finish(wide)
        return wide

    def _finish(self, logits: Tensor) -> None:
        config = self.config
        if config.logit_scale != 1.0:
            logits *= config.logit_scale
        if config.final_softcap:
            logits.div_(config.final_softcap).tanh_().mul_(config.final_softcap)
        if config.drawable:
            logits[:, config.drawable :] = -math.inf

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, kv: KVTensors, attention: AttentionBackend) -> Tensor:
        """Return what the last layer leaves of every row, `[padded rows, hidden]`; see `forward`."""
        rotations = [Rotation(cos, sin, batch.positions) for cos, sin in self._tables]
        temperature = self._temperature(batch.positions)
        x = self._embedded(batch.tokens)
        if self._embed_scale != 1.0:
            x *= self._embed_scale
        delta: Tensor | None = None
        places = kv.layout.places
        for number, layer in enumerate(self._layers):
            group, at = places[number]
            rotation = None if layer.rope is None else rotations[layer.rope]
            normed = self._normed(x, delta, layer.attention_norm, attention)
            qkv = self._qkv(normed, layer, attention)
            if temperature is not None:
                qkv[:, : self.config.heads] *= temperature
            given = LayerInput(at, qkv, rotation, batch, kv, layer.head_norms, layer.options, group)
            delta = self._summed(attention.attend(given), layer.output, layer.output_bias)
            delta = self._branch(delta, layer.attention_post_norm, attention)
            normed = self._normed(x, delta, layer.mlp_norm, attention)
            if layer.mixture is not None:
                delta = self._mixed(normed, layer.mixture, attention)
            else:
                gate_up = linear(normed, layer.gate_up, layer.gate_up_bias)
                delta = self._summed(attention.gate(gate_up, self.config.activation), layer.down, layer.down_bias)
            delta = self._branch(delta, layer.mlp_post_norm, attention)
        return x if delta is None else x.add_(delta)

    def _temperature(self, positions: Tensor) -> Tensor | None:
        """Return the factor of each row's queries, `[rows, 1, 1]`. It commutes with their rotation."""
        if not self.config.query_beta:
            return None
        periods = torch.div(positions, self.config.query_tokens, rounding_mode="floor")
        factors = 1.0 + self.config.query_beta * torch.log1p(periods.float())
        return factors.to(TORCH_DTYPES[self.config.dtype])[:, None, None]

    def _embedded(self, tokens: Tensor) -> Tensor:
        if self._ranks is None:
            return self._rows(tokens)
        return embedded(self._ranks, tokens, self._rows, self.config.vocab)

    def _rows(self, tokens: Tensor) -> Tensor:
        embedding, dtype = self._embedding, TORCH_DTYPES[self.config.dtype]
        if isinstance(embedding, Panels | Float8Weight):
            raise TypeError("rows of an embedding are not read from what is multiplied with")
        if isinstance(embedding, CodedWeight):
            return embedding.lookup(tokens, dtype)
        return embedding[tokens].to(dtype)

    def _summed(self, x: Tensor, weight: Summed, bias: Tensor | None) -> Tensor:
        """Return the product of all columns, whoever has them. A bias is added once, to the sum."""
        if isinstance(weight, ColumnSlices):
            return weight.product(x, bias)
        if self._ranks is None:
            return linear(x, weight, bias)
        total = self._ranks.sum(linear(x, weight))
        return total if bias is None else total.add_(bias)

    def _mixed(self, x: Tensor, mixture: Mixture | list[Mixture], attention: AttentionBackend) -> Tensor:
        if isinstance(mixture, list):
            return add_in_order([attention.mix(x, part) for part in mixture])
        mixed = attention.mix(x, mixture)
        return mixed if self._ranks is None else self._ranks.sum(mixed)

    def _normed(self, x: Tensor, delta: Tensor | None, norm: Tensor | None, attention: AttentionBackend) -> Tensor:
        """Add `delta` to `x` in place; return what the next product reads: the norm of the sum, or the sum."""
        if norm is not None:
            return attention.norm(x, delta, norm, self.config.norm_eps)
        return x if delta is None else x.add_(delta)

    def _branch(self, delta: Tensor, norm: Tensor | None, attention: AttentionBackend) -> Tensor:
        """Return what attention or a feed-forward layer adds to the residual stream."""
        if norm is not None:
            delta = attention.norm(delta, None, norm, self.config.norm_eps)
        return delta if self.config.residual_scale == 1.0 else delta.mul_(self.config.residual_scale)

    def _qkv(self, normed: Tensor, layer: _Layer, attention: AttentionBackend) -> Tensor:
        """Return queries, keys and values of every row, `[rows, heads + 2 * kv_heads, head_dim]`."""
        qkv = linear(normed, layer.qkv, layer.qkv_bias)
        if layer.whole_norms is not None:
            q_norm, k_norm, eps = layer.whole_norms
            q, k, v = qkv.split([len(q_norm), len(k_norm), self.config.kv_rows], 1)
            if self._split_norms is not None:
                q_split, k_split = self._split_norms
                q, k = q_split(q, q_norm, eps, self.config.head_dim), k_split(k, k_norm, eps, self.config.head_dim)
                return torch.cat([q, k, v], 1).view(len(normed), -1, self.config.head_dim)
            q = attention.norm(q.contiguous(), None, q_norm, eps)
            qkv = torch.cat([q, attention.norm(k.contiguous(), None, k_norm, eps), v], 1)
        return qkv.view(len(normed), -1, self.config.head_dim)

    def layer_of_each_kind(self) -> "Llama":
        """Return a model of this one's first layer of each kind, by its options and whether it has experts, and its
        output matrix: its shapes, at a fraction of the work. Of a rank's part it is a model of its own, which asks
        nothing of the others."""
        numbers = range(self.config.layers)
        kinds = {(self.config.layer(at), self._layers[at].mixture is None): at for at in reversed(numbers)}
        chosen = sorted(kinds.values())
        options = tuple(self.config.layer(at) for at in chosen)
        short = copy(self)
        vocab = self.config.vocab if self._ranks is None else self._embedding.shape[0]
        short.config = msgspec.structs.replace(self.config, layers=len(chosen), layer_options=options, vocab=vocab)
        short._ranks = short._split_norms = None
        short._layers = [self._layers[at] for at in chosen]
        return short


def load_model(
    model_dir: Path,
    packed: bool = True,
    device: torch.device | str = "cpu",
    panels: bool = False,
    integer: IntegerBits = 0,
    coded: bool = False,
    progress: Progress | None = None,
    ranks: Reduction | None = None,
    sum_slices: int = 1,
    float8: bool = False,
) -> Llama:
    """Load a prepared model's weights and build the model on them. On the CPU they are mapped: no copy, pages shared by
    all workers of the host. With `packed`, its matrices are those packed for this processor, made by the first process
    that needs them. `panels`: matrices in panels instead, for the native kernels, with `integer` to be multiplied in
    integers of so many bits; `coded`: as they are kept, for Triton's interpreter. Another `device` gets a copy of what
    is kept, streamed from its files; `progress` hears of it.

    `ranks`: load only what this rank has of the model, and let it add up sums with the others. `sum_slices`: load all
    of it, but compute sums in the slices in which so many ranks would, on the CPU. `float8`: multiply matrices in 8-bit
    floats with activations that are rounded to them (`engine.model.prepared.float8`).

    Raises ModelError where the folder is not whole or its family is not one of this file's, ValueError for panels of
    a model in another dtype than float32, for a model that cannot be divided so, for parts of one that is prepared by
    reference, and where `float8` cannot be had.
    """
    config = ModelConfig.load(model_dir)
    if config.family not in FAMILIES:
        raise ModelError(model_dir, f"unknown family {config.family!r}")
    if panels and config.dtype != "float32":
        raise ValueError(f"panels are for float32, not {config.dtype}")
    device = torch.device(device)
    if (ranks is not None or sum_slices > 1) and by_reference(model_dir):
        raise ValueError(f"a rank's part is of a model that is prepared as a whole, which {model_dir} is not")
    if sum_slices > 1 and device.type != "cpu":
        raise ValueError(f"slices are computed on the CPU, not on {device}")
    if ranks is not None:
        config, part = _part(model_dir, config, ranks.share, panels, integer)
        return Llama(config, part if device.type == "cpu" else _copied(part, device, TORCH_DTYPES[config.dtype]), ranks)
    slices = [
        _part(model_dir, config, Share(at, sum_slices), panels, integer)
        for at in range(sum_slices if sum_slices > 1 else 0)
    ]
    if device.type != "cpu" or by_reference(model_dir):
        weights, digests = load_weights(model_dir, device, progress)
        # The rows of an embedding are read; where it is the output matrix too, only that is multiplied with.
        multiplied = {"head": weights["embedding"], **weights}
        del multiplied["embedding"]
        own = float8_weights(multiplied, device, TORCH_DTYPES[config.dtype]) if float8 else {}
        config = msgspec.structs.replace(config, fingerprint=fingerprint_of(config.fingerprint, digests))
        return Llama(config, {**weights, **own})
    mapped = PreparedWeights(model_dir)
    found: Weights
    if panels:
        found = _panels(model_dir, mapped, integer)
    elif coded:
        found = mapped.multiplied()
    else:
        fast = packed_weights(model_dir, mapped) if packed else {}
        found = fast | wide_weights(model_dir, mapped, fast)
    own = float8_weights(mapped.multiplied_as_stored(), device, mapped.dtype) if float8 else {}
    return Llama(config, {**mapped.others(), **found, **own}, slices=slices)


def _panels(model_dir: Path, mapped: PreparedWeights, integer: IntegerBits) -> dict[str, Panels | PanelStack]:
    found = panel_weights(model_dir, mapped)
    return {name: in_integers(weight, integer) for name, weight in found.items()} if integer else found


def _part(
    model_dir: Path, config: ModelConfig, share: Share, panels: bool, integer: IntegerBits
) -> tuple[ModelConfig, Weights]:
    """Return a rank's part of a model, and its sizes. Raises ValueError where the model cannot be divided so."""
    check_split(config, share.ranks)
    mapped = PartWeights(model_dir, share)
    if panels:
        return local_config(config, share), {**mapped.others(), **_panels(model_dir, mapped, integer)}
    multiplied = {name: mapped[key] for name, key in mapped.matrices().items()}
    return local_config(config, share), {**mapped.others(), **multiplied}


def _copied(weights: Weights, device: torch.device, dtype: torch.dtype) -> Weights:
    """Return a rank's part on its device, in `dtype`: codes are widened."""

    def copied(weight: Held) -> Tensor:
        if isinstance(weight, CodedWeight):
            weight = widened(weight, dtype)
        if not isinstance(weight, Tensor):
            raise TypeError(f"a {type(weight).__name__} is not copied to {device}")
        return weight.to(device, dtype)

    return {name: copied(weight) for name, weight in weights.items()}


def _columns(parts: Sequence[Summed]) -> ColumnSlices:
    """Return a weight of these slices of columns."""
    weights = [_whole(part) for part in parts]
    return ColumnSlices(weights, [weight.shape[1] for weight in weights])


def _whole(weight: Summed) -> Weight:
    if isinstance(weight, ColumnSlices):
        raise TypeError("a slice of columns is not cut again")
    return weight


def _mixture(config: ModelConfig, weights: Weights, layer: int, rank: int) -> Mixture | None:
    """The first rank's answers have the bias of the sum."""
    options = config.experts
    if options is None:
        return None

    def find(name: str) -> Held:
        return weights[layer_key(layer, name)]

    def bias(name: str) -> Tensor | None:
        return _plain(find(name)) if options.biases else None

    router, router_bias = _matrix(find("router")), bias("router_bias")
    gate_up, down = find("experts_gate_up"), find("experts_down")
    alone = Panels | CodedWeight | Float8Weight
    if isinstance(gate_up, alone) or isinstance(down, alone):
        raise TypeError("the experts of a layer are in one stack")
    down_bias = bias("experts_down_bias")
    if down_bias is not None and rank:
        down_bias = torch.zeros_like(down_bias)
    clamp = ClampedGate(options.alpha, options.limit) if options.limit else None
    return Mixture(
        router.float() if isinstance(router, Tensor) else router,
        None if router_bias is None else router_bias.float(),
        Routing(options.chosen, options.over_chosen, options.normalise),
        ExpertWeights(gate_up, down, bias("experts_gate_up_bias"), down_bias, clamp),
    )


def _held_bytes(weight: Held) -> int:
    if isinstance(weight, Panels | PanelStack):
        return int(weight.raw.nbytes)
    return weight.nbytes if isinstance(weight, _CODED) else weight.numel() * weight.element_size()


def _matrix(weight: Held) -> Weight:
    if isinstance(weight, PanelStack | CodedStack):
        raise TypeError("one matrix is not in a stack of several")
    return weight


def _plain(weight: Held) -> Tensor:
    if not isinstance(weight, Tensor):
        raise TypeError("only matrices that are multiplied with can be in panels or codes")
    return weight


def _norm_weight(weight: Tensor, config: ModelConfig) -> Tensor:
    """With an offset, in 32 bits: the sum would lose bits of the weight in the type of 16."""
    return weight.float() + config.norm_offset if config.norm_offset else weight

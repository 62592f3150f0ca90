"""The shape of a decoder-only model: sizes, rotary embedding, options. No torch, no files but its own JSON."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from engine.kv.groups import layer_groups
from engine.kv.layout import KVLayout
from engine.messages import guarded

CONFIG_FILE = "config.json"

Progress = Callable[[int, int], None]
"""Bytes done, and bytes in all."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of weights that run code when they are loaded: refused, never opened."""


class ModelError(Exception):
    """A model that cannot be used; the message names the file, and the tensor or field at fault."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = str(path)
        self.problem = problem


def layer_count(path: Path, layers: int) -> int:
    """Return it. Raises ModelError where no model has so many: whatever is made for each layer would not end."""
    if not 1 <= layers <= MOST_LAYERS:
        raise ModelError(path, f"layers is {layers}, must be 1 to {MOST_LAYERS}")
    return layers


_Read = TypeVar("_Read")


def read_prepared(path: Path, kind: type[_Read]) -> _Read:
    """Read and decode a JSON file of a prepared model. Raises ModelError."""
    try:
        return guarded(msgspec.json.Decoder(kind).decode)(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(path, f"not a prepared model: {error}") from error


class Llama3Rope(msgspec.Struct, frozen=True, tag="llama3", kw_only=True):
    """Llama 3.1's stretching of the low frequencies only (Llama 3 technical report, 3.4.3)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


class LinearRope(msgspec.Struct, frozen=True, tag="linear", kw_only=True):
    """Position interpolation (arXiv 2306.15595): every frequency is divided by `factor`."""

    factor: float


class FactorsRope(msgspec.Struct, frozen=True, tag="factors", kw_only=True):
    """One divisor per frequency: how GGUF files store any scaling that they have worked out beforehand."""

    factors: tuple[float, ...]


class YarnRope(msgspec.Struct, frozen=True, tag="yarn", kw_only=True):
    """YaRN (arXiv 2309.00071): frequencies of few turns within the original context are divided by `factor`, those of
    many are kept, and a ramp joins them. `truncate`: the ramp begins and ends at whole dimensions."""

    factor: float
    original_context_tokens: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class LongRope(msgspec.Struct, frozen=True, tag="longrope", kw_only=True):
    """LongRoPE (arXiv 2402.13753): one divisor per frequency, from `long` where the model's context exceeds the
    original one, else from `short`. The choice is the deployment's, never a sequence's: cached keys do not depend on
    what follows."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context_tokens: int

    def factors(self, context_tokens: int) -> tuple[float, ...]:
        return self.long if context_tokens > self.original_context_tokens else self.short


MOST_LAYERS = 10_000
MOST_CONTEXT_TOKENS = 1 << 24
"""Rotary tables have a row for each: a worker would not come to an end of many more."""
MOST_EXPERTS = 10_000
_SIZES = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context_tokens")

RopeScaling = Llama3Rope | LinearRope | FactorsRope | YarnRope | LongRope

QKNorm = Literal["", "head", "whole"]
"""Queries and keys are RMS-normed before they are rotated: head by head (Qwen3), or all heads as one row (OLMo 2)."""

Activation = Literal["silu", "gelu_tanh"]
"""The gate of a feed-forward layer: silu, or GELU by its tanh (arXiv 1606.08415, section 2)."""


class RopeTable(msgspec.Struct, frozen=True, kw_only=True):
    """One rotary embedding. `dims`: how many of a head's first dimensions turn, in halves of that; 0: all. `scale`
    multiplies cosines and sines, so that it is in the cached keys (YaRN's attention factor)."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    dims: int = 0
    scale: float = 1.0


class LayerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer's attention does otherwise than the next. `window`: how many keys a query sees, its own included;
    0: all. `rope`: the number of its rotary table; None: nothing is rotated."""

    window: int = 0
    rope: int | None = 0


PLAIN_LAYER = LayerOptions()


class ExpertOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts for a feed-forward layer (`kernels.experts`): each row goes to `chosen` of `count` networks
    of `width`. Its weights are a softmax over all logits, or `over_chosen` over those chosen; with `normalise` they
    are divided by their sum."""

    count: int
    chosen: int
    width: int
    over_chosen: bool = False
    normalise: bool = False
    biases: bool = False
    """The router and the experts have some."""
    alpha: float = 0.0
    limit: float = 0.0
    """gpt-oss's gate, clamped at `limit`; 0: the model's activation."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain feed-forward network after all."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the weights. `name` and `fingerprint` (weights and dtype) are set when a model is prepared."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_tokens: int
    norm_eps: float
    ropes: tuple[RopeTable, ...] = (RopeTable(),)
    """The rotary tables that layers choose from."""
    layer_options: tuple[LayerOptions, ...] = ()
    """One for each layer; empty: all layers are plain."""
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = ""
    norm_offset: float = 0.0
    """Added to the weights of all norms (Gemma's are kept as differences from one)."""
    activation: Activation = "silu"
    attention_scale: float | None = None
    """The factor of scores; None: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """Scores s become cap * tanh(s / cap); 0: they are left alone."""
    query_beta: float = 0.0
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / `query_tokens`)), as Ministral 3's are."""
    query_tokens: int = 0
    sinks: bool = False
    """Each head has one more logit in its softmax, without a value."""
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    """The factor of what attention and feed-forward layers add to the residual stream."""
    logit_scale: float = 1.0
    final_softcap: float = 0.0
    """As `attention_softcap`, of logits."""
    experts: ExpertOptions | None = None
    drawable: int = 0
    """Ids from here on are of no token, since matrices have more rows than the tokenizer: they are never drawn. 0: all
    may be."""
    dtype: str = "float32"
    name: str = ""
    fingerprint: str = ""

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_rows(self) -> int:
        return self.q_rows + 2 * self.kv_rows

    @property
    def gate_up_rows(self) -> int:
        return 2 * self.intermediate

    @property
    def expert_count(self) -> int:
        return self.experts.count if self.experts else 0

    @property
    def expert_width(self) -> int:
        return self.experts.width if self.experts else 0

    @property
    def expert_biases(self) -> bool:
        return self.experts is not None and self.experts.biases

    def is_mixture(self, layer: int) -> bool:
        """Say whether a layer has experts in the place of one feed-forward network."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def layer(self, number: int) -> LayerOptions:
        return self.layer_options[number] if self.layer_options else PLAIN_LAYER

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows that layers have, each once and in order; 0 is none."""
        return tuple(sorted({self.layer(number).window for number in range(self.layers)}))

    def rotary_dims(self, table: RopeTable) -> int:
        return table.dims or self.head_dim

    def kv_layout(self, block_size: int, dtype: str | None = None, grouped: bool = False) -> KVLayout:
        """Return the layout in which a pool keeps the model's KV: in `dtype`, or in the one that the model computes
        in. `grouped`: layers of different windows apart (docs/layer-groups.md)."""
        groups = layer_groups([self.layer(number).window for number in range(self.layers)]) if grouped else ()
        return KVLayout(
            kv_heads=self.kv_heads,
            layers=len(groups[0].layers) if groups else self.layers,
            groups=groups,
            block_size=block_size,
            head_dim=self.head_dim,
            dtype=dtype or self.dtype,
        )

    def without_idle_windows(self) -> "ModelConfig":
        """Return the same without windows that hold all of the context, as of the Phi-3 models for long ones: what a
        window costs is for nothing there."""
        options = tuple(
            msgspec.structs.replace(layer, window=0) if layer.window >= self.context_tokens else layer
            for layer in self.layer_options
        )
        is_plain = all(layer == PLAIN_LAYER for layer in options)
        return msgspec.structs.replace(self, layer_options=() if is_plain else options)

    def check(self, path: Path) -> "ModelConfig":
        """Return itself, or raise ModelError where the sizes cannot be those of a model."""
        layer_count(path, self.layers)
        for field in _SIZES:
            if getattr(self, field) < 1:
                raise ModelError(path, f"{field} is {getattr(self, field)}, must be at least 1")
        if self.context_tokens > MOST_CONTEXT_TOKENS:
            raise ModelError(path, f"context_tokens is {self.context_tokens}, must be at most {MOST_CONTEXT_TOKENS}")
        _check_numbers(path, self)
        if self.norm_eps <= 0:
            raise ModelError(path, f"norm_eps is {self.norm_eps}, must be above 0")
        if self.heads % self.kv_heads:
            raise ModelError(path, f"{self.heads} heads do not divide by {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(path, f"head_dim is {self.head_dim}, must be even")
        if not self.ropes:
            raise ModelError(path, "has no rotary table")
        for table in self.ropes:
            self._check_rope(path, table)
        if self.layer_options and len(self.layer_options) != self.layers:
            raise ModelError(path, f"options of {len(self.layer_options)} layers, of {self.layers}")
        for options in self.layer_options:
            if options.window < 0 or (options.rope is not None and not 0 <= options.rope < len(self.ropes)):
                raise ModelError(path, f"a layer has window {options.window} and rotary table {options.rope}")
        if self.experts is not None:
            self._check_experts(path, self.experts)
        if self.query_beta and self.query_tokens < 1:
            raise ModelError(path, f"a temperature of queries by each {self.query_tokens} positions")
        if not 0 <= self.drawable <= self.vocab:
            raise ModelError(path, f"{self.drawable} of {self.vocab} ids can be drawn")
        return self

    def _check_experts(self, path: Path, experts: ExpertOptions) -> None:
        _check_numbers(path, experts)
        if experts.width < 1 or not 1 <= experts.chosen <= experts.count <= MOST_EXPERTS:
            raise ModelError(path, f"{experts.chosen} of {experts.count} experts of width {experts.width}")
        if self.activation != "silu":
            raise ModelError(path, f"experts with activation {self.activation} are not supported")

    def _check_rope(self, path: Path, table: RopeTable) -> None:
        dims = self.rotary_dims(table)
        if dims % 2 or not 0 < dims <= self.head_dim:
            raise ModelError(path, f"{dims} dimensions of a head of {self.head_dim} are rotated: must be even")
        _check_numbers(path, table)
        if table.theta <= 1 or table.scale <= 0:
            raise ModelError(path, f"a rotary table has theta {table.theta} and scale {table.scale}")
        if isinstance(table.scaling, LinearRope | Llama3Rope | YarnRope):
            _check_scaling(path, table.scaling)
        given: tuple[tuple[float, ...], ...] = ()
        match scaling := table.scaling:
            case FactorsRope():
                given = (scaling.factors,)
            case LongRope():
                given = (scaling.short, scaling.long)
        for factors in given:
            if len(factors) != dims // 2 or not all(0 < factor < math.inf for factor in factors):
                raise ModelError(path, f"{len(factors)} rope factors for {dims} rotated dimensions, or one not above 0")

    @staticmethod
    def load(model_dir: Path) -> "ModelConfig":
        """Read a prepared model's configuration. Raises ModelError."""
        return read_prepared(model_dir / CONFIG_FILE, ModelConfig)


def _check_numbers(path: Path, said: msgspec.Struct) -> None:
    """Raise ModelError for a field that is NaN or without end."""
    for field, value in msgspec.structs.asdict(said).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelError(path, f"{field} is {value}, not a finite number")


def _check_scaling(path: Path, scaling: LinearRope | Llama3Rope | YarnRope) -> None:
    """Raise ModelError for a scaling by which frequencies are no numbers."""
    _check_numbers(path, scaling)
    match scaling:
        case Llama3Rope():
            is_sound = scaling.original_context_tokens > 0 and 0 < scaling.low_freq_factor < scaling.high_freq_factor
        case YarnRope():
            is_sound = scaling.original_context_tokens > 0 and 0 < scaling.beta_slow <= scaling.beta_fast
        case LinearRope():
            is_sound = True
    if not is_sound or scaling.factor <= 0:
        raise ModelError(path, f"a rope scaling makes no frequencies: {scaling}")

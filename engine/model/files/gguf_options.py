"""What the families' GGUF files say beside sizes: which layers see how far, what they rotate, and factors.

Some of it is in no file, but in the programs that read them: it is a constant of the family here too. A field that
would change answers, and that is not obeyed, is refused.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.model.config import FactorsRope, LayerOptions, LinearRope, LongRope, ModelError, RopeTable, YarnRope
from engine.model.files.gguf_reader import GGUFFile
from engine.model.files.hf_rope import yarn_scale

log = logging.getLogger(__name__)

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

Options = dict[str, Any]


class HeaderSizes(NamedTuple):
    """What of a model's sizes its options depend on."""

    layers: int
    hidden: int
    heads: int
    head_dim: int
    vocab: int


def family_options(file: GGUFFile, architecture: str, sizes: HeaderSizes) -> Options:
    """Return the fields of a `ModelConfig` that only some families set. Raises ModelError."""
    metadata = _Metadata(file, architecture)
    table = _rope_table(file, metadata, sizes.head_dim)
    found = _READERS.get(architecture, _plain)(metadata, sizes, table)
    of_all = {"rope.freq_base_swa": (table.theta,), "rope.dimension_count_swa": (table.dims or sizes.head_dim,)}
    of_all |= dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), (sizes.head_dim,))
    softmax = {"expert_gating_func": (0, 3 if architecture == "gpt-oss" else 1)}
    for key, plain in (_PLAIN | of_all | softmax).items():
        metadata.check_plain(key, plain)
    return found


_PLAIN: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "attention.output_scale"), (0, 1)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.attn_factor"), (0, 1)),
    "attention.causal": (1,),
}
_PLAIN |= dict.fromkeys(
    (
        "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "attention.scale",
        "attention.temperature_scale", "attention.sliding_window_pattern", "attention.clamp_kqv",
        "attention.max_alibi_bias", "attention.shared_kv_layers", "attention.kv_lora_rank", "use_parallel_residual",
        "swiglu_clamp_exp", "rope.dimension_sections",
    ),
    (0,),
)  # fmt: skip
"""Keys that change answers, with the values at which they change none: all that a family may say of those that its
reader does not ask for."""


class _Metadata:
    """The metadata of one architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self._prefix = architecture

    def name(self, key: str) -> str:
        return f"{self._prefix}.{key}"

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.get(self.name(key), default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(self.file.path, f"metadata {self.name(key)} is {value!r}, not a number")
        if not math.isfinite(value):
            raise ModelError(self.file.path, f"metadata {self.name(key)} is {value}, not a finite number")
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        if (value := self.number(key, default)) != int(value):
            raise ModelError(self.file.path, f"metadata {self.name(key)} is {value!r}, not a whole number")
        return int(value)

    def factor(self, key: str, default: float) -> float:
        if (value := self.number(key, default)) <= 0:
            raise ModelError(self.file.path, f"metadata {self.name(key)} is {value}, not a number above 0")
        return value

    def check_plain(self, key: str, plain: tuple[float, ...]) -> None:
        """Raise ModelError for a key that the family's reader has passed over, and that is not one of these values."""
        name = self.name(key)
        if self.file.was_asked(name) or (value := self.file.get(name)) is None:
            return
        if not set(value if isinstance(value, list) else [value]) <= set(plain):
            raise ModelError(self.file.path, f"metadata {name} is {value!r}, which is not known of this family")

    def cap(self, key: str, default: float) -> float:
        """Return a factor that 0 leaves out, as its writers mean it."""
        return 0.0 if self.number(key, default) == 0 else self.factor(key, default)

    def rope_scaling(self) -> tuple[object, float]:
        """Return the kind and its factor. A factor without a kind is a linear one, and stood under another key once."""
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 0.0))
        kind = self.file.get(self.name("rope.scaling.type"), "linear" if factor not in (0, 1) else "none")
        if kind in ("linear", "yarn"):
            self.number("rope.scaling.factor", factor or None)
        return kind, factor

    def window(self, default: int | None = None) -> int:
        if (window := self.whole("attention.sliding_window", default)) < 0:
            raise ModelError(self.file.path, f"metadata {self.name('attention.sliding_window')} is {window}")
        return window

    def windows(self, layers: int, every: int, window: int) -> list[int]:
        """Return each layer's window: by the file's pattern, or in all layers but each `every`th."""
        pattern = self.file.get(self.name("attention.sliding_window_pattern"))
        if isinstance(pattern, list):
            if len(pattern) != layers or not set(pattern) <= {0, 1}:
                raise ModelError(self.file.path, f"a pattern of windows for {len(pattern)} layers, of {layers}")
            return [window if local else 0 for local in pattern]
        if pattern is not None and (isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 0):
            raise ModelError(self.file.path, f"metadata {self.name('attention.sliding_window_pattern')} is {pattern!r}")
        every = pattern or every
        return [window if (at + 1) % every else 0 for at in range(layers)]


_WHOLE_FACTORS = ("attn_factor", "yarn_attn_factor")
"""Where OLMo 3's files have what config.json calls `attention_factor`: all of it. Other families' readers multiply it
with YaRN's own, so that nobody knows what a file means."""


def _rope_table(file: GGUFFile, metadata: _Metadata, head_dim: int) -> RopeTable:
    dims = metadata.whole("rope.dimension_count", head_dim)
    table = RopeTable(
        theta=metadata.number("rope.freq_base", 10000.0), dims=0 if dims == head_dim else dims
    )
    kind, factor = metadata.rope_scaling()
    if ROPE_FACTORS in file and kind == "none":
        return msgspec.structs.replace(table, scaling=FactorsRope(factors=_factors(file, ROPE_FACTORS)))
    if LONG_FACTORS in file and kind in ("none", "longrope"):
        scaling = LongRope(
            short=_factors(file, SHORT_FACTORS),
            long=_factors(file, LONG_FACTORS),
            original_context_tokens=metadata.whole("rope.scaling.original_context_length"),
        )
        return msgspec.structs.replace(table, scaling=scaling, scale=metadata.number("rope.scaling.attn_factor", 1.0))
    for factors in (ROPE_FACTORS, LONG_FACTORS):
        if factors in file:
            raise ModelError(file.path, f"rope scaling {kind!r} beside tensor {factors} is not supported")
    if kind == "none":
        return table
    if kind not in ("linear", "yarn"):
        raise ModelError(file.path, f"rope scaling {kind!r} is not supported")
    if kind == "linear":
        return msgspec.structs.replace(table, scaling=LinearRope(factor=factor))
    scale = yarn_scale(factor)
    if metadata.name("") == "mistral3.":  # what config.json calls mscale_all_dim, where mscale is 1
        scale /= yarn_scale(factor, metadata.number("rope.scaling.yarn_log_multiplier", 0.0))
    for key in ("attn_factor", "yarn_attn_factor", "yarn_log_multiplier", "yarn_ext_factor"):
        if file.get(metadata.name(f"rope.scaling.{key}")) is None:
            continue
        if (metadata.name(""), key) == ("mistral3.", "yarn_log_multiplier"):
            continue
        if metadata.name("") == "olmo2." and key in _WHOLE_FACTORS:
            scale = metadata.number(f"rope.scaling.{key}")
        else:
            raise ModelError(file.path, f"metadata {metadata.name('rope.scaling')}.{key} is not supported")
    yarn = YarnRope(
        factor=factor,
        original_context_tokens=metadata.whole("rope.scaling.original_context_length"),
        beta_fast=metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.number("rope.scaling.yarn_beta_slow", 1.0),
    )
    return msgspec.structs.replace(table, scaling=yarn, scale=scale)


def _mistral3(metadata: _Metadata, sizes: HeaderSizes, table: RopeTable) -> Options:
    """Ministral 3's queries have a temperature by their position; those of Mistral Small, which has the same name, have
    none."""
    options = _plain(metadata, sizes, table)
    if beta := metadata.cap("attention.temperature_scale", 0.0):
        return options | {
            "query_beta": beta,
            "query_tokens": metadata.whole("rope.scaling.original_context_length"),
        }
    return options


def _factors(file: GGUFFile, name: str) -> tuple[float, ...]:
    return tuple(np.asarray(file.rows(name).values(0, file.shape(name)[0]), dtype=np.float64).ravel().tolist())


def _layers(table: RopeTable, windows: Sequence[int]) -> Options:
    return {"ropes": (table,), "layer_options": tuple(LayerOptions(window=w) for w in windows) if any(windows) else ()}


def _plain(metadata: _Metadata, sizes: HeaderSizes, table: RopeTable) -> Options:
    if window := metadata.window(0):
        name = metadata.name("attention.sliding_window")
        raise ModelError(metadata.file.path, f"metadata {name} {window} is not known of this family")
    return _layers(table, ())


_FIRST_MISTRAL = {"context_length": 32768, "feed_forward_length": 14336}


def _llama(metadata: _Metadata, sizes: HeaderSizes, table: RopeTable) -> Options:
    """Llama's have no window. Mistral's say that they are Llama's, and the converter has dropped the window that the
    first of them, 7B v0.1, was trained with: it is told by its sizes."""
    window = metadata.window(0)
    is_first_mistral = (
        (sizes.layers, sizes.hidden, sizes.heads, table.theta) == (32, 4096, 32, 10000.0)
        and all(metadata.number(key, 0) == value for key, value in _FIRST_MISTRAL.items())
        and sizes.vocab < 32768
    )
    if not window and is_first_mistral:
        log.warning("%s: of the sizes of Mistral 7B v0.1, so run with its window of 4096 tokens", metadata.file.path)
        window = 4096
    return _layers(table, [window] * sizes.layers)


def _granite(metadata: _Metadata, sizes: HeaderSizes, table: RopeTable) -> Options:
    return _plain(metadata, sizes, table) | {
        "embed_scale": metadata.factor("embedding_scale", 1.0),
        "residual_scale": metadata.factor("residual_scale", 1.0),
        "attention_scale": metadata.factor("attention.scale", sizes.head_dim**-0.5),
        "logit_scale": 1.0 / metadata.factor("logit_scale", 1.0),
    }


def _smollm3(metadata: _Metadata, sizes: HeaderSizes, table: RopeTable) -> Options:
    """Each fourth layer rotates nothing: a constant of the family."""
    options = tuple(LayerOptions(rope=0 if (at + 1) % 4 else None) for at in range(sizes.layers))
    return _plain(metadata, sizes, table) | {"layer_options": options}


def _phi3(metadata: _Metadata, sizes: HeaderSizes, table: RopeTable) -> Options:
    """A file without the field is older than it, and may be of a model with a window."""
    return _layers(table, [metadata.window()] * sizes.layers)


def _gemma(metadata: _Metadata, sizes: HeaderSizes, layers_of_27b: int) -> Options:
    """Queries of the 27B models are scaled as if their heads shared `hidden`: no file says so."""
    width = sizes.hidden / sizes.heads if sizes.layers == layers_of_27b else sizes.head_dim
    return {"embed_scale": float(sizes.hidden) ** 0.5, "attention_scale": float(width) ** -0.5}


def _gemma2(metadata: _Metadata, sizes: HeaderSizes, table: RopeTable) -> Options:
    return {
        **_layers(table, metadata.windows(sizes.layers, 2, metadata.window(4096))),
        **_gemma(metadata, sizes, 46),
        "attention_softcap": metadata.cap("attn_logit_softcapping", 50.0),
        "final_softcap": metadata.cap("final_logit_softcapping", 30.0),
    }


def _gpt_oss(metadata: _Metadata, sizes: HeaderSizes, table: RopeTable) -> Options:
    """The ramp of its rotary table has no whole ends: no file says so."""
    if isinstance(table.scaling, YarnRope):
        table = msgspec.structs.replace(table, scaling=msgspec.structs.replace(table.scaling, truncate=False))
    return _layers(table, metadata.windows(sizes.layers, 2, metadata.window(128))) | {"sinks": True}


def _gemma3(metadata: _Metadata, sizes: HeaderSizes, table: RopeTable) -> Options:
    """Five local layers to a global one, which alone is scaled; local ones have a theta of their own."""
    windows = metadata.windows(sizes.layers, 6, metadata.window())
    local = RopeTable(theta=metadata.number("rope.freq_base_swa", 10000.0), dims=table.dims)
    return {
        "ropes": (table, local),
        "layer_options": tuple(LayerOptions(window=window, rope=1 if window else 0) for window in windows),
        "final_softcap": metadata.cap("final_logit_softcapping", 0.0),
        **_gemma(metadata, sizes, 62),
    }


def _olmo2(metadata: _Metadata, sizes: HeaderSizes, table: RopeTable) -> Options:
    """OLMo 3's files have a window, for three of four layers; only the others are scaled."""
    if not (window := metadata.window(0)):
        return _layers(table, ())
    windows = metadata.windows(sizes.layers, 4, window)
    if table.scaling is None:
        return _layers(table, windows)
    local = msgspec.structs.replace(table, scaling=None, scale=1.0)
    options = tuple(LayerOptions(window=window, rope=1 if window else 0) for window in windows)
    return {"ropes": (table, local), "layer_options": options}


_READERS: dict[str, Callable[[_Metadata, HeaderSizes, RopeTable], Options]] = {
    "llama": _llama,
    "mistral3": _mistral3,
    "qwen2": _plain,
    "qwen3": _plain,
    "qwen3moe": _plain,
    "granite": _granite,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gpt-oss": _gpt_oss,
    "gemma3": _gemma3,
    "olmo2": _olmo2,
}

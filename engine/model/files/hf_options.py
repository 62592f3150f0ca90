"""What the families' config.json files say beside sizes: which layers see how far, what they rotate, and factors.

A field that would change answers, and that is not obeyed, is refused.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.model.config import LayerOptions, ModelError, RopeTable
from engine.model.files.checkpoint import factor, flag, interval, whole
from engine.model.files.hf_rope import FULL, LAYER_TYPES, SLIDING, Parameters, rope_parameters, rope_table

Raw = dict[str, Any]
Options = dict[str, Any]

DEFAULTS: dict[str, Raw] = {
    "gemma3": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    "gemma2": {
        "head_dim": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "mistral": {"sliding_window": 4096},
    "ministral3": {"head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5},
    "mixtral": {"rope_theta": 1_000_000.0},
    "olmo3": {"sliding_window": 4096},
    "phi3": {"original_max_position_embeddings": 4096},
    "qwen2": {"max_window_layers": 28},
    "qwen3": {"head_dim": 128, "max_window_layers": 28},
    "smollm3": {"rope_theta": 2_000_000.0},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "attention_bias": True, "rope_theta": 150000.0},
}
"""What the published files of a family leave to the classes of transformers."""
_GPT_OSS_YARN: Raw = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""How gpt-oss rotates where its file does not say: its context is `max_position_embeddings` all the same."""


def family_options(path: Path, family: str, raw: Raw) -> Options:
    """Return the fields of a `ModelConfig` that only some families set. Raises ModelError."""
    layers, context = whole(raw, "num_hidden_layers"), whole(raw, "max_position_embeddings")
    head_dim = head_size(raw)

    def table(parameters: Parameters) -> RopeTable:
        return rope_table(path, parameters, context, head_dim)

    for name, plain in _PLAIN.items():
        if name not in _OBEYED.get(family, ()) and (value := raw.get(name)) is not None and value not in plain:
            raise ModelError(path, f"{name} {value!r} is not known of this family")
    if family not in _PARTLY_ROTATED:
        for parameters in (raw, *rope_parameters(path, raw).values()):
            if (share := parameters.get("partial_rotary_factor")) not in (None, 1):
                raise ModelError(path, f"partial_rotary_factor {share!r} is not known of this family, only 1")
    if family == "gpt_oss" and raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        raw = raw | {"rope_scaling": _GPT_OSS_YARN}
    read = _READERS.get(family, _no_window)
    return read(path, raw, layers, table)


_GRANITE = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_PLAIN: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(_GRANITE, (1,)),
    **dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor"), (1,)),
    **dict.fromkeys((*_CAPS, "clip_qkv", "alibi", "rope_interleaved", "n_shared_experts"), (0,)),
    "scoring_func": ("softmax",),
}
"""Fields that change answers, with the values at which they change none: all that a family may say of them unless it is
among `_OBEYED`."""
_PARTLY_ROTATED = ("phi3",)
"""Families whose heads may be rotated in part, by their `partial_rotary_factor`."""
_OBEYED = {"granite": _GRANITE, "gemma2": _CAPS, "gemma3": _CAPS[1:]}


def head_size(raw: Raw) -> int:
    """Return the dimensions of a head. Raises KeyError and TypeError."""
    if raw.get("head_dim") is not None:
        return whole(raw, "head_dim")
    return whole(raw, "hidden_size") // max(whole(raw, "num_attention_heads"), 1)


Table = Callable[[Parameters], RopeTable]


def _one_table(path: Path, raw: Raw, table: Table, windows: Sequence[int]) -> Options:
    """Layers that differ by their windows alone."""
    (parameters, *others) = rope_parameters(path, raw).values()
    if others:
        raise ModelError(path, "rope_parameters differ by type of layer, which this family's layers do not")
    options = tuple(LayerOptions(window=window) for window in windows) if any(windows) else ()
    return {"ropes": (table(parameters),), "layer_options": options}


def _no_window(path: Path, raw: Raw, layers: int, table: Table) -> Options:
    kinds = set(_layer_types(path, raw))
    if not kinds <= {FULL}:
        raise ModelError(path, f"layer_types {sorted(kinds)} are not supported here, only {FULL}")
    if _window(path, raw) and flag(raw, "use_sliding_window", True):
        raise ModelError(path, f"sliding_window {raw['sliding_window']} is not known of this family")
    return _one_table(path, raw, table, [0] * layers)


def _window_on_all(path: Path, raw: Raw, layers: int, table: Table) -> Options:
    window = _window(path, raw)
    kinds = set(_layer_types(path, raw))
    if not kinds <= {SLIDING if window else FULL}:
        raise ModelError(path, f"layer_types {sorted(kinds)} with sliding_window {window}: all layers have it, or none")
    return _one_table(path, raw, table, [window] * layers)


def _ministral3(path: Path, raw: Raw, layers: int, table: Table) -> Options:
    """What scales queries by their position stands among the rotary parameters."""
    (parameters, *_) = rope_parameters(path, raw).values()
    if "llama_4_scaling_beta" not in parameters:
        raise ModelError(path, "rope_parameters.llama_4_scaling_beta is missing")
    beta = parameters["llama_4_scaling_beta"]
    return _window_on_all(path, raw, layers, table) | {
        "query_beta": 0.0 if beta == 0 else factor(parameters, "llama_4_scaling_beta", 0.0),
        "query_tokens": whole(parameters, "original_max_position_embeddings"),
    }


def _qwen(path: Path, raw: Raw, layers: int, table: Table) -> Options:
    """The window counts only if `use_sliding_window`, from layer `max_window_layers` on."""
    if not flag(raw, "use_sliding_window"):
        return _no_window(path, raw | {"sliding_window": None}, layers, table)
    if (first := whole(raw, "max_window_layers")) < 0:
        raise ModelError(path, f"max_window_layers is {first}, must be at least 0")
    kinds = [SLIDING if at >= first else FULL for at in range(layers)]
    return _one_table(path, raw, table, _windows(path, raw, layers, kinds))


def _qwen_moe(path: Path, raw: Raw, layers: int, table: Table) -> Options:
    """The window counts only if `use_sliding_window`, then for all layers."""
    if not flag(raw, "use_sliding_window"):
        return _no_window(path, raw | {"sliding_window": None}, layers, table)
    return _window_on_all(path, raw, layers, table)


def _granite(path: Path, raw: Raw, layers: int, table: Table) -> Options:
    return _no_window(path, raw, layers, table) | {
        "embed_scale": factor(raw, "embedding_multiplier", 1.0),
        "residual_scale": factor(raw, "residual_multiplier", 1.0),
        "attention_scale": factor(raw, "attention_multiplier", 1.0),
        "logit_scale": 1.0 / factor(raw, "logits_scaling", 1.0),
    }


def _smollm3(path: Path, raw: Raw, layers: int, table: Table) -> Options:
    """`no_rope_layers` holds a 1 for layers that do rotate."""
    every = interval(raw, "no_rope_layer_interval", 4)
    rotates = raw.get("no_rope_layers") or [int((at + 1) % every > 0) for at in range(layers)]
    if not isinstance(rotates, list) or not all(isinstance(turns, int) and turns in (0, 1) for turns in rotates):
        raise ModelError(path, f"no_rope_layers is {rotates!r}, not a list of 0 and 1")
    if len(rotates) < layers:
        raise ModelError(path, f"no_rope_layers has {len(rotates)} of {layers} layers")
    windows = [0] * layers
    if flag(raw, "use_sliding_window") and raw.get("sliding_window"):
        windows = _windows(path, raw, layers, [FULL if rotates[at] else SLIDING for at in range(layers)])
    elif not (kinds := set(_layer_types(path, raw))) <= {FULL}:
        raise ModelError(path, f"layer_types {sorted(kinds)} without use_sliding_window are not supported, only {FULL}")
    (parameters,) = rope_parameters(path, raw).values()
    options = tuple(
        LayerOptions(window=window, rope=0 if turns else None)
        for window, turns in zip(windows, rotates, strict=False)
    )
    return {"ropes": (table(parameters),), "layer_options": options}


def _gemma2(path: Path, raw: Raw, layers: int, table: Table) -> Options:
    kinds = [FULL if at % 2 else SLIDING for at in range(layers)]
    return _one_table(path, raw, table, _windows(path, raw, layers, kinds)) | _gemma(path, raw)


def _gpt_oss(path: Path, raw: Raw, layers: int, table: Table) -> Options:
    kinds = [FULL if at % 2 else SLIDING for at in range(layers)]
    return _one_table(path, raw, table, _windows(path, raw, layers, kinds)) | {"sinks": True}


def _gemma3(path: Path, raw: Raw, layers: int, table: Table) -> Options:
    """Scalings count for global layers only; local ones have a theta of their own."""
    every = interval(raw, "sliding_window_pattern", interval(raw, "_sliding_window_pattern", 6))
    kinds = [SLIDING if (at + 1) % every else FULL for at in range(layers)]
    windows = _windows(path, raw, layers, kinds)
    found = rope_parameters(path, raw, 1_000_000.0, raw.get("rope_local_base_freq") or 10000.0)
    return _two_tables(table(found[FULL]), table(found[SLIDING]), windows) | _gemma(path, raw)


def _gemma(path: Path, raw: Raw) -> Options:
    if flag(raw, "use_bidirectional_attention"):
        raise ModelError(path, "use_bidirectional_attention: only causal attention is supported")
    caps = dict(zip(("attention_softcap", "final_softcap"), _CAPS, strict=True))
    return {ours: 0.0 if raw.get(name) is None else factor(raw, name, 0.0) for ours, name in caps.items()} | {
        "embed_scale": whole(raw, "hidden_size") ** 0.5,
        "attention_scale": factor(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
    }


def _olmo3(path: Path, raw: Raw, layers: int, table: Table) -> Options:
    """Scalings count for layers without a window."""
    kinds = [SLIDING if (at + 1) % 4 else FULL for at in range(layers)]
    windows = _windows(path, raw, layers, kinds)
    found = rope_parameters(path, raw, 500_000.0, raw.get("rope_theta") or 500_000.0)
    return _two_tables(table(found[FULL]), table(found[SLIDING]), windows)


def _two_tables(everywhere: RopeTable, local: RopeTable, windows: Sequence[int]) -> Options:
    if everywhere == local:
        return {"ropes": (everywhere,), "layer_options": tuple(LayerOptions(window=window) for window in windows)}
    options = tuple(LayerOptions(window=window, rope=1 if window else 0) for window in windows)
    return {"ropes": (everywhere, local), "layer_options": options}


def _windows(path: Path, raw: Raw, layers: int, kinds: Sequence[str]) -> list[int]:
    """Return each layer's window; `kinds` where `layer_types` does not say."""
    kinds = _layer_types(path, raw) or kinds
    if len(kinds) != layers or not set(kinds) <= set(LAYER_TYPES):
        known = ", ".join(LAYER_TYPES)
        raise ModelError(path, f"layer_types {sorted(set(kinds))} of {len(kinds)} layers, of {layers}; known: {known}")
    window = _window(path, raw)
    if SLIDING in kinds and not window:
        raise ModelError(path, f"layer_types has {SLIDING}, and sliding_window is missing")
    return [window if kind == SLIDING else 0 for kind in kinds]


def _layer_types(path: Path, raw: Raw) -> list[str]:
    """Return what is said of layers; none where nothing is."""
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ModelError(path, f"layer_types is {kinds!r}, not a list of names")
    return kinds


def _window(path: Path, raw: Raw) -> int:
    window = raw.get("sliding_window") or 0
    if isinstance(window, bool) or not isinstance(window, int) or window < 0:
        raise ModelError(path, f"sliding_window {window!r} is not a number of tokens")
    return window


_READERS: dict[str, Callable[[Path, Raw, int, Table], Options]] = {
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen_moe,
    "mistral": _window_on_all,
    "ministral3": _ministral3,
    "mixtral": _window_on_all,
    "phi3": _window_on_all,
    "granite": _granite,
    "smollm3": _smollm3,
    "gemma2": _gemma2,
    "gpt_oss": _gpt_oss,
    "gemma3": _gemma3,
    "olmo3": _olmo3,
}

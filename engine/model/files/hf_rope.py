"""The rotary tables that a config.json asks for.

`rope_parameters` is how transformers 5 writes them, `rope_theta` with `rope_scaling` how it was before; a family whose
layers differ has one set for each type of layer.
"""

import math
from pathlib import Path
from typing import Any

from engine.model.config import LinearRope, Llama3Rope, LongRope, ModelError, RopeScaling, RopeTable, YarnRope
from engine.model.files.checkpoint import flag, number, whole

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)

Parameters = dict[str, Any]


def rope_parameters(
    path: Path, raw: dict[str, Any], default_theta: float = 10000.0, local_theta: float | None = None
) -> dict[str, Parameters]:
    """Return the parameters by type of layer, what is said of none under the first. `local_theta`: of a family whose
    local layers have parameters of their own, where none says another. Raises ModelError."""
    said = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(said, dict):
        raise ModelError(path, f"rope_parameters {said!r} is not a table")
    if wrong := [kind for kind in LAYER_TYPES if kind in said and not isinstance(said[kind], dict)]:
        raise ModelError(path, f"rope_parameters.{wrong[0]} {said[wrong[0]]!r} is not a table")
    nested = {kind: said[kind] for kind in LAYER_TYPES if isinstance(said.get(kind), dict)}
    theta, share = raw.get("rope_theta") or default_theta, raw.get("partial_rotary_factor")
    original = raw.get("original_max_position_embeddings")
    found = {}
    by_kind = nested or {FULL: said}
    if local_theta is not None:
        by_kind = {FULL: {}, SLIDING: {}, **by_kind}
    for kind, each in by_kind.items():
        usual = local_theta if local_theta is not None and kind == SLIDING else theta
        said = {key: value for key, value in each.items() if value is not None or key == "truncate"}
        parameters = {"rope_theta": usual, **said}
        if share is not None:
            parameters.setdefault("partial_rotary_factor", share)
        if original is not None:
            parameters["original_max_position_embeddings"] = original
        parameters.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
        found[kind] = parameters
    return found


def context_tokens(raw: dict[str, Any]) -> int:
    """Return the longest context: `max_position_embeddings`, or what YaRN makes of the original one where it says both.
    Publishers who leave YaRN to their readers (Qwen) have them add it alone."""
    longest = whole(raw, "max_position_embeddings")
    said = raw.get("rope_parameters") or raw.get("rope_scaling")
    if not isinstance(said, dict) or said.get("rope_type", said.get("type")) != "yarn":
        return longest
    factor, original = said.get("factor"), said.get("original_max_position_embeddings")
    if not factor or not original:
        return longest
    return max(longest, int(number(said, "factor") * whole(said, "original_max_position_embeddings")))


def rope_table(path: Path, parameters: Parameters, context_tokens: int, head_dim: int) -> RopeTable:
    """Return one table. Raises ModelError for a kind of scaling that is not known, or not whole."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("su", "yarn") and "long_factor" in parameters:
        kind = "longrope"  # Phi-3's first files
    try:
        theta = float(parameters["rope_theta"])
        dims = int(head_dim * float(parameters.get("partial_rotary_factor", 1.0)))
        scaling, scale = _scaling(path, kind, parameters, context_tokens)
    except KeyError as error:
        raise ModelError(path, f"rope scaling {kind!r} lacks {error.args[0]}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(path, f"rope scaling {kind!r}: {error}") from error
    return RopeTable(theta=theta, scaling=scaling, dims=0 if dims == head_dim else dims, scale=scale)


def _scaling(path: Path, kind: object, said: Parameters, context_tokens: int) -> tuple[RopeScaling | None, float]:
    """Return the scaling, and the factor of cosines and sines that goes with it."""
    if kind == "default":
        return None, 1.0
    if kind == "linear":
        return LinearRope(factor=float(said["factor"])), 1.0
    if kind == "llama3":
        scaling = Llama3Rope(
            factor=float(said["factor"]),
            low_freq_factor=float(said["low_freq_factor"]),
            high_freq_factor=float(said["high_freq_factor"]),
            original_context_tokens=whole(said, "original_max_position_embeddings"),
        )
        return scaling, 1.0
    if kind == "yarn":
        original = whole(said, "original_max_position_embeddings")
        factor = float(said.get("factor") or context_tokens / original)
        yarn = YarnRope(
            factor=factor,
            original_context_tokens=original,
            beta_fast=float(said.get("beta_fast") or 32.0),
            beta_slow=float(said.get("beta_slow") or 1.0),
            # A null is no absence here: transformers, which the published files are tried with, takes it for false.
            truncate=said.get("truncate", True) is not None and flag(said, "truncate", True),
        )
        return yarn, _yarn_scale(factor, said)
    if kind == "longrope":
        original = whole(said, "original_max_position_embeddings")
        factor = float(said.get("factor") or context_tokens / original)
        scale = said.get("attention_factor") or longrope_scale(factor, original)
        short, long = (tuple(map(float, said[name])) for name in ("short_factor", "long_factor"))
        return LongRope(short=short, long=long, original_context_tokens=original), float(scale)
    if kind == "dynamic":
        why = "frequencies would change as a sequence grows, and cached keys with them"
        raise ModelError(path, f"rope scaling 'dynamic' is not supported: {why}")
    raise ModelError(path, f"rope scaling {kind!r} is not supported")


def yarn_scale(factor: float, share: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines (arXiv 2309.00071, section 3.4)."""
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _yarn_scale(factor: float, said: Parameters) -> float:
    if said.get("attention_factor") is not None:
        return float(said["attention_factor"])
    if (upper := said.get("mscale")) and (lower := said.get("mscale_all_dim")):
        return yarn_scale(factor, float(upper)) / yarn_scale(factor, float(lower))
    return yarn_scale(factor)


def longrope_scale(factor: float, original: int) -> float:
    """Return LongRoPE's factor of cosines and sines (arXiv 2402.13753)."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0

"""What files say of a mixture of experts: how many, how wide, how many of them a row goes to and with which weights."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.model.config import ExpertOptions, ModelError
from engine.model.files.checkpoint import factor, flag, interval, whole

# A machine that reads config.json alone may have no gguf package.
if TYPE_CHECKING:
    from engine.model.files.gguf_reader import GGUFFile

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def from_config(path: Path, family: str, raw: dict[str, Any]) -> ExpertOptions | None:
    """Return the experts of a family's config.json whose content is `raw`; None for families without. Raises ModelError
    for a model of experts in a family without, and KeyError for what is missing."""
    read = _READERS.get(family)
    if read is not None:
        return read(path, raw)
    for name in _COUNTS:
        if raw.get(name):
            raise ModelError(path, f"{name}: a mixture of experts is not known of family {family}")
    return None


def _mixtral(path: Path, raw: dict[str, Any]) -> ExpertOptions:
    return ExpertOptions(
        count=whole(raw, "num_local_experts"),
        chosen=whole(raw, "num_experts_per_tok"),
        width=whole(raw, "intermediate_size"),
        normalise=True,
    )


def _qwen3_moe(path: Path, raw: dict[str, Any]) -> ExpertOptions:
    """Without the field, weights are not divided by their sum: so says the class of transformers, and no file of those
    published lacks it."""
    every, layers = interval(raw, "decoder_sparse_step", 1), whole(raw, "num_hidden_layers")
    plain = raw.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in plain):
        raise ModelError(path, f"mlp_only_layers is {plain!r}, not a list of layers 0 to {layers - 1}")
    return ExpertOptions(
        count=whole(raw, "num_experts" if raw.get("num_experts") else "num_local_experts"),
        chosen=whole(raw, "num_experts_per_tok"),
        width=whole(raw, "moe_intermediate_size"),
        normalise=flag(raw, "norm_topk_prob"),
        dense_layers=tuple(layer for layer in range(layers) if layer in plain or (layer + 1) % every),
    )


def _gpt_oss(path: Path, raw: dict[str, Any]) -> ExpertOptions:
    return ExpertOptions(
        count=whole(raw, "num_local_experts"),
        chosen=whole(raw, "num_experts_per_tok" if raw.get("num_experts_per_tok") else "experts_per_token"),
        width=whole(raw, "intermediate_size"),
        over_chosen=True,
        biases=True,
        alpha=factor(raw, "swiglu_alpha", ALPHA),
        limit=factor(raw, "swiglu_limit", LIMIT),
    )


ALPHA, LIMIT = 1.702, 7.0
"""The clamped gate's numbers where files do not say them: GGUF's never do."""

_READERS: dict[str, Callable[[Path, dict[str, Any]], ExpertOptions]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
}


def from_metadata(file: "GGUFFile", architecture: str, family: str) -> ExpertOptions | None:
    """Return the experts of a GGUF file; None where it has none. Raises ModelError for a family without."""

    def number(key: str, default: int | None = None) -> int:
        value = file.get(f"{architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(file.path, f"metadata {architecture}.{key} is {value!r}, not a number")
        return value

    if not (count := number("expert_count", 0)):
        return None
    if family not in _READERS:
        raise ModelError(file.path, f"a mixture of experts is not known of family {family}")
    if shared := number("expert_shared_count", 0):
        raise ModelError(file.path, f"{shared} experts that are shared by all rows are not supported")
    # All files of Mixtral and Qwen3 normalise, and say nothing of it.
    normalise = file.get(f"{architecture}.expert_weights_norm", True)
    if not isinstance(normalise, bool):
        raise ModelError(file.path, f"metadata {architecture}.expert_weights_norm is {normalise!r}, not true or false")
    layers = range(number("block_count"))
    is_gpt_oss = family == "gpt_oss"
    return ExpertOptions(
        count=count,
        chosen=number("expert_used_count"),
        width=number("expert_feed_forward_length", number("feed_forward_length", 0)),
        normalise=normalise and not is_gpt_oss,
        over_chosen=is_gpt_oss,
        biases=is_gpt_oss,
        alpha=ALPHA if is_gpt_oss else 0.0,
        limit=LIMIT if is_gpt_oss else 0.0,
        dense_layers=tuple(layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in file),
    )

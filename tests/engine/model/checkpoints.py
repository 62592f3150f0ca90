"""Small random models of every family by transformers, and the files that their publishers would make of them.

Every weight matters: norms are not ones, biases are not zeros, local and global theta differ, windows and original
contexts are shorter than the prompts of the tests.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

VOCAB = 320
CONTEXT = 256
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.2],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
}
PARTIAL = LONGROPE | {
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.4, 1.2, 1.1],
    "long_factor": [1.5, 3.0, 6.0, 4.0],
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
THETAS = {"full_attention": {"rope_type": "default", "rope_theta": 50000.0}}
TWO_THETAS = THETAS | {"sliding_attention": {"rope_type": "default", "rope_theta": 200.0}}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
    "logits_scaling": 4.0,
}


GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "rope_parameters": YARN | {"truncate": False},
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16}


class Case(NamedTuple):
    """A model to be: its family by transformers' name, and what its configuration has other than `BASE`."""

    family: str
    options: dict[str, Any] | None = None


CASES: dict[str, Case] = {
    "llama": Case("Llama", {"rope_parameters": LLAMA3}),
    "qwen3": Case("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen2": Case("Qwen2"),
    "qwen2-tied": Case("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2-yarn": Case("Qwen2", {"rope_parameters": YARN}),
    "qwen2-window": Case("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "mistral": Case("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": Case("Mistral", {"sliding_window": 8}),
    "ministral3": Case("Ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.7}, "head_dim": 16}),
    "ministral3-mscale": Case(
        "Ministral3",
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.7, "mscale": 1.0, "mscale_all_dim": 0.6}, "head_dim": 32},
    ),
    "ministral3-window": Case(
        "Ministral3",
        {
            "rope_parameters": YARN | {"llama_4_scaling_beta": 0.7, "mscale": 1.0, "mscale_all_dim": 1.0},
            "sliding_window": 8,
        },
    ),
    "granite": Case("Granite", GRANITE),
    "granite-biases": Case("Granite", GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "smollm3": Case("SmolLM3"),
    "smollm3-yarn": Case("SmolLM3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "phi3": Case("Phi3", {"sliding_window": None}),
    "phi3-window": Case("Phi3", {"sliding_window": 8}),
    "phi3-longrope": Case(
        "Phi3",
        {
            "rope_parameters": LONGROPE | {"short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 5.0, 9.0] * 2},
            "original_max_position_embeddings": 32,
        },
    ),
    "phi4-mini": Case(
        "Phi3",
        {"rope_parameters": PARTIAL, "original_max_position_embeddings": 32, "tie_word_embeddings": True},
    ),
    "gemma2": Case("Gemma2", {"sliding_window": 8, "head_dim": 32, "query_pre_attn_scalar": 20}),
    "gemma3": Case(
        "Gemma3",
        {
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "rope_parameters": TWO_THETAS,
        },
    ),
    "gemma3-linear": Case(
        "Gemma3",
        {
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmo2": Case("Olmo2"),
    "gpt-oss": Case("GptOss", GPT_OSS),
    "gpt-oss-clamped": Case("GptOss", GPT_OSS | {"swiglu_limit": 0.4, "swiglu_alpha": 1.3}),
    "mixtral": Case("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral-window": Case("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 8}),
    "qwen3moe": Case("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3moe-unnormalised": Case("Qwen3Moe", EXPERTS | {"mlp_only_layers": [1], "tie_word_embeddings": True}),
    "qwen3moe-sparse": Case("Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "olmo3": Case(
        "Olmo3",
        {
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50000.0},
            },
        },
    ),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def build(name: str, seed: int = 0, **more: Any) -> Any:
    """Return the case's model, in 32 bits, with eager attention: it alone knows every option."""
    family, options = CASES[name]
    torch.manual_seed(seed)
    kind = getattr(transformers, CONFIGS.get(family, f"{family}Config"))
    config = kind(**{**BASE, **(options or {}), **more}, attn_implementation="eager")
    return randomized(getattr(transformers, f"{family}ForCausalLM")(config))


def randomized(model: Any) -> Any:
    model = model.float().eval()
    around = 0.0 if model.config.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(around - 0.5, around + 0.5)
            elif name.endswith("bias"):
                weight.normal_(0, 0.5)
            elif name.endswith("sinks"):
                weight.normal_(1, 1)
            else:
                weight.normal_(0, 0.15)
    model.generation_config.eos_token_id = None
    return model


def byte_tokens() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return alphabet + [f"<extra_{index}>" for index in range(VOCAB - len(alphabet))]


def save_hf(model: Any, folder: Path, **options: Any) -> str:
    model.save_pretrained(folder, **options)
    save_tokenizer(folder)
    return str(folder)


def save_tokenizer(folder: Path, tokens: int = VOCAB) -> None:
    tokenizer = Tokenizer(BPE(vocab={t: i for i, t in enumerate(byte_tokens()[:tokens])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def rotary_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


_KINDS = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
ARCHITECTURES = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
}
PERMUTED = ("llama", "mistral3", "granite", "smollm3")
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTSIDE_GGUF = {
    "qwen2-window": "`max_window_layers` has no key, and `qwen2.attention.sliding_window` is refused",
    "ministral3-window": "`mistral3.attention.sliding_window` is refused: its readers pass over it",
    "gpt-oss-clamped": "the gate's clamp and slope are constants of the family",
}
"""The cases that no GGUF file can say, and why."""
GGUF_SAYS: dict[str, tuple[dict[str, Any], dict[str, int | float | bool]]] = {
    "gemma2": ({"query_pre_attn_scalar": 32}, {}),
    "gemma3": ({"query_pre_attn_scalar": 32}, {"attention.sliding_window_pattern": 3, "rope.freq_base_swa": 200.0}),
    "mistral-window": ({}, {"attention.sliding_window": 8}),
    "mixtral-window": ({}, {"attention.sliding_window": 8}),
    "qwen3moe-unnormalised": ({}, {"expert_weights_norm": False}),
}
"""Cases that a GGUF file can say with other options of the model, since some are constants there, or with keys that the
converter leaves out."""


def build_as_gguf(name: str, path: Path, **more: Any) -> tuple[str, Any]:
    """Write a case as GGUF, and return the file and the model that it is."""
    options, says = GGUF_SAYS.get(name, ({}, {}))
    model = build(name, **options, **more)
    return save_gguf(model, path, says=says), model


POST_NORMED = ("gemma2", "gemma3", "olmo2", "gpt-oss")


def save_gguf(model: Any, path: Path, tokens: int = VOCAB, says: dict[str, int | float | bool] | None = None) -> str:
    """Write the model as llama.cpp's converter would, with more of its architecture's keys where `says` has them."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _write_rope(writer, config, head_dim)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in _WRITERS:
        _WRITERS[architecture](writer, config)
    for key, value in (says or {}).items():
        writer.add_key_value(f"{architecture}.{key}", value, _KINDS[type(value)])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(byte_tokens()[:tokens] + [f"[PAD{at}]" for at in range(tokens, VOCAB)])
    writer.add_token_types([1] * tokens + [5] * (VOCAB - tokens))
    writer.add_token_merges([])
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            _write_experts(writer, name, weight.numpy(), interleaved=architecture == "gpt-oss")
            continue
        if name.endswith(".sinks"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.attn_sinks.weight", weight.numpy())
            continue
        writer.add_tensor(_gguf_name(name, architecture), _gguf_values(name, weight.numpy(), architecture, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _write_experts(writer: gguf.GGUFWriter, name: str, values: np.ndarray, interleaved: bool) -> None:
    layer, leaf = name.split(".")[2], "bias" if name.endswith("bias") else "weight"
    if interleaved and values.ndim == 3:
        values = values.swapaxes(1, 2)
    parts = {"down": values}
    if "gate_up" in name:
        halves = (values[:, ::2], values[:, 1::2]) if interleaved else np.split(values, 2, axis=1)
        parts = dict(zip(("gate", "up"), halves, strict=True))
    for part, matrices in parts.items():
        writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.{leaf}", np.ascontiguousarray(matrices))


def _gguf_name(name: str, architecture: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{leaf}"
    _, _, number, rest = stem.split(".", 3)
    called = GGUF_NAMES[rest]
    if rest == "post_attention_layernorm" and architecture in POST_NORMED:
        called = "post_attention_norm"
    return f"blk.{number}.{called}.{leaf}"


def _gguf_values(name: str, values: np.ndarray, architecture: str, config: Any) -> np.ndarray:
    if architecture in PERMUTED and ".q_proj" in name:
        return rotary_pairs(values, config.num_attention_heads)
    if architecture in PERMUTED and ".k_proj" in name:
        return rotary_pairs(values, config.num_key_value_heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    return values


def _write_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    kind = rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    elif kind == "longrope":
        original = rope["original_max_position_embeddings"]
        share = np.log(config.max_position_embeddings / original) / np.log(original)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + share)))
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return what llama.cpp's converter divides each frequency by."""
    original = rope["original_max_position_embeddings"]
    factors = []
    for frequency in rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _write_granite(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _write_gemma2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_olmo2(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type == "olmo3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _write_mistral3(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_scaling_yarn_log_mul(rope.get("mscale_all_dim", 0.0))
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _write_gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)


_WRITERS: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "granite": _write_granite,
    "mistral3": _write_mistral3,
    "gemma2": _write_gemma2,
    "gpt-oss": _write_gpt_oss,
    "gemma3": lambda writer, config: writer.add_sliding_window(config.sliding_window),
    "phi3": lambda writer, config: writer.add_sliding_window(config.sliding_window or 0),
    "olmo2": _write_olmo2,
}

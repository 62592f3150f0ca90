"""Released config.json files, by the fields that count: each is accepted, and read as its model was trained."""

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine.model.config import (
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    ModelError,
    RopeScaling,
    YarnRope,
)
from engine.model.files.checkpoint import find_family
from engine.model.files.hf_model import HFModel, model_config, text_side
from engine.model.prepared.weights import pieces_of, prepared_weights
from tests.engine.model.checkpoints import build, save_hf

Raw = dict[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"


def decoder(
    kind: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    context: int,
    **more: Any,
) -> Raw:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        **more,
    }


def long_factors(pairs: int) -> Raw:
    return {"long_factor": [1.5] * pairs, "short_factor": [1.0] * pairs}


QWEN25_7B = decoder(
    "qwen2", 28, 3584, 28, 4, 18944, 152064, 32768, rope_theta=1000000.0, hidden_act="silu",
    sliding_window=131072, max_window_layers=28, use_sliding_window=False, tie_word_embeddings=False,
)
YARN4 = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
MISTRAL_7B = decoder(
    "mistral", 32, 4096, 32, 8, 14336, 32000, 32768, rope_theta=10000.0, sliding_window=4096, hidden_act="silu"
)
PHI3_MINI = decoder(
    "phi3", 32, 3072, 32, 32, 8192, 32064, 4096, original_max_position_embeddings=4096, rope_scaling=None,
    rope_theta=10000.0, sliding_window=2047, hidden_act="silu", attention_bias=False,
)
PHI3_LONG = PHI3_MINI | {"max_position_embeddings": 131072, "sliding_window": 262144}
GEMMA2_2B = decoder(
    "gemma2", 26, 2304, 8, 4, 9216, 256000, 8192, head_dim=256, hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    query_pre_attn_scalar=256, sliding_window=4096, rope_theta=10000.0, cache_implementation="hybrid",
)
GEMMA3_1B = decoder(
    "gemma3_text", 26, 1152, 4, 1, 6912, 262144, 32768, head_dim=256, hidden_activation="gelu_pytorch_tanh",
    attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=256, rope_scaling=None,
    rope_local_base_freq=10000, rope_theta=1000000, sliding_window=512, sliding_window_pattern=6,
)


def gemma3(**text: Any) -> Raw:
    inner = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, **text}
    return {"model_type": "gemma3", "text_config": inner, "vision_config": {}, "eos_token_id": [1, 106]}


OLMO3_7B = decoder(
    "olmo3", 32, 4096, 32, 32, 11008, 100278, 65536, rope_theta=500000, sliding_window=4096, attention_bias=False,
    layer_types=[FULL if (at + 1) % 4 == 0 else SLIDING for at in range(32)],
    rope_scaling={
        "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
)
QWEN3_30B_A3B = decoder(
    "qwen3_moe", 48, 2048, 32, 4, 6144, 151936, 40960, head_dim=128, attention_bias=False, decoder_sparse_step=1,
    max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128,
    num_experts_per_tok=8, rope_scaling=None, rope_theta=1000000.0, sliding_window=None, use_sliding_window=False,
)
GPT_OSS_20B = decoder(
    "gpt_oss", 24, 2880, 64, 8, 2880, 201088, 131072, head_dim=64, attention_bias=True, experts_per_token=4,
    num_experts_per_tok=4, num_local_experts=32, initial_context_length=4096, rope_theta=150000, sliding_window=128,
    swiglu_limit=7.0, layer_types=[SLIDING, FULL] * 12,
    rope_scaling={
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
)
MISTRAL_SMALL = {
    "model_type": "mistral3",
    "vision_config": {"hidden_size": 1024},
    "text_config": decoder(
        "mistral", 40, 5120, 32, 8, 32768, 131072, 131072, head_dim=128, rope_theta=1e9, sliding_window=None
    ),
}
MINISTRAL3 = {
    "model_type": "mistral3",
    "vision_config": {"hidden_size": 1024},
    "text_config": decoder(
        "ministral3", 34, 4096, 32, 8, 14336, 131072, 262144, sliding_window=None,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    ),
}
GRANITE_8B = decoder(
    "granite", 40, 4096, 32, 8, 12800, 49155, 131072, attention_multiplier=0.0078125, embedding_multiplier=12.0,
    logits_scaling=16.0, residual_multiplier=0.22, rope_theta=10000000.0, tie_word_embeddings=True,
    attention_bias=False, mlp_bias=False,
)
SMOLLM3 = decoder(
    "smollm3", 36, 2048, 16, 4, 11008, 128256, 65536, rope_theta=5000000.0, no_rope_layer_interval=4,
    no_rope_layers=[1, 1, 1, 0] * 9, layer_types=[FULL] * 36, sliding_window=None, use_sliding_window=False,
    max_window_layers=28,
)
LLAMA31_8B = decoder(
    "llama", 32, 4096, 32, 8, 14336, 128256, 131072, rope_theta=500000.0,
    rope_scaling={
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
)


def read(raw: Raw) -> ModelConfig:
    path = Path("config.json")
    return model_config(path, find_family(path, "hugging_face", "model_type", text_side(raw)["model_type"]), raw, "m")


def windows(config: ModelConfig) -> list[int]:
    return [config.layer(at).window for at in range(config.layers)]


def thetas(config: ModelConfig) -> list[float]:
    """The theta of each layer; 0 where nothing is rotated."""
    ropes = [config.layer(at).rope for at in range(config.layers)]
    return [0.0 if rope is None else config.ropes[rope].theta for rope in ropes]


def scalings(config: ModelConfig) -> list[type[RopeScaling] | None]:
    ropes = [config.layer(at).rope for at in range(config.layers)]
    found = [None if rope is None else config.ropes[rope].scaling for rope in ropes]
    return [None if scaling is None else type(scaling) for scaling in found]


LOCAL5 = [512 if (at + 1) % 6 else 0 for at in range(26)]

CASES: dict[str, tuple[Raw, Raw]] = {
    "qwen2.5-7b": (QWEN25_7B, {"qkv_bias": True, "output_bias": False, "windows": {0}, "head_dim": 128}),
    "qwen2.5 with yarn": (
        QWEN25_7B | {"rope_scaling": YARN4}, {"context_tokens": 131072, "scaling": YarnRope, "scale": 1.1386}
    ),
    "mistral-7b-v0.1": (MISTRAL_7B, {"windows": {4096}, "head_dim": 128, "tied": False}),
    "mistral-7b-v0.3": (
        MISTRAL_7B | {"sliding_window": None, "rope_theta": 1e6, "vocab_size": 32768}, {"windows": {0}, "thetas": {1e6}}
    ),
    "mistral-nemo": (
        decoder("mistral", 40, 5120, 32, 8, 14336, 131072, 131072, head_dim=128, rope_theta=1e6, sliding_window=None),
        {"windows": {0}, "head_dim": 128, "q_rows": 4096},
    ),
    "ministral-3, as its class has it": (
        MINISTRAL3,
        {"family": "ministral3", "head_dim": 128, "windows": {0}, "thetas": {1e6}, "scaling": YarnRope, "scale": 1.0,
         "query_beta": 0.1, "query_tokens": 16384, "context_tokens": 262144},
    ),
    "mistral-small-3.1": (MISTRAL_SMALL, {"family": "mistral", "head_dim": 128, "thetas": {1e9}, "windows": {0}}),
    "granite-3.1-8b": (
        GRANITE_8B,
        {
            "embed_scale": 12.0, "residual_scale": 0.22, "attention_scale": 0.0078125, "logit_scale": 1 / 16,
            "thetas": {1e7}, "tied": True,
        },
    ),
    "smollm3-3b": (SMOLLM3, {"thetas": {5e6, 0.0}, "tied": True, "windows": {0}}),
    "phi-3-mini-4k": (PHI3_MINI, {"windows": {2047}, "scaling": None, "head_dim": 96}),
    "phi-3-mini-128k, first files": (
        PHI3_LONG | {"rope_scaling": {"type": "su", **long_factors(48)}},
        {"windows": {0}, "layer_options": (), "scaling": LongRope, "scale": 1.1902},
    ),
    "phi-3.5-mini": (
        PHI3_LONG | {"rope_scaling": {"type": "longrope", **long_factors(48)}},
        {"windows": {0}, "layer_options": (), "scaling": LongRope, "scale": 1.1902},
    ),
    "phi-4": (
        decoder(
            "phi3", 40, 5120, 40, 10, 17920, 100352, 16384, original_max_position_embeddings=16384,
            rope_scaling=None, rope_theta=250000, sliding_window=None,
        ),
        {"windows": {0}, "scaling": None, "thetas": {250000.0}},
    ),
    "phi-4-mini": (
        decoder(
            "phi3", 32, 3072, 24, 8, 8192, 200064, 131072, original_max_position_embeddings=4096,
            partial_rotary_factor=0.75, rope_theta=10000.0, sliding_window=262144, tie_word_embeddings=True,
            rope_scaling={"type": "longrope", **long_factors(48)},
        ),
        {"windows": {0}, "scaling": LongRope, "dims": 96, "head_dim": 128, "tied": True},
    ),
    "gemma-2-2b": (
        GEMMA2_2B,
        {
            "windows": {4096, 0}, "attention_scale": 1 / 16, "attention_softcap": 50.0, "final_softcap": 30.0,
            "embed_scale": 48.0, "tied": True, "activation": "gelu_tanh",
        },
    ),
    "gemma-2-9b": (
        GEMMA2_2B | {"num_hidden_layers": 42, "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8},
        {"attention_scale": 1 / 16, "head_dim": 256},
    ),
    "gemma-2-27b": (
        GEMMA2_2B
        | {"num_hidden_layers": 46, "hidden_size": 4608, "num_attention_heads": 32, "num_key_value_heads": 16}
        | {"head_dim": 128, "query_pre_attn_scalar": 144},
        {"attention_scale": 1 / 12, "head_dim": 128},
    ),
    "gemma-3-1b": (GEMMA3_1B, {"window list": LOCAL5, "thetas": {1e4, 1e6}, "scaling": None, "tied": True}),
    "gemma-3-4b": (
        gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024),
        {"windows": {1024, 0}, "heads": 8, "kv_heads": 4, "head_dim": 256, "vocab": 262208, "context_tokens": 131072,
         "attention_scale": 1 / 16, "global scaling": LinearRope, "thetas": {1e4, 1e6}, "tied": True},
    ),
    "gemma-3-27b": (
        gemma3(
            hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, sliding_window=1024, head_dim=128,
            num_attention_heads=32, num_key_value_heads=16, query_pre_attn_scalar=168,
        ),
        {"attention_scale": 168**-0.5, "head_dim": 128, "global scaling": LinearRope},
    ),
    "olmo-2-7b": (
        decoder("olmo2", 32, 4096, 32, 32, 11008, 100352, 4096, rope_theta=500000, rope_scaling=None),
        {"qk_norm": "whole", "windows": {0}, "thetas": {5e5}, "tied": False},
    ),
    "olmo-3-7b": (OLMO3_7B, {"windows": {4096, 0}, "global scaling": YarnRope, "thetas": {5e5}, "scale": 1.2079}),
    "mixtral-8x7b": (
        decoder(
            "mixtral", 32, 4096, 32, 8, 14336, 32000, 32768, num_local_experts=8, num_experts_per_tok=2,
            sliding_window=None, rope_theta=1e6,
        ),
        {"windows": {0}, "expert_count": 8, "expert_width": 14336, "thetas": {1e6}},
    ),
    "mixtral, without a theta": (
        decoder("mixtral", 2, 64, 4, 2, 96, 100, 64, num_local_experts=8, num_experts_per_tok=2), {"thetas": {1e6}}
    ),
    "smollm3, without a theta": (decoder("smollm3", 4, 64, 4, 2, 96, 100, 64), {"thetas": {2e6, 0.0}}),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, {"expert_count": 128, "expert_width": 768, "head_dim": 128, "windows": {0}}),
    "qwen3-moe, with a window": (
        QWEN3_30B_A3B | {"use_sliding_window": True, "sliding_window": 4096}, {"windows": {4096}}
    ),
    "gpt-oss-20b": (
        GPT_OSS_20B,
        {"windows": {128, 0}, "sinks": True, "qkv_bias": True, "output_bias": True, "scaling": YarnRope,
         "scale": 1.3466, "expert_count": 32, "head_dim": 64, "context_tokens": 131072},
    ),
    "llama-3.1-8b": (LLAMA31_8B, {"scaling": Llama3Rope, "context_tokens": 131072, "layer_options": ()}),
}


@pytest.mark.parametrize("name", CASES)
def test_is_read_as_it_was_released(name: str) -> None:
    """Guards each field that a publisher sets or leaves to its class: one that is misread gives a model that runs and
    is wrong."""
    raw, wanted = CASES[name]
    config = read(raw)
    globals_ = [s for s, window in zip(scalings(config), windows(config), strict=True) if not window]
    found: Raw = {
        "windows": set(windows(config)),
        "window list": windows(config),
        "thetas": set(thetas(config)),
        "scaling": scalings(config)[0],
        "global scaling": next(iter(globals_), None),
        "scale": config.ropes[0].scale,
        "dims": config.rotary_dims(config.ropes[0]),
    }
    for key, value in wanted.items():
        other = found[key] if key in found else getattr(config, key)
        assert other == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), key
    if "global scaling" in wanted:
        local = {s for s, window in zip(scalings(config), windows(config), strict=True) if window}
        assert local == {None}


@pytest.mark.parametrize("name", [name for name in CASES if name != "phi-3-mini-128k, first files"])
def test_is_read_as_transformers_reads_it(name: str) -> None:
    """Guards defaults that live in the classes of transformers alone. (Its class of Phi-3 knows "su" no more.)"""
    raw = deepcopy(CASES[name][0])
    config = read(raw)
    text: Any = AutoConfig.for_model(**raw).get_text_config()
    config_windows = [window or None for window in windows(config)]
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    window = window if window and window < text.max_position_embeddings else None
    wanted = [window if kinds is None or kind == SLIDING else None for kind in kinds or [None] * config.layers]
    assert config_windows == wanted
    tables = text.rope_parameters
    for at in range(config.layers):
        table = tables[kinds[at]] if kinds and FULL in tables else tables
        rope = config.layer(at).rope
        assert rope is None or config.ropes[rope].theta == table["rope_theta"]
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert (config.head_dim, config.kv_heads, config.vocab) == (head_dim, text.num_key_value_heads, text.vocab_size)
    assert config.tied == text.tie_word_embeddings


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        (decoder("llama", 2, 64, 4, 2, 96, 100, 64, sliding_window=32), "sliding_window"),
        (QWEN25_7B | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (QWEN25_7B | {"hidden_act": "gelu"}, "gelu"),
        (GEMMA3_1B | {"layer_types": ["chunked_attention"] * 26}, "chunked_attention"),
    ],
)
def test_what_is_not_obeyed_is_refused(raw: Raw, names: str) -> None:
    with pytest.raises(ModelError, match=names):
        read(raw)


@pytest.mark.parametrize(
    ("inner", "outer"), [("", "language_model."), ("model.", "model.language_model.")], ids=["before", "since 4.52"]
)
def test_text_side_of_a_model_with_images_is_read(inner: str, outer: str, tmp_path: Path) -> None:
    """Guards both ways in which checkpoints with images name the text side's tensors."""
    plain = Path(save_hf(build("gemma3"), tmp_path / "plain"))
    wrapped = tmp_path / "wrapped"
    shutil.copytree(plain, wrapped)
    said = msgspec.json.decode((plain / "config.json").read_bytes())
    whole = {"model_type": "gemma3", "text_config": said, "vision_config": {"hidden_size": 8}}
    (wrapped / "config.json").write_bytes(msgspec.json.encode(whole))
    for shard in wrapped.glob("*.safetensors"):
        tensors = load_file(shard)
        renamed = {
            outer + name.removeprefix(inner) if name.startswith(inner) else name: tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed | {"vision_tower.weight": torch.zeros(2)}, shard)
    (wrapped / "model.safetensors.index.json").unlink(missing_ok=True)
    one, other = HFModel(plain), HFModel(wrapped)
    assert msgspec.structs.replace(other.config, name=one.config.name) == one.config
    for _, weight, layer in prepared_weights(one):
        for source, expert in pieces_of(one, weight):
            names = [model.tensor_name(source, layer, expert) for model in (one, other)]
            assert names[0] != names[1] or not names[0].startswith(inner)
            found, wanted = (model.find(source, layer, expert) for model in (other, one))
            rows = wanted.shape[0]
            assert found.shape == wanted.shape
            assert (found.values(0, rows) == wanted.values(0, rows)).all()


@pytest.mark.parametrize("layers", [0, 10_001, 10**18])
def test_a_number_of_layers_that_no_model_has_is_refused(layers: int) -> None:
    """Guards what is made for each layer, before anything of them is read."""
    path = Path("config.json")
    raw = {"model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(ModelError, match=f"layers is {layers}, must be 1 to 10000"):
        model_config(path, find_family(path, "hugging_face", "model_type", "qwen3"), raw, "m")


def test_a_temperature_that_is_not_said_is_missed() -> None:
    """Guards a Ministral 3 that would run without one, and be right for the first positions alone."""
    raw = deepcopy(MINISTRAL3)
    text: Any = raw["text_config"]
    del text["rope_parameters"]["llama_4_scaling_beta"]
    with pytest.raises(ModelError, match="llama_4_scaling_beta is missing"):
        read(raw)


@pytest.mark.parametrize("said", [{}, {"rope_scaling": None}, {"rope_parameters": None}], ids=str)
def test_gpt_oss_scales_where_its_file_does_not_say(said: Raw) -> None:
    """Guards a file that leaves YaRN to its class, which has it as it was released."""
    config = read({key: value for key, value in GPT_OSS_20B.items() if key != "rope_scaling"} | said)
    assert (config.ropes, config.context_tokens) == (read(GPT_OSS_20B).ropes, 131072)


def test_a_rounding_of_yarn_that_is_null_is_none() -> None:
    """Guards a file that went through a tool which writes nulls: its classes take one for false, and a key that is
    missing for true."""
    raw: Any = deepcopy(GPT_OSS_20B)
    (unrounded,) = read(raw).ropes
    raw["rope_scaling"]["truncate"] = None
    assert read(raw).ropes == (unrounded,)
    del raw["rope_scaling"]["truncate"]
    (rounded,) = read(raw).ropes
    assert rounded != unrounded

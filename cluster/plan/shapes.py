"""Where a plan's model comes from: a file, a prepared model, or the published shapes below."""

import difflib
from pathlib import Path

import msgspec

from cluster.config import ConfigError
from cluster.plan.planner import Shape
from engine.model.config import CONFIG_FILE, ExpertOptions, ModelConfig, ModelError
from engine.model.families import (
    FAMILIES,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    REFUSED,
    SMOLLM3,
    Family,
)
from engine.model.prepared.cache import stored_dtype

_SIZELESS = (
    *("rope_scaling", "rope_parameters", "hidden_act", "hidden_activation"),
    *("use_sliding_window", "sliding_window", "layer_types"),
)


def _published(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    context_tokens: int,
    *,
    head_dim: int = 128,
    tied: bool = False,
    family: Family = LLAMA,
    experts: ExpertOptions | None = None,
) -> ModelConfig:
    return ModelConfig(
        family=family.name,
        qk_norm=family.qk_norm,
        norm_offset=family.norm_offset,
        activation=family.activation,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        context_tokens=context_tokens,
        norm_eps=1e-5,
        tied=tied,
        qkv_bias=family.qkv_bias,
        experts=experts,
    )


def _gemma(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, family: Family, head_dim: int = 256
) -> ModelConfig:
    vocab, context = (256000, 8192) if family is GEMMA2 else (262144, 32768)
    if family is GEMMA3 and layers >= 34:  # those that read images too
        vocab, context = 262208, 131072
    sizes = layers, hidden, heads, kv_heads, intermediate, vocab, context
    return _published(*sizes, head_dim=head_dim, tied=True, family=family)


_LLAMA_8B = _published(32, 4096, 32, 8, 14336, 128256, 131072)
_LLAMA_70B = _published(80, 8192, 64, 8, 28672, 128256, 131072)
_QWEN25_7B = _published(28, 3584, 28, 4, 18944, 152064, 32768, family=QWEN2)
_QWEN25_32B = _published(64, 5120, 40, 8, 27648, 152064, 32768, family=QWEN2)

_OF_8 = ExpertOptions(count=8, chosen=2, width=14336, normalise=True)
_30B_A3B = ExpertOptions(count=128, chosen=8, width=768, normalise=True)
_235B_A22B = msgspec.structs.replace(_30B_A3B, width=1536)

_OF_32 = ExpertOptions(count=32, chosen=4, width=2880, over_chosen=True, biases=True)
_OF_128 = msgspec.structs.replace(_OF_32, count=128)
_GPT_OSS_20B = msgspec.structs.replace(
    _published(24, 2880, 64, 8, 2880, 201088, 131072, head_dim=64, family=GPT_OSS, experts=_OF_32),
    qkv_bias=True,
    output_bias=True,
)

PUBLISHED: dict[str, ModelConfig] = {
    "llama-2-7b": _published(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _published(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _published(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": msgspec.structs.replace(_LLAMA_8B, context_tokens=8192),
    "llama-3-70b": msgspec.structs.replace(_LLAMA_70B, context_tokens=8192),
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.1-405b": _published(126, 16384, 128, 8, 53248, 128256, 131072),
    "llama-3.2-1b": _published(16, 2048, 32, 8, 8192, 128256, 131072, head_dim=64, tied=True),
    "llama-3.2-3b": _published(28, 3072, 24, 8, 8192, 128256, 131072, tied=True),
    "llama-3.3-70b": _LLAMA_70B,
    "mistral-7b-v0.3": _published(32, 4096, 32, 8, 14336, 32768, 32768, family=MISTRAL),
    "qwen2.5-0.5b": _published(
        24, 896, 14, 2, 4864, 151936, 32768, head_dim=64, tied=True, family=QWEN2
    ),
    "qwen2.5-1.5b": _published(28, 1536, 12, 2, 8960, 151936, 32768, tied=True, family=QWEN2),
    "qwen2.5-7b": _QWEN25_7B,
    "qwen2.5-14b": _published(48, 5120, 40, 8, 13824, 152064, 32768, family=QWEN2),
    "qwen2.5-32b": _QWEN25_32B,
    "qwen2.5-72b": _published(80, 8192, 64, 8, 29568, 152064, 32768, family=QWEN2),
    "qwen3-8b": _published(36, 4096, 32, 8, 12288, 151936, 40960, family=QWEN3),
    "qwen3-32b": _published(64, 5120, 64, 8, 25600, 151936, 40960, family=QWEN3),
    "mixtral-8x7b": _published(32, 4096, 32, 8, 14336, 32000, 32768, family=MIXTRAL, experts=_OF_8),
    "qwen3-30b-a3b": _published(48, 2048, 32, 4, 6144, 151936, 40960, family=QWEN3_MOE, experts=_30B_A3B),
    "qwen3-235b-a22b": _published(94, 4096, 64, 4, 12288, 151936, 40960, family=QWEN3_MOE, experts=_235B_A22B),
    "deepseek-r1-distill-qwen-7b": msgspec.structs.replace(_QWEN25_7B, context_tokens=131072),
    "deepseek-r1-distill-qwen-32b": msgspec.structs.replace(_QWEN25_32B, context_tokens=131072),
    "deepseek-r1-distill-llama-8b": _LLAMA_8B,
    "deepseek-r1-distill-llama-70b": _LLAMA_70B,
    "gemma-2-2b": _gemma(26, 2304, 8, 4, 9216, GEMMA2),
    "gemma-2-9b": _gemma(42, 3584, 16, 8, 14336, GEMMA2),
    "gemma-2-27b": _gemma(46, 4608, 32, 16, 36864, GEMMA2, head_dim=128),
    "gemma-3-270m": _gemma(18, 640, 4, 1, 2048, GEMMA3),
    "gemma-3-1b": _gemma(26, 1152, 4, 1, 6912, GEMMA3),
    "gemma-3-4b": _gemma(34, 2560, 8, 4, 10240, GEMMA3),
    "gemma-3-12b": _gemma(48, 3840, 16, 8, 15360, GEMMA3),
    "gemma-3-27b": _gemma(62, 5376, 32, 16, 21504, GEMMA3, head_dim=128),
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-120b": msgspec.structs.replace(_GPT_OSS_20B, layers=36, experts=_OF_128),
    "granite-3.1-8b": _published(40, 4096, 32, 8, 12800, 49155, 131072, tied=True, family=GRANITE),
    "mistral-nemo": _published(40, 5120, 32, 8, 14336, 131072, 131072, family=MISTRAL),
    "mistral-small-24b": _published(40, 5120, 32, 8, 32768, 131072, 32768, family=MISTRAL),
    "olmo-2-7b": _published(32, 4096, 32, 32, 11008, 100352, 4096, family=OLMO2),
    "olmo-2-13b": _published(40, 5120, 40, 40, 13824, 100352, 4096, family=OLMO2),
    "phi-3.5-mini": _published(32, 3072, 32, 32, 8192, 32064, 131072, head_dim=96, family=PHI3),
    "phi-4": _published(40, 5120, 40, 10, 17920, 100352, 16384, family=PHI3),
    "phi-4-mini": _published(32, 3072, 24, 8, 8192, 200064, 131072, tied=True, family=PHI3),
    "smollm3-3b": _published(36, 2048, 16, 4, 11008, 128256, 65536, tied=True, family=SMOLLM3),
    "smollm2-135m": _published(30, 576, 9, 3, 1536, 49152, 8192, head_dim=64, tied=True),
    "smollm2-1.7b": _published(24, 2048, 32, 32, 8192, 49152, 8192, head_dim=64, tied=True),
}
"""Sizes as in the `config.json` that each model's publisher put on Hugging Face; a test holds them against the
published numbers of parameters."""


def find_shape(named: str) -> Shape:
    """Return the shape of a file, a directory or a published model; "" is the demo model.

    Raises ModelError for a file that cannot be used, ConfigError for a name that nothing is known of.
    """
    path = Path(named).expanduser()
    if not named or path.exists():
        return _read(path if named else _demo())
    name = named.rpartition("/")[2].lower().removesuffix("-instruct")
    if name in PUBLISHED:
        return shape_of(msgspec.structs.replace(PUBLISHED[name], name=name))
    if path.suffix in (".gguf", ".json") or named.startswith((".", "/", "~")):
        raise ModelError(path, "no such file or directory")
    close = difflib.get_close_matches(name, PUBLISHED, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(PUBLISHED))}"
    raise ConfigError(f"flag --model: neither a path nor a known shape: {named!r}; {hint}")


def is_local(named: str) -> bool:
    """Say whether the model could be given to this engine, as far as its path tells."""
    return not named or Path(named).expanduser().exists()


def shape_of(model: ModelConfig, stored: str = "bfloat16") -> Shape:
    """Return the shape of a model. `stored`: how its weights are kept; published models in 16 bits."""
    return Shape(
        stored=stored,
        name=model.name or "model",
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        context_tokens=model.context_tokens,
        model=model,
    )


def _demo() -> Path:
    from engine.model.prepared.cache import find_demo_model

    return find_demo_model()


def _read(path: Path) -> Shape:
    """Read the configuration of a GGUF file, a prepared model, a Hugging Face directory, or the config.json of either.
    """
    if path.suffix == ".gguf":
        from engine.model.files.gguf_model import GGUFModel

        return shape_of(GGUFModel(path).config, stored_dtype(path))
    file = path / CONFIG_FILE if path.is_dir() else path
    from engine.model.files.checkpoint import find_family, read_json
    from engine.model.files.hf_model import said_dtype, text_side

    raw = text_side(read_json(file))
    if "num_hidden_layers" not in raw and raw.get("model_type"):
        # A family whose sizes have other names; raises with those that there are.
        find_family(file, "hugging_face", "model_type", raw["model_type"])
    if "num_hidden_layers" not in raw:
        prepared = ModelConfig.load(file.parent)
        return shape_of(prepared, prepared.dtype)
    (model, why), said = _hugging_face(file, raw), said_dtype(raw)
    shape = shape_of(model) if said is None else shape_of(model, said)
    not_run = f"for planning alone, as `headrace up` refuses it: {why}" if why else ""
    return msgspec.structs.replace(shape, not_run=not_run)


def _hugging_face(file: Path, raw: dict[str, object]) -> tuple[ModelConfig, str]:
    """Read a Hugging Face model. One that this engine does not run is read for its sizes alone, and comes with the
    reason: a plan needs no more. Raises ModelError."""
    from engine.model.files.checkpoint import find_family
    from engine.model.files.hf_model import model_config

    if raw.get("kv_lora_rank"):
        raise ModelError(file, "kv_lora_rank: latent attention is not planned for; give the sizes by flags")
    kind, name = raw.get("model_type"), file.resolve().parent.name
    if isinstance(kind, str) and kind in REFUSED:
        find_family(file, "hugging_face", "model_type", kind)  # raises: its layers keep what no plan counts
    try:
        return model_config(file, find_family(file, "hugging_face", "model_type", kind), raw, name), ""
    except ModelError as error:
        family = next((known for known in FAMILIES.values() if known.hugging_face == kind), LLAMA)
        sizes = {key: value for key, value in raw.items() if key not in _SIZELESS}
        return model_config(file, family, sizes, name), str(error)

"""The families this engine runs, as a table: where each prepared weight comes from. Another family is an addition.

A prepared weight is one or more source tensors stacked by rows (q, k and v become one product). `{layer}` is filled in
with the layer's number; a size is the name of a `ModelConfig` attribute.
"""

import msgspec

from engine.model.config import ModelConfig, QKNorm


class Source(msgspec.Struct, frozen=True):
    """A tensor in somebody else's file. `rope_heads` names the heads whose rows GGUF stores with rotary pairs
    interleaved (0, d/2, 1, d/2 + 1, ..) where Hugging Face stores halves."""

    hugging_face: str
    gguf: str
    rows: str
    rope_heads: str = ""


class Weight(msgspec.Struct, frozen=True):
    """A prepared weight `[rows of all sources, columns]`, or `[rows]` without columns; there if `option` is on."""

    name: str
    sources: tuple[Source, ...]
    columns: str = ""
    option: str = ""
    unless: str = ""

    def present(self, config: ModelConfig) -> bool:
        wanted = not self.option or bool(getattr(config, self.option))
        return wanted and not (self.unless and bool(getattr(config, self.unless)))

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        rows = sum(int(getattr(config, source.rows)) for source in self.sources)
        return (rows, int(getattr(config, self.columns))) if self.columns else (rows,)


class Family(msgspec.Struct, frozen=True):
    """`hugging_face` is the `model_type` of config.json, `gguf` the value of `general.architecture`."""

    name: str
    hugging_face: str
    gguf: str
    weights: tuple[Weight, ...]
    layer_weights: tuple[Weight, ...]
    qk_norm: QKNorm = ""


def _bias(weight: Weight, option: str) -> Weight:
    sources = tuple(
        msgspec.structs.replace(
            source,
            hugging_face=source.hugging_face.removesuffix("weight") + "bias",
            gguf=source.gguf.removesuffix("weight") + "bias",
        )
        for source in weight.sources
    )
    return Weight(f"{weight.name}_bias", sources, option=option)


def _head_norm(name: str) -> Weight:
    """A norm of one head's row, the same for every head of a layer."""
    source = Source(_HF + f"self_attn.{name}.weight", _GGUF + f"attn_{name}.weight", "head_dim")
    return Weight(name, (source,), option="qk_norm")


_HF = "model.layers.{layer}."
_GGUF = "blk.{layer}."

_QKV = Weight(
    "qkv",
    (
        Source(_HF + "self_attn.q_proj.weight", _GGUF + "attn_q.weight", "q_rows", "heads"),
        Source(_HF + "self_attn.k_proj.weight", _GGUF + "attn_k.weight", "kv_rows", "kv_heads"),
        Source(_HF + "self_attn.v_proj.weight", _GGUF + "attn_v.weight", "kv_rows"),
    ),
    columns="hidden",
)
# Only the converter of the Llama family interleaves rotary pairs in GGUF files.
_QKV_IN_HALVES = msgspec.structs.replace(
    _QKV,
    sources=tuple(msgspec.structs.replace(source, rope_heads="") for source in _QKV.sources),
)
_OUTPUT = Weight(
    "output",
    (Source(_HF + "self_attn.o_proj.weight", _GGUF + "attn_output.weight", "hidden"),),
    columns="q_rows",
)
_GATE_UP = Weight(
    "gate_up",
    (
        Source(_HF + "mlp.gate_proj.weight", _GGUF + "ffn_gate.weight", "intermediate"),
        Source(_HF + "mlp.up_proj.weight", _GGUF + "ffn_up.weight", "intermediate"),
    ),
    columns="hidden",
)
_DOWN = Weight(
    "down",
    (Source(_HF + "mlp.down_proj.weight", _GGUF + "ffn_down.weight", "hidden"),),
    columns="intermediate",
)

_ONCE = (
    Weight(
        "embedding",
        (Source("model.embed_tokens.weight", "token_embd.weight", "vocab"),),
        columns="hidden",
    ),
    Weight("norm", (Source("model.norm.weight", "output_norm.weight", "hidden"),)),
    Weight(
        "head",
        (Source("lm_head.weight", "output.weight", "vocab"),),
        columns="hidden",
        unless="tied",
    ),
)


def _layer(qkv: Weight) -> tuple[Weight, ...]:
    return (
        Weight(
            "attention_norm",
            (Source(_HF + "input_layernorm.weight", _GGUF + "attn_norm.weight", "hidden"),),
        ),
        qkv,
        _bias(qkv, "qkv_bias"),
        _head_norm("q_norm"),
        _head_norm("k_norm"),
        _OUTPUT,
        _bias(_OUTPUT, "output_bias"),
        Weight(
            "mlp_norm",
            (Source(_HF + "post_attention_layernorm.weight", _GGUF + "ffn_norm.weight", "hidden"),),
        ),
        _GATE_UP,
        _bias(_GATE_UP, "mlp_bias"),
        _DOWN,
        _bias(_DOWN, "mlp_bias"),
    )


LLAMA = Family(
    name="llama",
    hugging_face="llama",
    gguf="llama",
    weights=_ONCE,
    layer_weights=_layer(_QKV),
)
"""Llama 2, Llama 3 and SmolLM2: one architecture, told apart by sizes, rope scaling and tied embeddings."""

QWEN3 = Family(
    name="qwen3",
    hugging_face="qwen3",
    gguf="qwen3",
    weights=_ONCE,
    layer_weights=_layer(_QKV_IN_HALVES),
    qk_norm="head",
)
"""Qwen3's dense models (Qwen3 technical report, arXiv 2505.09388): Llama's, with query-key norm."""

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN3)}


def layer_key(layer: int, name: str) -> str:
    """The name of a layer's weight in the prepared index."""
    return f"layers.{layer}.{name}"

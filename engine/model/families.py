"""The families this engine runs, as a table: where each prepared weight comes from. Another family is an addition.

A prepared weight is one or more source tensors stacked by rows (q, k and v become one product). `{layer}` is filled in
with the layer's number, `{expert}` with the expert's; a size is the name of a `ModelConfig` attribute.
"""

from typing import Literal

import msgspec

from engine.model.config import Activation, ModelConfig, QKNorm


class Source(msgspec.Struct, frozen=True):
    """A tensor in somebody else's file. `rope_heads` names the heads whose rows GGUF stores with rotary pairs
    interleaved (0, d/2, 1, d/2 + 1, ..) where Hugging Face stores halves. `is_norm`: GGUF's converter has added the
    config's `norm_offset`."""

    hugging_face: str
    gguf: str
    rows: str
    rope_heads: str = ""
    is_norm: bool = False
    of_all: Literal["", "all", "even", "odd"] = ""
    """Hugging Face has one tensor for all experts, transposed unless it is of codes; this one's rows are all of it, the
    even ones or the odd ones."""


class Weight(msgspec.Struct, frozen=True):
    """A prepared weight `[rows of all sources, columns]`, or `[rows]` without columns; there if `option` is on. With
    `each_expert` there is one for each, `[experts, rows, columns]`. `layers`: those that have it, all unless it says
    that they are those with experts or without."""

    name: str
    sources: tuple[Source, ...]
    columns: str = ""
    option: str = ""
    unless: str = ""
    each_expert: bool = False
    layers: Literal["", "mixture", "dense"] = ""

    def present(self, config: ModelConfig, layer: int = 0) -> bool:
        wanted = not self.option or bool(getattr(config, self.option))
        if self.layers and config.is_mixture(layer) != (self.layers == "mixture"):
            return False
        return wanted and not (self.unless and bool(getattr(config, self.unless)))

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        rows = sum(int(getattr(config, source.rows)) for source in self.sources)
        whole = (rows, *self.columns_of(config))
        return (config.expert_count, *whole) if self.each_expert else whole

    def columns_of(self, config: ModelConfig) -> tuple[int, ...]:
        """Return the shape of one row."""
        return (int(getattr(config, self.columns)),) if self.columns else ()


class Family(msgspec.Struct, frozen=True):
    """`hugging_face` is the `model_type` of config.json, `gguf` the value of `general.architecture`; empty where files
    of another family stand for this one's too. What follows the weights is what no file says."""

    name: str
    hugging_face: str
    gguf: str
    weights: tuple[Weight, ...]
    layer_weights: tuple[Weight, ...]
    qk_norm: QKNorm = ""
    qkv_bias: bool = False
    norm_offset: float = 0.0
    activation: Activation = "silu"
    tied: bool = False
    """Where config.json does not say so."""


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


def _norm(name: str, hugging_face: str, gguf: str, rows: str = "hidden") -> Weight:
    return Weight(name, (Source(f"{hugging_face}.weight", f"{gguf}.weight", rows, is_norm=True),))


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
    _norm("norm", "model.norm", "output_norm"),
    Weight(
        "head",
        (Source("lm_head.weight", "output.weight", "vocab"),),
        columns="hidden",
        unless="tied",
    ),
)


# Fused as the engine has them: rows of q, k and v, and the gate's before those of up.
_QKV_FUSED = Weight(
    "qkv", (Source(_HF + "self_attn.qkv_proj.weight", _GGUF + "attn_qkv.weight", "qkv_rows"),), "hidden"
)
_GATE_UP_FUSED = Weight(
    "gate_up", (Source(_HF + "mlp.gate_up_proj.weight", _GGUF + "ffn_up.weight", "gate_up_rows"),), "hidden"
)
_PRE = (
    _norm("attention_norm", _HF + "input_layernorm", _GGUF + "attn_norm"),
    _norm("mlp_norm", _HF + "post_attention_layernorm", _GGUF + "ffn_norm"),
)
_POST = (
    _norm("attention_post_norm", _HF + "post_attention_layernorm", _GGUF + "post_attention_norm"),
    _norm("mlp_post_norm", _HF + "post_feedforward_layernorm", _GGUF + "post_ffw_norm"),
)
_AROUND = (_PRE[0], _norm("mlp_norm", _HF + "pre_feedforward_layernorm", _GGUF + "ffn_norm"), *_POST)


def _qk_norms(q_rows: str, k_rows: str) -> tuple[Weight, ...]:
    return (
        _norm("q_norm", _HF + "self_attn.q_norm", _GGUF + "attn_q_norm", q_rows),
        _norm("k_norm", _HF + "self_attn.k_norm", _GGUF + "attn_k_norm", k_rows),
    )


_OF_HEADS = _qk_norms("head_dim", "head_dim")
_OF_ALL_HEADS = _qk_norms("q_rows", "kv_rows")


def _dense(weight: Weight) -> Weight:
    return msgspec.structs.replace(weight, layers="dense")


def _layer(
    qkv: Weight, *more: Weight, norms: tuple[Weight, ...] = _PRE, gate_up: Weight = _GATE_UP
) -> tuple[Weight, ...]:
    return (
        *norms,
        qkv,
        _bias(qkv, "qkv_bias"),
        *more,
        _OUTPUT,
        _bias(_OUTPUT, "output_bias"),
        _dense(gate_up),
        _dense(_bias(gate_up, "mlp_bias")),
        _dense(_DOWN),
        _dense(_bias(_DOWN, "mlp_bias")),
    )


def _experts_of_one_tensor() -> tuple[Weight, ...]:
    """gpt-oss's router and experts: Hugging Face has the rows of gate and up in turns. All have biases."""

    def one(name: str, gguf: str, rows: str, of_all: Literal["all", "even", "odd"]) -> Source:
        return Source(f"{_HF}mlp.experts.{name}_proj", f"{_GGUF}ffn_{gguf}_exps.weight", rows, of_all=of_all)

    router = Weight(
        "router",
        (Source(f"{_HF}mlp.router.weight", f"{_GGUF}ffn_gate_inp.weight", "expert_count"),),
        columns="hidden",
        layers="mixture",
    )
    gate_up = Weight(
        "experts_gate_up",
        (one("gate_up", "gate", "expert_width", "even"), one("gate_up", "up", "expert_width", "odd")),
        columns="hidden",
        each_expert=True,
        layers="mixture",
    )
    down = Weight(
        "experts_down", (one("down", "down", "hidden", "all"),), "expert_width", each_expert=True, layers="mixture"
    )
    biases = tuple(
        msgspec.structs.replace(
            _bias(weight, "expert_biases"),
            each_expert=True,
            layers="mixture",
            sources=tuple(
                msgspec.structs.replace(
                    source,
                    hugging_face=f"{source.hugging_face}_bias",
                    gguf=source.gguf.removesuffix("weight") + "bias",
                )
                for source in weight.sources
            ),
        )
        for weight in (gate_up, down)
    )
    router_bias = msgspec.structs.replace(_bias(router, "expert_biases"), layers="mixture")
    return (router, router_bias, gate_up, down, *biases)


def _experts(router: str, experts: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """A router and its experts, whose matrices Hugging Face has one by one, and GGUF in one tensor for all."""

    def source(name: str, gguf: str, rows: str) -> Source:
        return Source(f"{_HF}{experts}.{{expert}}.{name}.weight", f"{_GGUF}ffn_{gguf}_exps.weight", rows)

    return (
        Weight(
            "router",
            (Source(f"{_HF}{router}.weight", f"{_GGUF}ffn_gate_inp.weight", "expert_count"),),
            columns="hidden",
            layers="mixture",
        ),
        Weight(
            "experts_gate_up",
            (source(gate, "gate", "expert_width"), source(up, "up", "expert_width")),
            columns="hidden",
            each_expert=True,
            layers="mixture",
        ),
        Weight(
            "experts_down",
            (source(down, "down", "hidden"),),
            columns="expert_width",
            each_expert=True,
            layers="mixture",
        ),
    )


LLAMA = Family(
    name="llama",
    hugging_face="llama",
    gguf="llama",
    weights=_ONCE,
    layer_weights=_layer(_QKV),
)
"""Llama 2, Llama 3 and SmolLM2: one architecture, told apart by sizes, rope scaling and tied embeddings."""

MISTRAL = msgspec.structs.replace(LLAMA, name="mistral", hugging_face="mistral", gguf="")
"""Mistral (arXiv 2310.06825): Llama's, the first with a window on all layers. Its GGUF files say that they are Llama's.
"""

MINISTRAL3 = msgspec.structs.replace(LLAMA, name="ministral3", hugging_face="ministral3", gguf="mistral3")
"""Ministral 3: Mistral's, with YaRN, and queries that are scaled by their position."""

GRANITE = msgspec.structs.replace(LLAMA, name="granite", hugging_face="granite", gguf="granite")
"""Granite 3 (IBM): Llama's, with factors of embedding, residual branches, scores and logits."""

SMOLLM3 = msgspec.structs.replace(LLAMA, name="smollm3", hugging_face="smollm3", gguf="smollm3", tied=True)
"""SmolLM3: Llama's, but that some layers rotate nothing (arXiv 2501.18795)."""

QWEN2 = Family(
    name="qwen2",
    hugging_face="qwen2",
    gguf="qwen2",
    weights=_ONCE,
    layer_weights=_layer(_QKV_IN_HALVES),
    qkv_bias=True,
)
"""Qwen2, Qwen2.5 and what was distilled into them (arXiv 2412.15115): Llama's, with biases of queries, keys, values."""

QWEN3 = Family(
    name="qwen3",
    hugging_face="qwen3",
    gguf="qwen3",
    weights=_ONCE,
    layer_weights=_layer(_QKV_IN_HALVES, *_OF_HEADS),
    qk_norm="head",
)
"""Qwen3's dense models (Qwen3 technical report, arXiv 2505.09388): Llama's, with query-key norm."""

PHI3 = Family(
    name="phi3",
    hugging_face="phi3",
    gguf="phi3",
    weights=_ONCE,
    layer_weights=_layer(_QKV_FUSED, gate_up=_GATE_UP_FUSED),
)
"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (arXiv 2404.14219): fused matrices, LongRoPE, heads rotated in part."""

GEMMA2 = Family(
    name="gemma2",
    hugging_face="gemma2",
    gguf="gemma2",
    weights=_ONCE,
    layer_weights=_layer(_QKV_IN_HALVES, norms=_AROUND),
    norm_offset=1.0,
    activation="gelu_tanh",
    tied=True,
)
"""Gemma 2 (arXiv 2408.00118): norms before and after each branch, capped scores and logits, every other layer local."""

GEMMA3 = msgspec.structs.replace(
    GEMMA2,
    name="gemma3",
    hugging_face="gemma3_text",
    gguf="gemma3",
    layer_weights=_layer(_QKV_IN_HALVES, *_OF_HEADS, norms=_AROUND),
    qk_norm="head",
)
"""Gemma 3's text side (arXiv 2503.19786): query-key norm for caps, five local layers to a global one, two thetas."""

OLMO2 = Family(
    name="olmo2",
    hugging_face="olmo2",
    gguf="olmo2",
    weights=_ONCE,
    layer_weights=_layer(_QKV_IN_HALVES, *_OF_ALL_HEADS, norms=_POST),
    qk_norm="whole",
)
"""OLMo 2 (arXiv 2501.00656): norms after each branch alone, and of all heads' queries as one row."""

OLMO3 = msgspec.structs.replace(OLMO2, name="olmo3", hugging_face="olmo3", gguf="")
"""OLMo 3: OLMo 2's, three of four layers local. Its GGUF files say that they are OLMo 2's."""

MIXTRAL = Family(
    name="mixtral",
    hugging_face="mixtral",
    gguf="",
    weights=_ONCE,
    layer_weights=_layer(
        _QKV, *_experts("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
    ),
)
"""Mixtral (arXiv 2401.04088): Mistral's, with experts in all layers. Its GGUF files say that they are Llama's."""

QWEN3_MOE = Family(
    name="qwen3_moe",
    hugging_face="qwen3_moe",
    gguf="qwen3moe",
    weights=_ONCE,
    layer_weights=_layer(
        _QKV_IN_HALVES, *_OF_HEADS, *_experts("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
    ),
    qk_norm="head",
)
"""Qwen3's mixtures of experts, such as 30B-A3B: the dense ones', with experts in all layers or most."""

GPT_OSS = Family(
    name="gpt_oss",
    hugging_face="gpt_oss",
    gguf="gpt-oss",
    weights=_ONCE,
    layer_weights=_layer(
        _QKV_IN_HALVES,
        Weight("sinks", (Source(_HF + "self_attn.sinks", _GGUF + "attn_sinks.weight", "heads"),)),
        *_experts_of_one_tensor(),
        norms=(_PRE[0], _norm("mlp_norm", _HF + "post_attention_layernorm", _GGUF + "post_attention_norm")),
    ),
)
"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped gate, sinks, every other layer local."""

_ALL = (
    LLAMA, MISTRAL, MINISTRAL3, GRANITE, SMOLLM3, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3, OLMO2, OLMO3,
    MIXTRAL, QWEN3_MOE, GPT_OSS,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}

_LATENT = "keys and values are kept as one latent row (MLA), for which there are no kernels"
_HYBRID = "some layers keep a recurrent state instead of keys and values, which cannot be paged or migrated"
_CHUNKED = "layers attend within chunks, and queries have a temperature by position"

_STATE = "it keeps a state instead of keys and values"
_SHARED = "layers share keys and values, or differ in the size of their heads"

REFUSED: dict[str, str] = {
    name: why
    for why, names in {
        _LATENT: "deepseek_v2 deepseek_v3 deepseek_v32 deepseek2 deepseek2-ocr kimi_k2 minicpm3 mistral4 "
        "mistral_large4 mistral_large4_text glm4_moe_lite glm_moe_dsa glm-dsa longcat_flash youtu plm axk1 axk2 hy_v4 "
        "dots3_note dots3_note_text",
        _CHUNKED: "llama4 llama4_text",
        _HYBRID: "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen35 qwen35moe qwen3_next qwen3next qwen4_exp "
        "qwen4_exp_text lfm2 lfm2_moe lfm2moe lfm3 jamba bamba granitemoehybrid granitehybrid falcon_h1 falcon-h1 "
        "nemotron_h nemotron-h nemotron_h_moe kimi_linear kimi-linear zamba zamba2 minimax minimax_text_01 minimax_m1 "
        "olmo_hybrid plamo2 bailing_hybrid glm5_next glm5_next_text recurrent_gemma hrm_text",
        _STATE: "mamba mamba2 falcon_mamba rwkv rwkv6 rwkv6qwen2 rwkv7 arwkv7",
        _SHARED: "gemma3n gemma3n_text gemma4 gemma4_text",
        "Gemma 1 is not supported, Gemma 2 and 3 are": "gemma",
    }.items()
    for name in names.split()
}
"""Why families that are asked for are not run, by `model_type` or `general.architecture`."""


def layer_key(layer: int, name: str) -> str:
    """The name of a layer's weight in the prepared index."""
    return f"layers.{layer}.{name}"

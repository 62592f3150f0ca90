"""The Llama family and Qwen3 against transformers on small random models, from safetensors and from GGUF, in more
shapes than the other families (`test_every_family.py`)."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine.backends.attention import LayerInput, TorchAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import map_weights
from engine.storage.paged import PagedKV
from engine.types import BlockId
from tests.engine.model.checkpoints import (
    GGUF_NAMES,
    LLAMA3,
    VOCAB,
    byte_tokens,
    llama3_factors,
    randomized,
    rotary_pairs,
    save_hf,
)

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
CASES: dict[str, dict[str, Any]] = {
    "mha": {},
    "untied": {"tie_word_embeddings": False},
    "gqa3": {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3},
    "gqa4": {"num_key_value_heads": 2},
    "gqa8": {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8},
    "mqa": {"num_key_value_heads": 1},
    "wide_heads": {"head_dim": 32, "num_key_value_heads": 4},
    "llama3_rope": {"rope_parameters": LLAMA3, "num_key_value_heads": 2},
    "linear_rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    },
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
}
QWEN3_CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen3_untied": {"tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 32},
    "qwen3_biases": {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 8},
}


Reference = LlamaForCausalLM | Qwen3ForCausalLM


def reference(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A random model whose every weight matters: norms are not ones, biases are not zeros."""
    torch.manual_seed(seed)
    return randomized(LlamaForCausalLM(LlamaConfig(**{**BASE, **options})))


def qwen3_reference(seed: int = 0, **options: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return randomized(Qwen3ForCausalLM(Qwen3Config(**{**BASE, **options})))


def save_gguf(
    model: Reference, path: Path, kind: gguf.GGMLQuantizationType | None = None
) -> str:
    """Write the model as llama.cpp's converter would; with `kind`, matrices are quantized and `model` takes on the
    quantized values, so that it stays the reference."""
    config = model.config
    interleaved = config.model_type == "llama"
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config.rope_parameters, config.head_dim))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(byte_tokens())
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges([])
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, leaf = name.rpartition(".")
        layer, rest = "", stem
        if stem.startswith("model.layers."):
            _, _, number, rest = stem.split(".", 3)
            layer = f"blk.{number}."
        values = weight.numpy()
        if interleaved and ".q_proj" in name:
            values = rotary_pairs(values, config.num_attention_heads)
        elif interleaved and ".k_proj" in name:
            values = rotary_pairs(values, config.num_key_value_heads)
        if kind is None or values.ndim == 1:
            writer.add_tensor(f"{layer}{GGUF_NAMES[rest]}.{leaf}", values)
        else:
            packed = gguf.quants.quantize(values, kind)
            writer.add_tensor(f"{layer}{GGUF_NAMES[rest]}.{leaf}", packed, raw_dtype=kind)
            original = gguf.quants.quantize(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(original, kind).copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


class Ours:
    """One sequence on the prepared model, over paged KV with scattered blocks."""

    def __init__(self, model: Llama, attention: TorchAttention | None = None) -> None:
        config = model.config
        self.model = model
        self.kv = PagedKV(config.kv_layout(16), 16)
        self.kv.tensor.fill_(float("nan"))
        self.blocks = [11, 2, 7, 0, 14, 5, 9, 3, 12, 1]
        self.attention = attention or TorchAttention(config.heads)
        self.length = 0

    def step(self, tokens: list[int]) -> torch.Tensor:
        row = trial_row([0] * self.length + tokens, self.length, [BlockId(block) for block in self.blocks])
        batch = ForwardBatch.build([row], 16, row_multiple=self.attention.row_multiple)
        self.length += len(tokens)
        self.attention.begin(batch, self.kv)
        return self.model.forward(batch, self.kv, self.attention)[0]

    def close(self) -> None:
        self.kv.close()


def compare(source: str, model: Reference, cache: Path) -> None:
    """Logits of a chunked prompt within 1e-4, then 20 greedy tokens equal."""
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(0, VOCAB, (75,), generator=generator).tolist()
    ours = Ours(load_model(prepare(source, cache)))
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0]
        first = ours.step(prompt[:21])
        last = ours.step(prompt[21:])
        assert wanted[-1].std() > 0.1, "a flat reference would prove nothing"
        torch.testing.assert_close(first, wanted[20], atol=1e-4, rtol=0)
        torch.testing.assert_close(last, wanted[-1], atol=1e-4, rtol=0)
        tokens = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        produced = [int(last.argmax())]
        while len(produced) < 20:
            produced.append(int(ours.step(produced[-1:]).argmax()))
    assert produced == tokens
    ours.close()


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers_from_safetensors(case: str, tmp_path: Path) -> None:
    """Guards the forward pass: fused rows in the wrong order, a wrong rope, a forgotten bias or option."""
    model = reference(**CASES[case])
    compare(save_hf(model, tmp_path / "model"), model, tmp_path / "cache")


@pytest.mark.parametrize("case", ["untied", "gqa3", "wide_heads", "llama3_rope", "biases"])
def test_equals_transformers_from_gguf(case: str, tmp_path: Path) -> None:
    """Guards the way back from llama.cpp's order of q and k rows (and of their biases), and its rope factors."""
    model = reference(**CASES[case])
    compare(save_gguf(model, tmp_path / "model.gguf"), model, tmp_path / "cache")


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize("case", QWEN3_CASES)
def test_qwen3_equals_transformers(case: str, form: str, tmp_path: Path) -> None:
    """Guards query-key norm: left out, of the wrong head or after the rotation, all of which change every logit; and
    Qwen3's GGUF files, whose rotary rows stand in halves."""
    model = qwen3_reference(**QWEN3_CASES[case])
    save = save_hf if form == "safetensors" else save_gguf
    compare(save(model, tmp_path / f"model.{form}"), model, tmp_path / "cache")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_quantized_gguf_keeps_its_values(kind: str, tmp_path: Path) -> None:
    """Guards dequantizing: rows permuted as bytes, or blocks that run over the end of a row."""
    model = reference(num_key_value_heads=2)
    with torch.no_grad():
        source = save_gguf(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    compare(source, model, tmp_path / "cache")


def test_sharded_bfloat16_directory(tmp_path: Path) -> None:
    """Guards the shard index, and bfloat16 bytes, which numpy cannot read by itself."""
    model = reference(tie_word_embeddings=False)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    twin = reference(tie_word_embeddings=False).bfloat16()
    source = save_hf(twin, tmp_path / "model", max_shard_size="40KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    compare(source, model, tmp_path / "cache")


def test_old_style_rope_fields(tmp_path: Path) -> None:
    """config.json of transformers 4 has rope_theta and rope_scaling where 5 has rope_parameters."""
    import json

    model = reference(rope_parameters=LLAMA3)
    source = save_hf(model, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope
    path.write_text(json.dumps(raw))
    compare(source, model, tmp_path / "cache")


class _NoAttention(TorchAttention):
    """Hands the queries through, so that only the model's own products are looked at."""

    def attend(self, given: LayerInput) -> torch.Tensor:
        return given.qkv[:, : self._heads].reshape(len(given.qkv), -1)


def _logits(model: Llama, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    batch = SimpleNamespace(tokens=tokens, positions=positions, logit_rows=torch.arange(4))
    forward: Callable[..., torch.Tensor] = model.forward
    kv = SimpleNamespace(layout=model.config.kv_layout(16))
    return forward(batch, kv, _NoAttention(model.config.heads))


@pytest.mark.parametrize("case", ["mha", "gqa3"])
def test_a_row_does_not_depend_on_its_batch(case: str, tmp_path: Path) -> None:
    """Guards recovery and migration, which promise the very tokens of an undisturbed run: with rows padded to a
    multiple of four, a row's bits are the same in any company."""
    model = load_model(prepare(save_hf(reference(**CASES[case]), tmp_path / "m"), tmp_path / "c"))
    tokens = torch.randint(0, VOCAB, (128,), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(128) % 97
    alone = _logits(model, tokens[:4], positions[:4])
    for rows in (8, 12, 32, 100, 128):
        assert torch.equal(_logits(model, tokens[:rows], positions[:rows]), alone), rows


def test_weights_are_mapped_and_not_copied(tmp_path: Path) -> None:
    """Guards memory: each worker of a host holding its own copy of the weights."""
    folder = prepare(save_hf(reference(), tmp_path / "model"), tmp_path / "cache")
    weights = map_weights(folder)
    (mapped,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    first, end = (int(address, 16) for address in mapped.split()[0].split("-"))
    for name, weight in weights.items():
        assert first <= weight.data_ptr() <= end - weight.nbytes, name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_as_torch_does(dtype: str, tmp_path: Path) -> None:
    """Guards the hand-made bfloat16 rounding."""
    model = reference()
    folder = prepare(save_hf(model, tmp_path / "model"), tmp_path / "cache", dtype)
    wanted = model.model.embed_tokens.weight.to(getattr(torch, dtype))
    assert torch.equal(map_weights(folder)["embedding"], wanted)
    assert load_model(folder).config.dtype == dtype

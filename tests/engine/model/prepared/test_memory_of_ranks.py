"""What a tensor-parallel rank takes of a host's memory while a large model is prepared and its part is loaded: of each
quantized format, of a sharded directory in 16 bits, and of GGUF files. No matrix is widened as a whole, and no rank has
another's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from tests.engine.model import hf_quantized as packing
from tests.engine.model.checkpoints import GGUF_NAMES, byte_tokens, save_tokenizer
from tests.engine.model.prepared.measuring import measured
from tests.engine.model.quantized import Kind, random_blocks

pytestmark = pytest.mark.slow

HIDDEN, WIDTH, HEADS, VOCAB, RANKS = 2048, 8192, 16, 320, 2
SHAPES = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"} | {
    "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN), "mlp.down_proj": (HIDDEN, WIDTH)
}  # fmt: skip
WIDE_BYTES = 4 * sum(rows * columns for rows, columns in SHAPES.values())
LARGEST_BYTES = 4 * 2 * WIDTH * HIDDEN
"""Gate and up are one matrix; in 32 bits."""


def words(*shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(0)).int()


def halves(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)).half() * 0.01 + 0.001


def gptq(bits: int, rows: int, columns: int) -> dict[str, Tensor]:
    groups, each = columns // 128, 32 // bits
    tensors = {"qweight": words(columns // each, rows), "qzeros": words(groups, rows // each)}
    return tensors | {"scales": halves(groups, rows), "g_idx": (torch.arange(columns) // 128).int()}


def awq(rows: int, columns: int) -> dict[str, Tensor]:
    groups = columns // 128
    return {
        "qweight": words(columns, rows // 8), "qzeros": words(groups, rows // 8), "scales": halves(groups, rows)
    }  # fmt: skip


def packed(bits: int, rows: int, columns: int) -> dict[str, Tensor]:
    return {
        "weight_packed": words(rows, columns * bits // 32),
        "weight_scale": halves(rows, columns // 128),
        "weight_shape": torch.tensor([rows, columns]),
    }


def fp8(rows: int, columns: int) -> dict[str, Tensor]:
    numbers = (torch.rand(rows, columns) - 0.5).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": halves(rows // 128, columns // 128).float()}


def mxfp4(rows: int, columns: int) -> dict[str, Tensor]:
    blocks = words(rows, columns // 8).view(torch.uint8).view(rows, columns // 32, 16)
    return {"weight_blocks": blocks, "weight_scales": torch.full((rows, columns // 32), 120, dtype=torch.uint8)}


def plain(rows: int, columns: int) -> dict[str, Tensor]:
    return {"weight": (torch.rand(rows, columns) - 0.5).bfloat16()}


INT = {"type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[int, int], dict[str, Tensor]]]] = {
    "gptq": (packing.gptq(group=128).config, lambda rows, columns: gptq(4, rows, columns)),
    "gptq-8": (packing.gptq(8, group=128).config, lambda rows, columns: gptq(8, rows, columns)),
    "awq": (packing.awq(128).config, awq),
    "w4a16": (packing.compressed("pack-quantized", INT | {"num_bits": 4}), lambda r, c: packed(4, r, c)),
    "w8a16": (packing.compressed("pack-quantized", INT | {"num_bits": 8}), lambda r, c: packed(8, r, c)),
    "fp8": (packing.fp8_blocks().config, fp8),
    "mxfp4": (packing.mxfp4().config, mxfp4),
    "sharded bfloat16": ({}, plain),
}


def save(folder: Path, form: str) -> str:
    """Write one layer, each matrix in a file of its own."""
    config, pack = FORMATS[form]
    model = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=256, tie_word_embeddings=True, dtype=torch.bfloat16,
    )  # fmt: skip
    model.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | ({"quantization_config": config} if config else {})))
    save_tokenizer(folder, VOCAB)
    layer = "model.layers.0."
    small = {f"{layer}{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("input", "post_attention")}
    small |= {"model.norm.weight": torch.ones(HIDDEN), "model.embed_tokens.weight": torch.rand(VOCAB, HIDDEN)}
    save_file(small, folder / "small.safetensors")
    for name, (rows, columns) in SHAPES.items():
        tensors = {f"{layer}{name}.{leaf}": tensor for leaf, tensor in pack(rows, columns).items()}
        save_file(tensors, folder / f"{name}.safetensors")
    return str(folder)


def save_gguf(path: Path, kind: Kind) -> str:
    """Write one layer of the same sizes, its matrices in `kind`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(byte_tokens())
    writer.add_token_types([1] * VOCAB)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    matrices = {f"blk.0.{GGUF_NAMES[name]}": shape for name, shape in SHAPES.items()}
    for name, (rows, columns) in (matrices | {"token_embd": (VOCAB, HIDDEN)}).items():
        if kind == Kind.BF16:
            raw = plain(rows, columns)["weight"].view(torch.uint8).numpy()
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", random_blocks(kind, rows, columns), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


GGUF_KINDS = ("BF16", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "MXFP4")


@pytest.mark.parametrize("form", [*FORMATS, *(f"gguf {kind}" for kind in GGUF_KINDS)])
def test_a_rank_widens_no_matrix_and_holds_its_part(form: str, tmp_path: Path) -> None:
    """Guards hosts that have room for a model as it comes and not for its 32 bits: neither who prepares it nor a rank
    that loads its part ever has a matrix so, and a rank's weights are its share of what is kept."""
    made_by_gguf, kept_wide = form.startswith("gguf"), form in ("sharded bfloat16", "gguf BF16")
    path = tmp_path / ("model.gguf" if made_by_gguf else "model")
    source = save_gguf(path, Kind[form.removeprefix("gguf ")]) if made_by_gguf else save(path, form)
    found = [measured(source, tmp_path / "cache", rank, RANKS) for rank in range(RANKS)]
    print(
        f"\n{form}: bytes of their own while preparing, while loading, and of weights: {found}; "
        f"{WIDE_BYTES} in 32 bits, {LARGEST_BYTES} the largest matrix"
    )
    for preparing, loading, weights, _ in found:
        # Rows of several matrices are copied as they are kept, then packed by slabs; what a slab frees may stay.
        assert preparing < 0.25 * LARGEST_BYTES
        assert loading < (0.95 if kept_wide else 0.6) * LARGEST_BYTES
        assert weights < 0.6 * WIDE_BYTES * (0.55 if kept_wide else 0.33)

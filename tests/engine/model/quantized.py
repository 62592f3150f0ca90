"""GGUF models of one layer and random bytes, in whatever quantization each of their matrices is wanted."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from tokenizers import pre_tokenizers

Kind = gguf.GGMLQuantizationType

VOCAB, HIDDEN = 64, 256
MATRICES = {
    "token_embd": VOCAB,
    "blk.0.attn_q": HIDDEN,
    "blk.0.attn_k": HIDDEN // 2,
    "blk.0.attn_v": HIDDEN // 2,
    "blk.0.attn_output": HIDDEN,
    "blk.0.ffn_gate": HIDDEN,
    "blk.0.ffn_up": HIDDEN,
    "blk.0.ffn_down": HIDDEN,
}
"""The matrices of the model with their rows; all have `HIDDEN` columns."""

VECTORS = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """A tensor's bytes `[rows, bytes per row]`: any code, scales of both signs, some of them zero or subnormal."""
    block, size = GGML_QUANT_SIZES[kind]
    noise = np.random.default_rng(seed)
    raw = noise.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    if kind == Kind.MXFP4:
        raw[..., 0] = noise.choice(np.array([0, 1, 2, *range(112, 124)], np.uint8), raw.shape[:2])
        return raw.reshape(rows, -1)
    # Each 16-bit scale begins its block, but in Q6_K, where it ends it; a minimum follows where the kind has one.
    places = [size - 2] if kind == Kind.Q6_K else [0, 2] if kind.name[3:] in ("1", "K") else [0]
    for place in places:
        scales = noise.normal(scale=0.01, size=raw.shape[:2]).astype("<f2")
        scales[noise.random(scales.shape) < 0.1] = 0
        scales[noise.random(scales.shape) < 0.1] = -3e-7
        raw[..., place : place + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def write_model(path: Path, kind_of: Callable[[str], Kind], tied: bool = True, wide: bool = False) -> str:
    """`kind_of` is asked for each of `MATRICES`, and for `output` where the embedding is not `tied`. `wide`: the same
    values, as the `gguf` package dequantizes them, in 32 bits."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB])
    writer.add_token_types([1] * VOCAB)
    for name in VECTORS:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    matrices = MATRICES if tied else {**MATRICES, "output": VOCAB}
    for seed, (name, rows) in enumerate(matrices.items()):
        kind = kind_of(name)
        if kind == Kind.F32:
            values = np.random.default_rng(seed).normal(size=(rows, HIDDEN)).astype(np.float32)
            writer.add_tensor(f"{name}.weight", values)
        else:
            raw = random_blocks(kind, rows, HIDDEN, seed)
            if wide:
                writer.add_tensor(f"{name}.weight", gguf.quants.dequantize(raw, kind))
            else:
                writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)

"""What preparing and opening a large model takes of a host: memory of its own, and bytes on disk."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import MixtralConfig

from tests.engine.model.checkpoints import save_tokenizer
from tests.engine.model.prepared.measuring import measured

LAYERS, HIDDEN, WIDTH, EXPERTS, VOCAB = 3, 512, 2048, 8, 4096


def save_mixture(folder: Path) -> int:
    """Write a random mixture of experts in bfloat16, matrix by matrix; returns the bytes of its weights."""
    folder.mkdir()
    noise = torch.Generator().manual_seed(1)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=noise) * 0.02).bfloat16()

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN).bfloat16()
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}{name}.weight"] = torch.ones(HIDDEN).bfloat16()
        for name in "qkvo":
            tensors[f"{stem}self_attn.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        tensors[f"{stem}block_sparse_moe.gate.weight"] = matrix(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (("w1", (WIDTH, HIDDEN)), ("w2", (HIDDEN, WIDTH)), ("w3", (WIDTH, HIDDEN))):
                tensors[f"{stem}block_sparse_moe.experts.{expert}.{name}.weight"] = matrix(*shape)
    save_file(tensors, folder / "model.safetensors")
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=EXPERTS, num_experts_per_tok=2, max_position_embeddings=512,
    )  # fmt: skip
    config.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "torch_dtype": "bfloat16"}))
    save_tokenizer(folder, VOCAB)
    return sum(tensor.nbytes for tensor in tensors.values())


def test_a_mixture_is_nowhere_in_32_bits(tmp_path: Path) -> None:
    """Guards hosts that have room for a model's 16 bits, and not for 32: on disk the folder has it as it came and in
    panels, both in 16 bits; in memory, what is not mapped is a small part of it; and a worker says what it reads."""
    size = save_mixture(tmp_path / "model")
    assert size > 150e6
    found = measured(tmp_path / "model", tmp_path / "cache")
    assert max(found.preparing, found.loading) < 0.35 * size
    assert found.weights < 1.05 * size
    assert sum(file.stat().st_size for file in found.folder.iterdir()) < 2.05 * size

"""Weights on a card: streamed through pinned buffers, they are those that the CPU maps."""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.random_model import reshard, save_checkpoint
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import load_weights, map_weights
from engine.model.prepared.shards import ShardIndex, by_reference
from engine.model.prepared.streaming import stream

pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}


def test_they_are_the_mapped_ones(tmp_path: Path) -> None:
    """Guards the ring of pinned buffers: one that is filled again before its copies have run puts later bytes into
    earlier tensors. Small pieces go round it hundreds of times."""
    save_checkpoint(tmp_path / "m", SIZES, seed=2)
    reshard(tmp_path / "m", 3, seed=2)
    source, cache, card = str(tmp_path / "m"), tmp_path / "c", torch.device("cuda")
    whole = prepare(source, cache, "bfloat16")
    referred = prepare(source, cache, "bfloat16", mapped=False)
    wanted = map_weights(whole)
    assert by_reference(referred) and not by_reference(whole)
    found = [load_weights(folder, card).weights for folder in (referred, whole)]
    found += [stream(ShardIndex.load(referred), card, piece_bytes=size).tensors for size in (65536, 99991)]
    for weights in found:
        assert weights.keys() == wanted.keys()
        for name, weight in weights.items():
            assert weight.device.type == "cuda" and torch.equal(weight.cpu(), wanted[name]), name

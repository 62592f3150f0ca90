"""Models of real shapes with random weights: on the card at once, or as a checkpoint that anybody reads."""

import json
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from benchmarks.gpu.card import Card
from engine.model.config import ModelConfig
from engine.model.families import FAMILIES, LLAMA, Weight, layer_key
from engine.model.files.hf_model import INDEX, model_config
from engine.model.llama import Llama
from engine.storage.paged import TORCH_DTYPES

GAIN = 1.25
"""The ratio of a product's spread to its input's. With it attention looks at some tens of keys: a lost block shows."""


def random_llama(card: Card) -> Llama:
    """Make a model of an 8B's shape (of `card.sizes`) where it is used."""
    size = card.sizes
    small = size.unit > 1
    shape = ModelConfig(
        family="llama",
        layers=size.layers,
        hidden=size.heads * size.head_dim,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        intermediate=48 if small else 14336,
        vocab=300 if small else 128256,
        context_tokens=8192 // size.unit + 256,
        norm_eps=1e-5,
        dtype=str(card.dtype).removeprefix("torch."),
    )
    weights = {
        key: card.random(*weight.shape(shape)).mul_(0.02) for key, weight, _ in _weights(shape)
    }
    return Llama(shape, weights)


def read_bytes(shape: ModelConfig) -> int:
    """Return the bytes of the weights that a decode step reads: all, but for an embedding that is no head, of which it
    reads rows."""
    width = TORCH_DTYPES[shape.dtype].itemsize
    return sum(
        prod(weight.shape(shape)) * width
        for key, weight, _ in _weights(shape)
        if key != "embedding" or shape.tied
    )


def save_checkpoint(folder: Path, sizes: dict[str, int], seed: int) -> None:
    """Write a Llama in bfloat16 as Hugging Face lays it out: config.json, model.safetensors, tokenizer.json. `sizes` by
    the names of `config.json`. Two runs with one seed write the same bytes."""
    folder.mkdir(parents=True)
    raw: dict[str, Any] = {
        **sizes,
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    shape = model_config(folder, LLAMA, raw, "random")
    pieces = [
        (piece.hugging_face.format(layer=layer), _piece_shape(shape, weight, piece.rows))
        for _, weight, layer in _weights(shape)
        for piece in weight.sources
    ]

    def draw(at: int) -> tuple[str, Tensor]:
        name, dimensions = pieces[at]
        drawn = np.random.default_rng([seed, at]).standard_normal(dimensions, dtype=np.float32)
        values = torch.from_numpy(drawn)
        # Norms that are all ones, or matrices with a mean, would hide what is applied twice or not at all.
        values = 1 + values / 10 if len(dimensions) == 1 else values * GAIN * dimensions[1] ** -0.5
        return name, values.to(torch.bfloat16)

    with ThreadPoolExecutor() as pool:
        save_file(dict(pool.map(draw, range(len(pieces)))), str(folder / "model.safetensors"))
    words = {f"w{n}": n for n in range(shape.vocab)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def reshard(folder: Path, shards: int, seed: int) -> None:
    """Split a directory's `model.safetensors` into shards, its tensors dealt out at random, and write their index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    names = list(tensors)
    Random(seed).shuffle(names)
    where = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        dealt = names[number::shards]
        save_file({name: tensors[name] for name in dealt}, str(folder / file))
        where.update(dict.fromkeys(dealt, file))
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    whole.unlink()


def _weights(shape: ModelConfig) -> list[tuple[str, Weight, int]]:
    """Yield (name in the engine, weight, layer) of all that the model has."""
    family = FAMILIES[shape.family]
    once = [(weight.name, weight, 0) for weight in family.weights if weight.present(shape)]
    return once + [
        (layer_key(layer, weight.name), weight, layer)
        for layer in range(shape.layers)
        for weight in family.layer_weights
        if weight.present(shape)
    ]


def _piece_shape(shape: ModelConfig, weight: Weight, rows: str) -> tuple[int, ...]:
    return (int(getattr(shape, rows)), *weight.shape(shape)[1:])

"""A prepared model's weights as tensors over its file."""

import math
from pathlib import Path

import torch
from torch import Tensor

from engine.model.prepared.weights import WEIGHTS_FILE, WeightIndex
from engine.storage.paged import TORCH_DTYPES


def map_weights(model_dir: Path) -> dict[str, Tensor]:
    """Every tensor of a prepared model by name, as views of one private mapping: clean pages, never to be written."""
    index = WeightIndex.load(model_dir)
    dtype = TORCH_DTYPES[index.dtype]
    raw = map_file(model_dir / WEIGHTS_FILE, index.size_bytes)
    tensors = {}
    for name, entry in index.tensors.items():
        size = math.prod(entry.shape) * dtype.itemsize
        piece = raw[entry.offset_bytes : entry.offset_bytes + size]
        tensors[name] = piece.view(dtype).view(entry.shape)
    return tensors


def map_file(path: Path, size_bytes: int) -> Tensor:
    """A file as uint8, of pages that are shared until written to, and never to be written."""
    return torch.from_file(str(path), shared=False, size=size_bytes, dtype=torch.uint8)


def matrices(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a prepared model's weights those that steps multiply with; the output matrix is always `head`."""
    found = {name: weight for name, weight in weights.items() if weight.dim() == 2}
    embedding = found.pop("embedding")
    return {"head": embedding, **found}

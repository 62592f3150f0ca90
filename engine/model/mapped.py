"""A prepared model's weights as tensors over its file."""

import math
from pathlib import Path

import torch
from torch import Tensor

from engine.kv.paged import TORCH_DTYPES
from engine.model.weights import WEIGHTS_FILE, WeightIndex


def map_weights(model_dir: Path) -> dict[str, Tensor]:
    """Every tensor of a prepared model by name, as views of one private mapping: clean pages, never to be written."""
    index = WeightIndex.load(model_dir)
    dtype = TORCH_DTYPES[index.dtype]
    path = model_dir / WEIGHTS_FILE
    raw = torch.from_file(str(path), shared=False, size=index.size_bytes, dtype=torch.uint8)
    tensors = {}
    for name, entry in index.tensors.items():
        size = math.prod(entry.shape) * dtype.itemsize
        piece = raw[entry.offset_bytes : entry.offset_bytes + size]
        tensors[name] = piece.view(dtype).view(entry.shape)
    return tensors

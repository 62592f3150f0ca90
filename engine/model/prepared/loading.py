"""A prepared model's weights on a device, wherever they lie, with word of how it goes."""

import logging
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.config import Progress
from engine.model.prepared.shards import (
    Shard,
    ShardIndex,
    Stamp,
    Stretch,
    agree,
    by_reference,
    contents,
)
from engine.model.prepared.streaming import stream
from engine.model.prepared.weights import WEIGHTS_FILE, WeightIndex
from engine.storage.paged import TORCH_DTYPES

log = logging.getLogger(__name__)


class LoadedWeights(NamedTuple):
    """`digests` are those of the shards of a model that has its weights by reference, of any other None."""

    weights: dict[str, Tensor]
    digests: dict[str, str] | None = None


def load_weights(
    model_dir: Path, device: torch.device, progress: Progress | None = None
) -> LoadedWeights:
    """Every weight by name. Three cases: 1 by reference, streamed and hashed on the way, and held against what the
    first load has seen; 2 on the CPU, mapped, and not read at all; 3 elsewhere, streamed from the prepared file.

    `progress` hears of bytes read, as the log does at every tenth. Raises ModelError.
    """
    if by_reference(model_dir):
        index = ShardIndex.load(model_dir)
        is_known = contents(model_dir) is not None
        weights, digests = stream(index, device, logged(model_dir.name, progress), is_known=is_known)
        agree(model_dir, index, digests)
        return LoadedWeights(weights, digests)
    if device.type == "cpu":
        return LoadedWeights(map_weights(model_dir))
    index = _of_file(model_dir)
    return LoadedWeights(stream(index, device, logged(model_dir.name, progress), hashed=False).weights)


def loaded_bytes(model_dir: Path) -> int:
    """What a prepared model's weights take in memory. Raises ModelError."""
    if by_reference(model_dir):
        return ShardIndex.load(model_dir).size_bytes
    return WeightIndex.load(model_dir).size_bytes


def _of_file(model_dir: Path) -> ShardIndex:
    """The prepared weights as one shard. Raises ModelError."""
    index = WeightIndex.load(model_dir)
    width = TORCH_DTYPES[index.dtype].itemsize
    stretches = tuple(
        Stretch(name, 0, entry.offset_bytes, prod(entry.shape) * width)
        for name, entry in index.tensors.items()
    )
    shapes = {name: entry.shape for name, entry in index.tensors.items()}
    shard = Shard(Stamp.of(model_dir / WEIGHTS_FILE), stretches)
    return ShardIndex(index.dtype, shapes, (shard,))


def logged(
    name: str, progress: Progress | None, clock_s: Callable[[], float] = time.monotonic
) -> Progress:
    """Passes on what it hears, and logs it whenever another tenth of all is there."""
    began_s, tenths = clock_s(), 0

    def hear(done: int, total: int) -> None:
        nonlocal tenths
        if (now := 10 * done // max(1, total)) > tenths:
            tenths = now
            rate = done / max(1e-9, clock_s() - began_s)
            log.info(
                "weights of %s: %d %% of %.2f GB read, %.2f GB/s",
                name, 10 * tenths, total / 1e9, rate / 1e9,
            )  # fmt: skip
        if progress is not None:
            progress(done, total)

    return hear


def map_weights(model_dir: Path) -> dict[str, Tensor]:
    """Every tensor of a prepared model by name, as views of one private mapping: clean pages, never to be written."""
    index = WeightIndex.load(model_dir)
    dtype = TORCH_DTYPES[index.dtype]
    raw = map_file(model_dir / WEIGHTS_FILE, index.size_bytes)
    tensors = {}
    for name, entry in index.tensors.items():
        size = prod(entry.shape) * dtype.itemsize
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

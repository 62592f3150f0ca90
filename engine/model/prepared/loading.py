"""A prepared model's weights on a device, wherever they lie, with word of how it goes."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.model.config import Progress
from engine.model.prepared.pieces import load_index, map_pieces
from engine.model.prepared.shards import ShardIndex, agree, by_reference, contents, one_shard
from engine.model.prepared.streaming import LoadedWeights, stream
from engine.model.prepared.weights import WEIGHTS_FILE
from engine.storage.paged import TORCH_DTYPES

log = logging.getLogger(__name__)


def load_weights(model_dir: Path, device: torch.device, progress: Progress | None = None) -> LoadedWeights:
    """Load every weight by name. `progress` hears of bytes read, as the log does at every tenth. Raises ModelError."""
    # 1. By reference: streamed and hashed on the way, and held against what the first load has seen.
    if by_reference(model_dir):
        index = ShardIndex.load(model_dir)
        loaded = stream(index, device, logged(model_dir.name, progress), is_known=bool(contents(model_dir)))
        agree(model_dir, index, loaded.digests)
        return loaded
    # 2. On the CPU: mapped, and not read at all.
    if device.type == "cpu":
        return LoadedWeights(map_weights(model_dir), {})
    # 3. Elsewhere: streamed from the prepared file.
    return stream(one_shard(model_dir / WEIGHTS_FILE), device, logged(model_dir.name, progress), hashed=False)


def loaded_bytes(model_dir: Path) -> int:
    """Return the bytes that a prepared model's weights take in memory. Raises ModelError."""
    if by_reference(model_dir):
        return ShardIndex.load(model_dir).size_bytes
    return load_index(model_dir / WEIGHTS_FILE).size_bytes


def map_weights(model_dir: Path) -> dict[str, Tensor]:
    """Map every tensor of a prepared model by name, as views of one private mapping: clean pages, never to be written.
    Raises ModelError."""
    return {
        name: torch.frombuffer(piece.raw, dtype=TORCH_DTYPES[piece.form.decode()]).view(piece.shape)
        for name, piece in map_pieces(model_dir / WEIGHTS_FILE).items()
    }


def matrices(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a prepared model that steps multiply with: matrices, and those of experts in one tensor for
    all of a layer. The output matrix is always `head`."""
    found = {name: weight for name, weight in weights.items() if weight.dim() > 1 and not name.endswith("_bias")}
    embedding = found.pop("embedding")
    return {"head": embedding, **found}


def logged(name: str, progress: Progress | None, clock_s: Callable[[], float] = time.monotonic) -> Progress:
    """Return a progress that passes on what it hears, and logs it whenever another tenth of all is there."""
    began_s, tenths = clock_s(), 0

    def hear(done: int, total: int) -> None:
        nonlocal tenths
        if (now := 10 * done // max(1, total)) > tenths:
            tenths = now
            rate = done / max(1e-9, clock_s() - began_s)
            log.info("weights of %s: %d %% of %.2f GB read, %.2f GB/s", name, 10 * tenths, total / 1e9, rate / 1e9)
        if progress is not None:
            progress(done, total)

    return hear

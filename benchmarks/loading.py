"""Measures how fast a sharded bfloat16 checkpoint is loaded, beside reading the same bytes and nothing else.

Each round reads all shards from the page cache in four ways, in another order each time: with plain `readinto`;
streamed as a worker loads them, with the digest and without it; and with `readinto` twice, the second time for the
digest, which is what the streaming saves. `--device meta` (the default) has tensors without memory: reading and hashing
are all that is timed. `--device cuda` copies to the card through pinned buffers; `--device cpu` also pays for the pages
of new tensors. `--cold` drops the files from the page cache before each way, so that the disk is read. The first stream
of a process is not counted.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import torch
import xxhash

from benchmarks import output
from benchmarks.gpu.random_model import reshard, save_checkpoint
from engine.model.prepared.cache import prepare
from engine.model.prepared.shards import ShardIndex
from engine.model.prepared.streaming import PIECE_BYTES, stream

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
}
LAYER_BYTES = 2 * (1024 * (1024 + 512 + 1024) + 3 * 1024 * 4096)


def main() -> None:
    options = output.parser(__doc__)
    options.add_argument("--mebibytes", type=int, default=1024, help="of weights (default 1024)")
    options.add_argument("--shards", type=int, default=4)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--device", default="meta")
    options.add_argument("--cold", action="store_true")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-loading-") as folder:
        source = Path(folder) / "model"
        layers = max(1, (given.mebibytes << 20) // LAYER_BYTES)
        save_checkpoint(source, {**SIZES, "num_hidden_layers": layers}, seed=1)
        reshard(source, given.shards, seed=1)
        model_dir = prepare(str(source), Path(folder) / "cache", "bfloat16", mapped=False)
        index = ShardIndex.load(model_dir)
        lines = measure(index, torch.device(given.device), given.rounds, given.cold)
        title = f"{index.file_bytes / 1e9:.2f} GB in {given.shards} shards to {given.device}, "
        title += "from the disk" if given.cold else "from the page cache"
        output.tell(given, "loading", {title: lines})


def measure(index: ShardIndex, device: torch.device, rounds: int, cold: bool) -> list[output.Line]:
    """Return a line for each way: GB/s of its best round and of the middle one, each also as a share of plain
    reading's, and the least processor time that it takes. Best rounds are those that other work on the machine
    disturbed least."""
    paths = [Path(shard.stamp.path) for shard in index.shards]
    buffer = np.ones(PIECE_BYTES, np.uint8)

    def streamed(hashed: bool) -> None:
        stream(index, device, hashed=hashed)

    ways: Mapping[str, Callable[[], object]] = {
        "readinto": lambda: _read(paths, buffer),
        "streamed and hashed": lambda: streamed(True),
        "streamed": lambda: streamed(False),
        "readinto, then hashed in a second pass": lambda: _read(paths * 2, buffer, len(paths)),
    }
    streamed(True)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    costs: dict[str, list[float]] = {way: [] for way in ways}
    order = list(ways)
    for turn in range(rounds):
        Random(turn).shuffle(order)
        for way in order:
            if cold:
                _drop(paths)
            began_s, busy_s = time.perf_counter(), time.process_time()
            ways[way]()
            costs[way].append((time.process_time() - busy_s) / index.file_bytes * 1e9)
            rates[way].append(index.file_bytes / (time.perf_counter() - began_s) / 1e9)
    plain = rates["readinto"]
    return [
        {
            "way": way,
            "best GB/s": max(found),
            "of readinto's": max(found) / max(plain),
            "median GB/s": median(found),
            "of its round's readinto": median(rate / base for rate, base in zip(found, plain, strict=True)),
            "CPU s/GB": min(costs[way]),
        }
        for way, found in rates.items()
    ]


def _read(paths: list[Path], buffer: np.ndarray, hashed: int = 0) -> None:
    """Read all; the last `hashed` of them are hashed."""
    for left, path in zip(range(len(paths), 0, -1), paths, strict=True):
        digest = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer.data):
                if left <= hashed:
                    digest.update(buffer.data[:count])


def _drop(paths: list[Path]) -> None:
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


if __name__ == "__main__":
    main()

"""One side of `benchmarks.before`, run by it in a process of its own over whichever checkout PYTHONPATH names.

It keeps to what was there before there were families of models: an engine's device, its runner, a plan of rows. For
each line that it reads it decodes so many tokens of all sequences, and writes the processor time of each step.
"""

import ctypes
import gc
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

import engine.device
from engine.backends.workspace import trial_row
from engine.config import EngineConfig
from engine.model.prepared.cache import prepare
from engine.step import StepPlan
from engine.types import BlockId, SamplingParams

CHUNK = 256
GREEDY = SamplingParams(temperature=0.0)


def own_bytes() -> int:
    """Return what is alive in this process's own memory: not what it maps of files, or shares, nor what is free and
    kept for the next step."""
    gc.collect()
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Dirty:", "Swap:")))


class Decoding:
    """Sequences of random tokens on one device, and what was drawn behind them."""

    def __init__(self, model: str, cache: str, rows: int, tokens: int, steps: int) -> None:
        folder = prepare(model or None, Path(cache))
        config = EngineConfig(model_dir=str(folder), threads=1, deterministic="off", lend_cores=False)
        self._device = engine.device.open_device(config)
        self.own_bytes = own_bytes()
        blocks = -(-(tokens + steps) // config.block_size)
        assert rows * blocks <= self._device.blocks, "the pool is too small"
        chance = torch.Generator().manual_seed(1)
        texts = torch.randint(self._device.vocab, (rows, tokens), generator=chance).tolist()
        self._tables = [[BlockId(row * blocks + at) for at in range(blocks)] for row in range(rows)]
        self.texts = [[*text, *self._read(text, table)] for text, table in zip(texts, self._tables, strict=True)]

    def _read(self, text: list[int], table: list[BlockId]) -> list[int]:
        for start in range(0, len(text), CHUNK):
            drawn = self._step([(text[: start + CHUNK], start, table)])
        return drawn

    def _step(self, parts: list[tuple[list[int], int, list[BlockId]]]) -> list[int]:
        rows: list[Any] = []
        for text, start, table in parts:
            row = trial_row(text, start, table)
            rows.append(msgspec.structs.replace(row, record=msgspec.structs.replace(row.record, sampling=GREEDY)))
        return [int(token) for token in self._device.runner.launch(StepPlan(tuple(rows))).wait()]  # type: ignore[arg-type]

    def decode(self) -> float:
        """Decode one token of each sequence; return the processor time that it took, in seconds."""
        parts = [(text, len(text) - 1, table) for text, table in zip(self.texts, self._tables, strict=True)]
        began_s = time.process_time()
        drawn = self._step(parts)
        took_s = time.process_time() - began_s
        for text, token in zip(self.texts, drawn, strict=True):
            text.append(token)
        return took_s


def main(model: str, cache: str, *sizes: str) -> None:
    """Without sizes, only make what later starts find in the cache: the first has memory that they never need."""
    if not sizes:
        Decoding(model, cache, 1, 1, 1)
        return
    decoding = Decoding(model, cache, *map(int, sizes))
    said: dict[str, object] = {"from": engine.device.__file__, "own_bytes": decoding.own_bytes}
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        print(json.dumps([decoding.decode() for _ in range(int(line))]), flush=True)
    print(json.dumps(decoding.texts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

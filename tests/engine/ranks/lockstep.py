"""Ranks as threads of one process: the same parts, sums and heads as in processes, for models of milliseconds."""

import mmap
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from engine.backends.attention import TorchAttention
from engine.backends.native_attention import NativeAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.model.config import ModelConfig
from engine.model.llama import Llama, load_model
from engine.model.split import Share
from engine.ranks.heads import HeadBlocks, HeadsAttention
from engine.ranks.sums import RankSums, bytes_of, memory_file, places_bytes
from engine.storage.paged import PagedKV
from engine.types import BlockId
from kernels.native import Native
from kernels.panels import IntegerBits

T = TypeVar("T")

BLOCKS = (11, 2, 7, 0, 14, 5, 9, 3, 12, 1)
"""The sequence's, in a pool of 16."""


def sums_of(config: ModelConfig, ranks: int) -> list[RankSums]:
    """Return the ends of all ranks, which time out after ten seconds."""
    size = places_bytes(ranks)
    fd = memory_file("test-ranks", size)
    memory = mmap.mmap(fd, size)
    os.close(fd)
    pairs = {
        (low, high): socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for high in range(ranks)
        for low in range(high)
    }
    found = []
    for rank in range(ranks):
        links = {
            other: pairs[min(rank, other), max(rank, other)][int(rank > other)]
            for other in range(ranks)
            if other != rank
        }
        heads = (config.heads, config.kv_heads)
        found.append(RankSums(Share(rank, ranks), heads, config.vocab, links, bytes_of(memory)))
        found[-1].wait_at_most(10.0)
    return found


class Lockstep:
    """One sequence through `ranks` ranks; `step` returns what rank 0 has."""

    def __init__(self, folder: Path, ranks: int, kernels: Native | None, integer: IntegerBits = 0) -> None:
        config = ModelConfig.load(folder)
        self.sums = sums_of(config, ranks)
        self._threads = ThreadPoolExecutor(ranks)
        layout = config.kv_layout(16, "float32")
        self.kv = PagedKV(layout, 16)
        self.kv.memory.fill_(0xFF)
        self.models: list[Llama] = self._all(
            lambda rank: load_model(
                folder, packed=False, panels=kernels is not None, integer=integer, ranks=self.sums[rank]
            )
        )
        self._attentions = []
        for rank, model in enumerate(self.models):
            blocks = HeadBlocks(layout, Share(rank, ranks).kv_heads(config))
            inner = TorchAttention(model.config.heads, dtype=torch.float32)
            inner = inner if kernels is None else NativeAttention(model.config.heads, kernels)
            self._attentions.append(HeadsAttention(inner, blocks, blocks.view(self.kv.memory, self.kv.file)))
        self._length = 0

    def step(self, tokens: list[int]) -> Tensor:
        row = trial_row([0] * self._length + tokens, self._length, [BlockId(block) for block in BLOCKS])
        batch = ForwardBatch.build([row], 16, row_multiple=self._attentions[0].row_multiple)
        self._length += len(tokens)

        def forward(rank: int) -> Tensor:
            with torch.inference_mode():
                self._attentions[rank].begin(batch, self.kv)
                return self.models[rank].forward(batch, self.kv, self._attentions[rank])

        return self._all(forward)[0][0]

    def close(self) -> None:
        self._threads.shutdown()
        for sums in self.sums:
            sums.close()
        self.kv.close()

    def _all(self, call: Callable[[int], T]) -> list[T]:
        return list(self._threads.map(call, range(len(self.sums))))

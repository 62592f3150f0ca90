"""A pool and the runner over it, on the GPU kernels: made twice, once to find out how large the pool may be."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

from engine.backends.gpu.attention import PrefillKernel, TritonAttention
from engine.backends.gpu.graphs import DecodeGraphs, Recorder, recorded_sizes
from engine.backends.gpu.memory import GpuMemory, auto_pool_bytes, measure_peak
from engine.backends.gpu.mixed_graphs import MixedGraphs, mixed_sizes
from engine.backends.gpu.pool import DeviceKV
from engine.backends.gpu.warmup import Reach, warm_up
from engine.config import EngineConfig, StepLimits
from engine.kv.layout import KVLayout
from engine.model.llama import Llama
from engine.runner import ModelRunner, Opened, StepRanks
from kernels.launch import arch_of, count_compilations

log = logging.getLogger(__name__)

TRIAL_BLOCKS = 2
"""Blocks of the trial pool: as many as the warm-up writes to."""


class PoolRanks(StepRanks, Protocol):
    """The other ranks of a model, each of which opens a pool of its own heads on its device. Raises RankError."""

    def open(self, blocks: int) -> None:
        """Tell them to open pools of so many blocks, while this rank does."""

    def opened(self, blocks: int) -> None:
        """Wait until they have."""

    def least(self, blocks: int) -> int:
        """Return the number of blocks that all ranks have room for, of which this one has it for `blocks`."""


class TritonOpener:
    """Makes pools with their runners for one model; each runner has a recorder of its own."""

    def __init__(
        self,
        model: Llama,
        layout: KVLayout,
        limits: StepLimits,
        recorder: Callable[[], Recorder],
        prefill_kernel: PrefillKernel = "portable",
        mixed_tokens: int = 0,
        ranks: PoolRanks | None = None,
    ) -> None:
        """`mixed_tokens`: the largest mixed step that is recorded; 0: none is. `ranks`: the others, of which this one
        is the first: they do what it does."""
        self._ranks = ranks
        self._model = model
        self._prefill_kernel: PrefillKernel = prefill_kernel
        self._layout = layout
        self._limits = limits
        self._recorder = recorder
        self._mixed_tokens = mixed_tokens

    def open(self, blocks: int, warmed: bool = True) -> Opened:
        """Compile and record whatever steps within the limits may launch, over a new pool of so many blocks. Not
        `warmed`: another rank will say which steps are to warm it up."""
        if self._ranks is not None:
            self._ranks.open(blocks)
        model, limits, layout = self._model, self._limits, self._layout
        began_s, counted = time.monotonic(), count_compilations()
        before = counted.total
        kv = DeviceKV(layout, blocks, model.device, arch_of(model.device))
        attention = TritonAttention(
            *(model.config, layout, model.device),
            max_batch=limits.batch + limits.prompts,
            prefill_kernel=self._prefill_kernel,
        )
        attention.fit(kv)
        graphs = mixed = None
        recorder = self._recorder()
        with torch.inference_mode():
            if limits.batch:
                graphs = DecodeGraphs(model, kv, attention, recorder, recorded_sizes(limits.batch))
                graphs.prepare()
            if self._mixed_tokens and self._prefill_kernel == "portable":
                sizes = mixed_sizes(min(self._mixed_tokens, limits.chunk_tokens + limits.batch))
                attention.keep_chunks(sizes[-1], limits.prompts)
                mixed = MixedGraphs(model, kv, attention, recorder, sizes, limits.batch, limits.prompts)
                mixed.prepare()
        runner = ModelRunner(model, kv, attention, graphs, mixed=mixed, ranks=self._ranks)
        if not warmed:
            return Opened(kv, runner)
        if self._ranks is not None:
            self._ranks.opened(blocks)
        least, groups = attention.share_tokens, layout.group_count
        warm_up(runner, Reach(limits, model.config.context_tokens, layout.block_size, blocks, least, groups))
        took_s = time.monotonic() - began_s
        log.info("warmed up over %d blocks in %.1f s, %d kernels compiled", blocks, took_s, counted.total - before)
        return Opened(kv, runner)

    def sized(self, config: EngineConfig, memory: GpuMemory, weights_bytes: int, kept_bytes: int = 0) -> Opened:
        """A pool as large as the config says, or as a trial leaves room for but for `kept_bytes`, which others of this
        process will take. Raises ValueError for one that holds no block, or that does not fit."""
        kv_bytes, workspace_bytes = config.pool_bytes, 0
        try:
            if kv_bytes == "auto" or config.profile_workspace:
                trial_bytes = TRIAL_BLOCKS * self._layout.block_bytes
                peak = measure_peak(memory, lambda: self.open(TRIAL_BLOCKS), trial_bytes)
                workspace_bytes = peak.own_bytes
                if kv_bytes == "auto":
                    kept_bytes += config.reserve_bytes
                    kv_bytes = auto_pool_bytes(peak, config.device_share, weights_bytes, kept_bytes)
            blocks = config.blocks_in(kv_bytes, self._layout.block_bytes)
            if self._ranks is not None:
                blocks = self._ranks.least(blocks)
            memory.release()
            if blocks * self._layout.block_bytes > (free_bytes := memory.free_bytes()):
                beside = f"{config.device} has {free_bytes} bytes free, beside {weights_bytes} of weights"
                raise ValueError(f"pool_bytes {config.pool_bytes}: {beside}")
            return self.open(blocks)._replace(workspace_bytes=workspace_bytes)
        except torch.OutOfMemoryError as error:
            why = str(error).splitlines()[0]
            raise ValueError(
                f"pool_bytes {config.pool_bytes}: the largest step has no room beside it on {config.device}: {why}"
            ) from error

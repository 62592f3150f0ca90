"""Everything one engine computes with, opened from its config: the model, its KV pool, a runner."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.attention import TorchAttention
from engine.config import EngineConfig, StepLimits
from engine.cores import process_cores
from engine.determinism import deviations
from engine.kv.layout import KVLayout
from engine.kv.manager import KVCacheManager
from engine.kv.paged import TORCH_DTYPES, KVTensors, PagedKV
from engine.kv.tiers import Tiers
from engine.messages import MemoryUse
from engine.model.config import ModelConfig
from engine.model.llama import Llama, load_model
from engine.model.weights import WeightIndex
from engine.native_attention import NativeAttention, attends
from engine.runner import ModelRunner, Runner
from engine.text.files import TextFiles
from engine.workspace import estimate_workspace, measure_workspace
from kernels.native import Native
from kernels.native import native as find_native

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    """One pool and what runs over it. `fingerprint` covers weights and dtype: peers must agree on it."""

    model: str
    layout: KVLayout
    blocks: int
    kv: KVTensors
    runner: Runner
    fingerprint: str
    vocab: int
    context_tokens: int
    stop_ids: frozenset[int]
    memory: MemoryUse = field(default_factory=MemoryUse)
    is_deterministic: bool = True
    """Every token is a function of its own sequence alone."""
    arithmetic: str = ""
    """Whose rounding it is: KV computed by another may differ in its last bits."""

    def manager(self, tiers: Tiers | None = None) -> KVCacheManager:
        return KVCacheManager(self.blocks, self.layout.block_size, self.fingerprint, tiers)


def open_device(
    config: EngineConfig, limits: StepLimits | None = None, host_tier_bytes: int = 0
) -> Device:
    """Map the prepared model and allocate the pool. Sets this process's compute threads.

    `limits` are those of the steps to come: what a profiled workspace is measured for, and decode steps are recorded
    for on a GPU; `host_tier_bytes` are left out of a pool that is sized by this host's memory. Raises ModelError for a
    model that is not whole, ValueError for a pool too small to hold one block, for a profile without limits, for
    kernels that do not run on the device, for another dtype than the model was prepared in, and where `deterministic`
    is on and cannot be kept.
    """
    torch.set_num_threads(config.threads)
    model_dir = Path(config.model_dir)
    config = config.in_dtype(ModelConfig.load(model_dir).dtype)
    kernels = config.kernels
    if config.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"engine.device {config.device}: PyTorch sees no GPU; `headrace doctor` says why")
    if config.device != "cpu":
        torch.cuda.set_device(config.device)  # of this thread: Triton launches on the current one
    native = _native(config)
    model = load_model(model_dir, device=config.device, panels=native is not None)
    stable = (
        kernels != "triton"
        and config.deterministic != "off"
        and _holds(model, config, _attention(model, native, stable=True))
    )
    if kernels == "triton" and config.deterministic == "on":
        raise ValueError("engine.deterministic: the triton kernels split work by the whole batch")
    shape = model.config
    layout = KVLayout(
        kv_heads=shape.kv_heads,
        layers=shape.layers,
        block_size=config.block_size,
        head_dim=shape.head_dim,
        dtype=config.kv_dtype_of(config.dtype),
    )
    weights_bytes = WeightIndex.load(model_dir).size_bytes + model.table_bytes
    workspace_bytes = 0
    if config.profile_workspace or config.pool_bytes == "auto":
        if limits is None:
            raise ValueError("a workspace can only be measured for known step limits")
        workspace_bytes = _workspace(config, model, limits)
    kv_bytes = config.kv_bytes(weights_bytes, workspace_bytes, host_tier_bytes)
    if config.pool_bytes == "auto" and config.device != "cpu":
        free_bytes, total_bytes = torch.cuda.mem_get_info(config.device)
        ours_bytes = int(total_bytes * config.device_share) - torch.cuda.memory_reserved(config.device)
        free_bytes = min(free_bytes, ours_bytes)
        kv_bytes = free_bytes - config.reserve_bytes - workspace_bytes
    blocks = kv_bytes // layout.block_bytes
    if blocks < 1:
        raise ValueError(
            f"pool_bytes {config.pool_bytes}: {kv_bytes} bytes hold no block of {layout.block_bytes}"
        )
    kv, runner = _open_runner(config, model, layout, blocks, native, stable, limits)
    memory = MemoryUse(weights_bytes, workspace_bytes, kv.nbytes)
    log.info("memory of %s: %s", shape.name, memory)
    return Device(
        model=shape.name,
        layout=layout,
        blocks=blocks,
        kv=kv,
        runner=runner,
        fingerprint=f"{shape.fingerprint}/{layout.dtype}",
        vocab=shape.vocab,
        context_tokens=shape.context_tokens,
        stop_ids=frozenset(TextFiles.load(model_dir).settings.stop_ids),
        memory=memory,
        is_deterministic=stable,
        arithmetic=_arithmetic(native, kv),
    )


def _open_runner(
    config: EngineConfig,
    model: Llama,
    layout: KVLayout,
    blocks: int,
    native: Native | None,
    stable: bool,
    limits: StepLimits | None,
) -> tuple[KVTensors, Runner]:
    on_cpu = model.device.type == "cpu"
    if config.kernels != "triton":
        kv = PagedKV(layout, blocks)
        cores = process_cores(config.threads) if native is not None and config.lend_cores else None
        if native is not None and cores is not None:
            native.threads = cores.threads
        return kv, ModelRunner(model, kv, _attention(model, native, stable), cores=cores)
    # Triton is imported by those who use it.
    from engine.graphs import CudaRecorder, DecodeGraphs, ladder
    from engine.kv.device_pool import DeviceKV
    from engine.triton_attention import TritonAttention, arch_of

    batch = max(1, limits.batch if limits else 1)
    pool = (
        PagedKV(layout, blocks)
        if on_cpu
        else DeviceKV(layout, blocks, model.device, arch_of(model.device))
    )
    triton = TritonAttention(model.config, layout, model.device, max_batch=batch)
    if on_cpu or not (limits and limits.batch):
        return pool, ModelRunner(model, pool, triton)
    graphs = DecodeGraphs(model, pool, triton, CudaRecorder(model.device), ladder(batch))
    with torch.inference_mode():
        graphs.prepare()
    return pool, ModelRunner(model, pool, triton, graphs)


def _native(config: EngineConfig) -> Native | None:
    """The kernels, if they are to be used. Raises ValueError where they are demanded and not there."""
    if config.kernels != "native":
        return None
    found = find_native()
    if found is None and config.attention == "native":
        raise ValueError("engine.attention: the native kernels were not built; `headrace doctor` says why")
    return found


def _arithmetic(native: Native | None, kv: KVTensors) -> str:
    """Native kernels round alike on every machine; PyTorch's do by its version and the processor."""
    parts = [] if native is None else [f"native {native.sources}"]
    if native is None or not attends(kv):
        parts.append(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}")
    return ", ".join(parts)


def _attention(model: Llama, native: Native | None, stable: bool) -> TorchAttention:
    if native is not None:
        return NativeAttention(model.config.heads, native)
    return TorchAttention(model.config.heads, stable, TORCH_DTYPES[model.config.dtype])


def _workspace(config: EngineConfig, model: Llama, limits: StepLimits) -> int:
    if model.device.type == "cpu":
        return measure_workspace(
            Path(config.model_dir), config.block_size, limits, config.kv_dtype_of(model.config.dtype)
        )
    shape = model.config
    return estimate_workspace(shape, shape.dtype, config.block_size, limits, in_place=True)


def _holds(model: Llama, config: EngineConfig, attention: TorchAttention) -> bool:
    found = deviations(model, config.block_size, attention, config.kv_dtype_of(model.config.dtype))
    told = ", ".join(found)
    if found and config.deterministic == "on":
        raise ValueError(f"engine.deterministic: {model.config.dtype} on this machine gives other bits by {told}")
    if found:
        log.warning("answers may differ in near ties on this machine, which gives other bits by %s", told)
    return not found

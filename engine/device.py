"""Everything one engine computes with, opened from its config: the model, its KV pool, a runner."""

import ctypes
import logging
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from engine.backends.attention import AttentionBackend, TorchAttention
from engine.backends.determinism import deviations
from engine.backends.native_attention import NativeAttention, attends_to
from engine.backends.workspace import measure_workspace
from engine.config import EngineConfig, StepLimits
from engine.cores import process_cores
from engine.draft_opening import OpenDraft, open_draft
from engine.drafts import DRAFTERS, Drafter
from engine.kv.layout import KVLayout
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.tiers import Tiers
from engine.messages import MemoryUse
from engine.model.config import ModelConfig, Progress
from engine.model.llama import Llama, load_model
from engine.model.split import check_split
from engine.ranks.orders import PROGRAM, RankReady
from engine.ranks.sums import RankSums
from engine.runner import ModelRunner, Opened, Runner
from engine.storage.paged import TORCH_DTYPES, KVTensors, PagedKV
from engine.text.files import TextFiles
from kernels.compilations import OWN, Compilations
from kernels.native import Native
from kernels.native import native as find_native

if TYPE_CHECKING:
    from engine.constraints.matchers import Matchers
    from engine.ranks.devices import Devices
    from engine.ranks.group import RankGroup

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 32 << 20
"""The largest piece of memory that stays with a process when it is freed: the most that glibc takes."""

ANY_STEP = StepLimits(chunk_tokens=16)
"""The steps that a GPU is made ready for where nobody knows which will come."""


@dataclass(frozen=True, slots=True)
class EngineDevice:
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
    plans_ahead: bool = False
    """Its engine plans a step while one runs."""
    arithmetic: str = ""
    """Names whose rounding it is: KV computed by another may differ in its last bits."""
    matchers: "Matchers | None" = None
    """Says what answers with a constraint may go on with; None: such requests are refused."""
    adapters: frozenset[str] = frozenset()
    """The digests of the adapters that it can apply: none, until there are kernels for them."""
    ranks: "RankGroup | None" = None
    """The other processes that compute the model; None: there are none."""
    drafter: Drafter | None = None
    """Guesses what requests go on with, in steps of a decode worker; None: nobody does."""
    draft_kv: KVTensors | None = None
    """The pool of a draft model."""
    compilations: Compilations = field(default_factory=Compilations)
    """Counts this process's GPU kernels; on another device there are none."""

    def manager(self, tiers: Tiers | None = None, step_tokens: int = 1) -> KVCacheManager:
        """`step_tokens`: the most that one step computes of prompts, and of runs behind the first token of each."""
        ahead = (step_tokens + 1) * (2 if self.plans_ahead else 1)
        own = self.blocks, self.layout.block_size, self.fingerprint, tiers, self.layout.groups
        return KVCacheManager(*own, ahead_tokens=ahead)


def open_device(
    config: EngineConfig,
    limits: StepLimits | None = None,
    host_tier_bytes: int = 0,
    progress: Progress | None = None,
    transport_bytes: int = 0,
    devices: "Devices | None" = None,
    rank_program: str = PROGRAM,
) -> EngineDevice:
    """Load the prepared model and allocate the pool. Sets this process's compute threads. `progress` hears of weights
    that are copied to a device, in bytes.

    `limits` are those of the steps to come: what a profiled workspace is measured for, and on a GPU all is compiled and
    recorded for before this returns; `host_tier_bytes` are left out of a pool that is sized by this host's memory,
    `transport_bytes` out of one that is sized by a GPU's. `rank_program`: the module that the processes of other ranks
    run, which moves the blocks of their own pools. Raises ModelError for a model that is not whole, ValueError
    for a pool too small to hold one block, for a profile without limits, for kernels that do not run on the device, for
    another dtype than the model was prepared in, for a pool beside which a GPU has no room for a step, for a model that
    cannot be divided among the ranks asked for, for ranks on GPUs without `devices`, by which each reaches its own,
    where `deterministic` is on and cannot be kept, and where products in 8-bit floats are asked for and cannot be had;
    RankError for a rank that cannot be opened.
    """
    _settle(config.threads)
    model_dir = Path(config.model_dir)
    config = config.in_dtype(ModelConfig.load(model_dir).dtype)
    kernels = config.kernels  # refused whether or not this machine has such a device
    if kernels == "triton" and config.deterministic == "on":
        raise ValueError("engine.deterministic: the triton kernels split work by the whole batch")
    if limits is None and (config.profile_workspace or config.pool_bytes == "auto"):
        raise ValueError("a workspace can only be measured for known step limits")
    if config.arithmetic == "fp8" and max(config.tensor_parallel, config.sum_slices) > 1:
        raise ValueError("engine.arithmetic: fp8 rounds whole rows, of which tensor-parallel ranks have parts")
    if config.tensor_parallel > 1:
        if config.device != "cpu":
            return _open_device_ranks(config, model_dir, limits, transport_bytes, progress, devices)
        return _open_ranks(config, model_dir, limits, host_tier_bytes, rank_program)
    native = _native(config)
    alone: AbstractContextManager[None] = nullcontext()
    if config.device != "cpu":
        if not torch.cuda.is_available():
            raise ValueError(f"engine.device {config.device}: PyTorch sees no GPU; `headrace doctor` says why")
        card = torch.device("cuda", torch.device(config.device).index or 0)  # without a number, torch takes it nowhere
        config = msgspec.structs.replace(config, device=str(card))
        torch.cuda.set_device(card)  # of this thread: Triton launches on the current one
        from engine.backends.gpu.memory import alone_on

        alone = alone_on(card)
    with alone:
        model = load_model(
            model_dir,
            device=config.device,
            panels=native is not None,
            coded=kernels == "triton",
            integer=config.integer_bits,
            progress=progress,
            sum_slices=config.sum_slices,
            float8=config.arithmetic == "fp8",
        )
        shape = model.config
        layout = shape.kv_layout(config.block_size, config.kv_dtype_of(config.dtype), config.groups_layers)
        weights_bytes = model.weights_bytes + model.table_bytes
        stable = _is_stable(model, config, native)
        draft = open_draft(config, shape, native)
        if config.device == "cpu":
            opened = _open_on_cpu(config, model, layout, native, stable, limits, weights_bytes, host_tier_bytes, draft)
        else:
            opened = _open_on_gpu(config, model, layout, limits, weights_bytes, transport_bytes)
    arithmetic = arithmetic_of(config, native, model, layout)
    return _device(config, shape, layout, opened, weights_bytes, stable, arithmetic, draft)


def _device(
    config: EngineConfig,
    shape: ModelConfig,
    layout: KVLayout,
    opened: Opened,
    weights_bytes: int,
    stable: bool,
    arithmetic: str,
    draft: OpenDraft | None,
    ranks: "RankGroup | None" = None,
) -> EngineDevice:
    """`shape`: of the whole model."""
    model_dir = Path(config.model_dir)
    # Of ranks with pools of their own each has as much as this one.
    pools = config.tensor_parallel if config.has_rank_pools else 1
    memory = MemoryUse(weights_bytes, opened.workspace_bytes, pools * opened.kv.nbytes)
    if draft is not None:
        memory = msgspec.structs.replace(
            memory, draft_weights_bytes=draft.weights_bytes, draft_kv_bytes=draft.kv.nbytes
        )
    log.info("memory of %s: %s", shape.name, memory)
    opened.runner.matchers = _matchers(model_dir, shape.vocab, config.jump_forward)
    return EngineDevice(
        model=shape.name,
        layout=layout,
        blocks=opened.kv.blocks,
        kv=opened.kv,
        runner=opened.runner,
        plans_ahead=config.plans_ahead,
        fingerprint=f"{shape.fingerprint}/{layout.dtype}",
        vocab=shape.vocab,
        context_tokens=shape.context_tokens,
        stop_ids=frozenset(TextFiles.load(model_dir).settings.stop_ids),
        memory=memory,
        matchers=opened.runner.matchers,
        drafter=_drafter(config, stable, draft),
        draft_kv=None if draft is None else draft.kv,
        is_deterministic=stable,
        arithmetic=arithmetic,
        ranks=ranks,
        compilations=Compilations() if config.device == "cpu" else OWN,
    )


@dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank computes with. `fingerprint`: of the whole model."""

    model: Llama
    native: Native | None
    attention: TorchAttention
    is_stable: bool
    fingerprint: str
    weights_bytes: int


def open_part(config: EngineConfig, sums: RankSums) -> RankPart:
    """Load a rank's part of the prepared model; sets this process's compute threads. Raises what `open_device` does."""
    _settle(config.threads)
    model_dir = Path(config.model_dir)
    native = _native(config)
    model = load_model(model_dir, panels=native is not None, integer=config.integer_bits, ranks=sums)
    weights_bytes = model.weights_bytes + model.table_bytes
    stable = _is_stable(model, config, native)
    fingerprint = model.config.fingerprint
    return RankPart(model, native, _attention(model, native, stable), stable, fingerprint, weights_bytes)


def _settle(threads: int) -> None:
    """Set this process's compute threads, and let it keep the memory that a step gives back: glibc returns large pieces
    to the system, and the next layer would begin with a page fault for each 4 KiB."""
    torch.set_num_threads(threads)
    with suppress(AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, 2 * KEPT_BYTES)


def _open_ranks(
    config: EngineConfig, model_dir: Path, limits: StepLimits | None, host_tier_bytes: int, program: str
) -> EngineDevice:
    """Open a model whose parts several processes compute, of which this one is rank 0."""
    if config.kernels == "triton":
        raise ValueError("engine.tensor_parallel: ranks on the CPU have its own kernels, not triton")
    if config.sum_slices > 1:
        raise ValueError("engine.sum_slices: is for one process, and engine.tensor_parallel asks for more")
    shape = ModelConfig.load(model_dir)
    check_split(shape, config.tensor_parallel)
    from engine.ranks.group import RankGroup

    with ExitStack() as closing:
        group = RankGroup(config, shape, program)
        closing.callback(group.close)
        part = open_part(config, group.sums)
        shape = msgspec.structs.replace(shape, fingerprint=part.fingerprint)
        layout = shape.kv_layout(config.block_size, config.kv_dtype_of(config.dtype), config.groups_layers)
        arithmetic = arithmetic_of(config, part.native, part.model, layout)
        own = RankReady(f"{part.fingerprint}/{layout.dtype}", arithmetic, part.weights_bytes, part.is_stable)
        stable, weights_bytes = group.ready(own)
        draft = open_draft(config, shape, part.native)
        opened = _open_on_cpu(
            config, part.model, layout, part.native, stable, limits, weights_bytes, host_tier_bytes, draft, group
        )
        device = _device(config, shape, layout, opened, weights_bytes, stable, arithmetic, draft, group)
        closing.pop_all()
    return device


def _open_device_ranks(
    config: EngineConfig,
    model_dir: Path,
    limits: StepLimits | None,
    transport_bytes: int,
    progress: Progress | None,
    devices: "Devices | None",
) -> EngineDevice:
    """Open a model whose ranks have a device each, with a pool of their own heads, of which this one is rank 0's."""
    from engine.ranks.device_opening import check_devices, of_each, open_device_part
    from engine.ranks.group import RankGroup

    check_devices(config)
    if devices is None:
        raise ValueError(f"engine.tensor_parallel: nothing connects the ranks on {config.device}")
    shape = ModelConfig.load(model_dir)
    check_split(shape, config.tensor_parallel)
    with ExitStack() as closing:
        devices.open(config, 0)
        name = devices.unique_id()
        group = RankGroup(config, shape, devices.program, name, limits, transport_bytes)
        closing.callback(group.close)
        part = open_device_part(config, 0, name, limits, devices, group.links, group, progress)
        layout = shape.kv_layout(config.block_size, config.kv_dtype_of(config.dtype), config.groups_layers)
        arithmetic = arithmetic_of(config, None, part.model, layout)
        _, weights_bytes = group.ready(
            RankReady(f"{part.fingerprint}/{layout.dtype}", arithmetic, part.weights_bytes, False)
        )
        opened = part.opener.sized(of_each(config), part.memory, part.weights_bytes, transport_bytes)
        group.move_blocks(opened.kv, devices)
        group.timed()
        device = _device(config, shape, layout, opened, weights_bytes, False, arithmetic, None, group)
        closing.pop_all()
    return device


def _matchers(model_dir: Path, vocab: int, jumps: bool) -> "Matchers | None":
    """None where the library is not installed that compiles constraints: on a machine that measures kernels."""
    try:
        from engine.constraints.matchers import Matchers
        from engine.constraints.vocabulary import load_vocabulary
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        log.warning("llguidance is not installed: requests with a constraint are refused")
        return None
    return Matchers(partial(load_vocabulary, model_dir), vocab, jumps=jumps)


def _drafter(config: EngineConfig, stable: bool, draft: OpenDraft | None) -> Drafter | None:
    if config.draft_tokens < 1:
        raise ValueError(f"engine.draft_tokens: {config.draft_tokens}; at least 1 (speculation = off has none)")
    if draft is not None:
        return draft.drafter
    chosen = config.speculation
    if chosen == "auto":
        chosen = "ngram" if stable and config.may_draft else "off"
    return DRAFTERS[chosen]() if chosen in DRAFTERS else None


def _open_on_cpu(
    config: EngineConfig,
    model: Llama,
    layout: KVLayout,
    native: Native | None,
    stable: bool,
    limits: StepLimits | None,
    weights_bytes: int,
    host_tier_bytes: int,
    draft: OpenDraft | None,
    group: "RankGroup | None" = None,
) -> Opened:
    workspace_bytes = 0
    if limits is not None and (config.profile_workspace or config.pool_bytes == "auto"):
        workspace_bytes = measure_workspace(Path(config.model_dir), config.block_size, limits, layout.dtype)
    draft_bytes = 0 if draft is None else draft.nbytes
    kv_bytes = config.kv_bytes(weights_bytes, workspace_bytes, host_tier_bytes, draft_bytes)
    own = layout
    if group is not None and config.has_rank_pools:
        own = layout.restricted(group.heads[0])
        kv_bytes //= len(group.heads)
    kv = PagedKV(own, config.blocks_in(kv_bytes, own.block_bytes))
    if config.kernels == "triton":
        from engine.backends.gpu.attention import TritonAttention

        rows = limits.batch + limits.prompts if limits is not None else 1
        attention = TritonAttention(model.config, layout, "cpu", max_batch=rows)
        return Opened(kv, ModelRunner(model, kv, attention), workspace_bytes)
    cores = process_cores(config.threads) if native is not None and config.lend_cores else None
    if native is not None and cores is not None:
        native.threads = cores.threads
    on_cpu = _attention(model, native, stable)
    if group is None:
        return Opened(kv, ModelRunner(model, kv, on_cpu, cores=cores), workspace_bytes)
    from engine.ranks.group import GroupModel
    from engine.ranks.heads import HeadBlocks, HeadsAttention

    heads: AttentionBackend = on_cpu
    if config.has_rank_pools:
        group.open_pools(kv)
    else:
        group.share_pool(kv)
        blocks = HeadBlocks(layout, group.heads[0])
        heads = HeadsAttention(on_cpu, blocks, blocks.view(kv.memory, kv.file))
    return Opened(kv, ModelRunner(GroupModel(model, group), kv, heads, cores=cores), workspace_bytes)


def _open_on_gpu(
    config: EngineConfig,
    model: Llama,
    layout: KVLayout,
    limits: StepLimits | None,
    weights_bytes: int,
    transport_bytes: int,
) -> Opened:
    # Triton is imported by those who use it.
    from engine.backends.gpu.graphs import CudaRecorder
    from engine.backends.gpu.memory import CudaMemory
    from engine.backends.gpu.mixed_graphs import MOST_TOKENS
    from engine.backends.gpu.runner import TritonOpener

    # One for the trial and for what comes after it: workspaces of libraries stay with it.
    stream: torch.cuda.Stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
    recorder = partial(CudaRecorder, model.device, stream)
    opener = TritonOpener(model, layout, limits or ANY_STEP, recorder, config.prefill_kernel, MOST_TOKENS)
    return opener.sized(config, CudaMemory(model.device), weights_bytes, transport_bytes)


def _native(config: EngineConfig) -> Native | None:
    """The kernels, if they are to be used. Raises ValueError where they are demanded and not there."""
    if config.kernels != "native":
        if config.arithmetic.startswith("integer"):
            raise ValueError(f"engine.arithmetic: the {config.kernels} kernels do not multiply in integers")
        return None
    found = find_native()
    demands = {"attention": config.attention == "native", "arithmetic": config.arithmetic.startswith("integer")}
    for name, demanded in demands.items():
        if found is None and demanded:
            raise ValueError(f"engine.{name}: the native kernels were not built; `headrace doctor` says why")
    return found


def arithmetic_of(config: EngineConfig, native: Native | None, model: Llama, layout: KVLayout) -> str:
    """Native kernels round alike on every machine; PyTorch's do by its version and the processor. Sums round by the
    slices that they are made of."""
    integers = f" in integers of {model.integer} bits" if model.integer else ""
    parts = [] if native is None else [f"native {native.sources}{integers}"]
    if native is None or model.float8_ways or not attends_to(TORCH_DTYPES[layout.dtype], layout.head_dim):
        parts.append(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}")
    if model.float8_ways:
        parts.append(f"activations in 8-bit floats by {' and '.join(model.float8_ways)}")
    if (slices := max(config.tensor_parallel, config.sum_slices)) > 1:
        parts.append(f"sums of {slices} slices")
    return ", ".join(parts)


def _attention(model: Llama, native: Native | None, stable: bool) -> TorchAttention:
    if native is not None:
        return NativeAttention(model.config.heads, native)
    return TorchAttention(model.config.heads, stable, TORCH_DTYPES[model.config.dtype])


def _is_stable(model: Llama, config: EngineConfig, native: Native | None) -> bool:
    is_tried = config.kernels != "triton" and config.deterministic != "off"
    return is_tried and _holds(model, config, _attention(model, native, stable=True))


def _holds(model: Llama, config: EngineConfig, attention: TorchAttention) -> bool:
    found = deviations(model, config.block_size, attention, config.kv_dtype_of(model.config.dtype))
    told = ", ".join(found)
    if found and config.deterministic == "on":
        raise ValueError(f"engine.deterministic: {model.config.dtype} on this machine gives other bits by {told}")
    if found:
        log.warning("answers may differ in near ties on this machine, which gives other bits by %s", told)
    return not found

"""The settings of one engine (one device, one pool). Every package owns its own struct; `cluster.config` composes them.

Defaults here are a CPU's. Where a pool computes on a GPU, `cluster.defaults` puts others in place of those that were
left alone; `headrace dump-config` shows which.
"""

from typing import Literal

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`model_dir` is a prepared model (see `engine.model.prepared.cache`), never the file a user names."""

    model_dir: str = ""
    dtype: str = "auto"
    """The type that the model computes in: float32, float16 or bfloat16. "auto": on the CPU float32, whatever the file
    holds; on a GPU the 16-bit type of the checkpoint itself, and bfloat16 where that is kept in another. So a quantized
    file computes in bfloat16, and one in 32 bits is rounded to it: that is half the memory, half of what each step
    reads, and it overflows nowhere, as its exponents are float32's. To compute in 32 bits on a GPU, say float32.
    `cluster` settles it before the model is prepared; an engine that finds "auto" takes the type of `model_dir`."""
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = "auto"
    """The form in which KV is kept: `auto`, as the model computes it; int8 and fp8 (E4M3) take about half of 16 bits,
    with a scale per token and head. Workers that share requests must agree."""
    device: str = "cpu"
    """The device that the engine computes on: `cpu`, `cuda` or `cuda:N`."""
    attention: Literal["auto", "native", "torch", "triton"] = "auto"
    """The kernels: `triton`, those for a GPU; `native`, those for the CPU, which compute in 32 bits and were built when
    Headrace was installed; `torch`, PyTorch's. `auto`: by the device, and on the CPU native ones where they can be had
    and the model is in float32."""
    prefill_kernel: Literal["portable", "hopper"] = "portable"
    """Which Triton kernel attends with prompts: `portable`, on every GPU; `hopper`, for compute capability 9.0 alone,
    with 16-bit KV, heads of 64 or 128 and no windows: refused elsewhere. It is no default until
    `python3 -m benchmarks.gpu correct` has passed on such a card."""
    arithmetic: Literal["auto", "integer", "integer16", "float32", "fp8"] = "auto"
    """How the native kernels multiply with codes of 4 and 8 bits. `integer`: by activations rounded to 23 bits, 32 of
    them with one scale, which loses no more than 32-bit floats do; `integer16`: to 16 bits, sooner, and log
    probabilities leave the 0.001 that the others keep to; `float32`: with the very bits of the widened weights. `auto`
    is `integer`, on every processor (`docs/cpu.md` has what each gains and costs). Weights without such codes are
    multiplied in float32 in any case. `fp8`, on the CPU and on a GPU, with any kernels: a checkpoint in FP8 multiplies
    activations that are rounded to FP8 too (`docs/models.md` has what that loses), and everything else as with `auto`;
    refused where the device has no such product, and for models without such weights. Workers that share requests
    should agree."""
    block_size: int = 16
    """Tokens of a block. On a GPU 64, by default: long reads, and what its kernels are tuned for."""
    pool_bytes: int | Literal["auto"] = 384 * 1024 * 1024
    """Bytes of KV blocks. "auto": what weights, measured workspace, host tier and reserve leave of `memory_bytes`; on a
    GPU, where it is the default, of the card's memory."""
    memory_bytes: int = 0
    """All that this worker may use; for "auto", `cluster` sets it to the memory available at start / workers on the
    host. A worker that replaces another is told the same number, whatever the others have filled by then."""
    reserve_bytes: int = 512 * 1024 * 1024
    """Left alone by "auto": interpreter, libraries, frames under way. On a GPU, "auto" takes what a trial of the
    largest step leaves free there, but for this and for what transports will take; `memory_bytes`, which is the
    host's, does not count."""
    device_share: float = 1.0
    """The share of the GPU's memory, above 0, that "auto" takes at most. `cluster` sets it to 1 / workers
    of one GPU where it can tell how many there are; what another process has taken already is never counted on."""
    profile_workspace: bool = False
    """Measure the workspace of the largest step at start, also where the pool's size is given."""
    threads: int = 1
    """Compute threads of this process; `cluster` sets it to max(1, cores / workers on the host), and to 4 on a GPU,
    for which a host has little to compute."""
    lend_cores: bool = True
    """Compute with the threads of other workers of this host too while these have no step to run (`engine.cores`). Only
    with native kernels, whose bits do not depend on it."""
    deterministic: Literal["auto", "on", "off"] = "auto"
    """Only the CPU's kernels can keep it: a GPU's split work by the whole batch. `on`: every token is a function of its
    own sequence alone, whatever is in the batch, however the prompt was chunked, wherever it was recomputed; a machine
    or dtype where a check at start finds otherwise is refused. `auto`: the same where the check holds, else a warning
    and the other path. `off`: the other path, whose rounding depends on how a prompt was chunked."""

    async_scheduling: Literal["auto", "on", "off"] = "auto"
    """Plan a step, and queue it, while the one before it runs; a token that ends a request is found one step late, and
    the row behind it is dropped. Every token is the same either way. `auto`: on a GPU, which would wait for its next
    step otherwise; the CPU, which plans and computes with the same cores, gains nothing by it."""

    tensor_parallel: int = 1
    """Processes that compute one model together, each with a part of every layer and of every block
    (`docs/tensor-parallel.md`). `threads` are each one's. On GPUs each has one, from `device` on. The model's heads and
    widths must divide by it."""
    rank_pools: Literal["auto", "shared", "own"] = "auto"
    """Where the blocks of such ranks lie. `shared`: in one pool, that of rank 0, which all of them map. `own`: each has
    a pool of its KV heads, and moves them itself, as ranks with a device each must. `auto`: shared on the CPU, own on
    GPUs."""
    rank_wait_s: float = 30.0
    """A rank of them that has not answered for so long has ended, and the worker with it."""
    one_shot_bytes: int = 256 * 1024
    """On GPUs, sums over ranks of tensors of up to so many bytes are one kernel over memory that all GPUs of the worker
    map; larger ones, and all where they cannot, go by NCCL. 0: all by NCCL. The bits are the same. Not measured on
    cards yet: the default is what vLLM's `custom_all_reduce.cuh` has for up to eight GPUs."""
    sum_slices: int = 1
    """Compute, with one process, each sum in the slices in which so many ranks would, and add these in the order of the
    ranks: the same bits as `tensor_parallel` of that number, which is what its tests compare with."""
    layer_groups: Literal["auto", "on", "off"] = "auto"
    """Keep layers with a sliding window apart from those without (docs/layer-groups.md): of the former, a sequence
    holds only its window. `off`: all layers keep everything. Every token is the same either way. Only where the model
    has both kinds; workers that share requests must agree, and have blocks of one size. `auto`: off."""

    jump_forward: bool = True
    """Tell tokens that a constraint forces (`docs/structured-output.md`) together with the token before them, without a
    step each. Every token is the same either way."""

    speculation: Literal["auto", "off", "ngram", "suffix", "model"] = "auto"
    """Guess the next tokens from the request's own, and compute them beside the one that is known, as long as that is
    measured to win (`docs/speculation.md`). Every token is the same either way where answers do not depend on a step's
    other rows (`deterministic`), and elsewhere but for near ties. `auto`: n-grams on the CPU where that is so; off
    where steps are planned ahead, which drafts have to wait for. `model`: by `draft_model`."""
    draft_model: str = ""
    """With `speculation = model`, a smaller model that has the served one's tokenizer: a GGUF file, a Hugging Face
    directory, or a name on the hub. Only decode workers load it; only on the CPU so far."""
    draft_dir: str = ""
    """The same, prepared."""
    draft_pool_bytes: int = 64 * 1024 * 1024
    """Bytes of the draft model's own KV blocks, beside `pool_bytes`. Requests that it has no room for have no drafts,
    or push out those that had none lately."""
    draft_tokens: int = 3
    """Most guesses in a row of a step, at least 1. Four rows cost the CPU's kernels little more than one, five do."""

    @property
    def may_draft(self) -> bool:
        """True where steps may have drafts, if the device's answers do not depend on a step's other rows."""
        return self.speculation != "off" and not (self.speculation == "auto" and self.plans_ahead)

    @property
    def has_rank_pools(self) -> bool:
        """True where each of several ranks has a pool of its own."""
        is_own = self.rank_pools == "own" or (self.rank_pools == "auto" and self.device != "cpu")
        return is_own and self.tensor_parallel > 1

    @property
    def groups_layers(self) -> bool:
        return self.layer_groups == "on"

    @property
    def plans_ahead(self) -> bool:
        return self.async_scheduling == "on" or (self.async_scheduling == "auto" and self.device != "cpu")

    @property
    def integer_bits(self) -> Literal[0, 16, 23]:
        """To how many bits activations are rounded before codes are multiplied by them; 0: they stay floats."""
        bits: dict[str, Literal[0, 16, 23]] = {"float32": 0, "integer16": 16}
        return bits.get(self.arithmetic, 23)

    def kv_bytes(
        self, weights_bytes: int, workspace_bytes: int, host_tier_bytes: int = 0, draft_bytes: int = 0
    ) -> int:
        """The pool's size; negative where "auto" finds that the rest alone does not fit."""
        if self.pool_bytes != "auto":
            return self.pool_bytes
        rest = self.reserve_bytes + weights_bytes + draft_bytes + workspace_bytes + host_tier_bytes
        return self.memory_bytes - rest

    def in_dtype(self, prepared: str) -> "EngineConfig":
        """Put `prepared`, the type of `model_dir`, in place of "auto". Raises ValueError for another type."""
        if self.dtype not in ("auto", prepared):
            raise ValueError(f"engine.dtype: {self.dtype}, but {self.model_dir} was prepared in {prepared}")
        return msgspec.structs.replace(self, dtype=prepared)

    def blocks_in(self, kv_bytes: int, block_bytes: int) -> int:
        """Return the number of blocks that a pool of `kv_bytes` holds. Raises ValueError where it does not hold even
        one."""
        blocks = kv_bytes // block_bytes
        if blocks < 1:
            raise ValueError(f"pool_bytes {self.pool_bytes}: {kv_bytes} bytes hold no block of {block_bytes}")
        return blocks

    def kv_dtype_of(self, dtype: str) -> str:
        """The type in which KV is kept beside a model in `dtype`."""
        return dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def kernels(self) -> str:
        """`native`, `torch` or `triton`: as asked for; `native` may turn out not to be there. Raises ValueError for CPU
        kernels on another device, and for native ones in another dtype."""
        on_cpu = self.device == "cpu"
        if self.attention in ("native", "torch") and not on_cpu:
            raise ValueError(f"engine.attention: the {self.attention} kernels do not run on {self.device}")
        if self.prefill_kernel == "hopper" and on_cpu:
            raise ValueError("engine.prefill_kernel: hopper runs on GPUs of compute capability 9.0, not on the CPU")
        if self.attention == "native" and self.dtype != "float32":
            raise ValueError(f"engine.attention: the native kernels compute in float32, not {self.dtype}")
        if self.attention == "auto":
            if not on_cpu:
                return "triton"
            return "native" if self.dtype == "float32" else "torch"
        return self.attention


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers that cached KV blocks go to when they must leave the pool (`engine.kv.tiers`); 0 bytes: no such
    tier."""

    host_bytes: int = 128 * 1024 * 1024
    """Size of the tier in this machine's memory; taken as it fills. On a GPU 4 GiB, by default, locked at start."""
    disk_bytes: int = 0
    """Off unless asked for: it writes what users said, as KV, to a disk, and wears it."""
    disk_dir: str = ""
    """Each worker has a folder of its name in it, and finds there what an earlier life of it left. Of this machine
    alone: another processor may compute other bits."""


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest step that a worker's scheduler asks for."""

    chunk_tokens: int
    """New tokens of a prompt, at the end of a full context."""
    batch: int = 0
    """Decoding sequences beside it, each at the end of a full context."""
    prompts: int = 1
    """Sequences that may share the chunk, beside a full batch; each may have its first token drawn."""
    context_tokens: int = 0
    """Length of each sequence; 0 stands for the model's longest."""

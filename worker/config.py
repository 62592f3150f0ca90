"""The settings of a worker: those of both roles, and those of one of them."""

from typing import Literal

import msgspec

from access.config import AccessConfig
from engine.config import EngineConfig, StepLimits, TierConfig
from transfer.config import TransferConfig


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    tiers: TierConfig = TierConfig()
    access: AccessConfig = AccessConfig()
    """Who may read the page of metrics: the cluster's own `access`, which its launcher puts here."""


class PrefillConfig(WorkerConfig, frozen=True, kw_only=True):
    chunk_tokens: int = 128
    """Token budget of one step, shared by the prompts in progress. On a GPU 4,096, by default (`cluster.defaults`)."""
    max_prompts: int = 128
    """Most prompts that share a step: each may have its first token drawn, which takes memory by the vocabulary."""
    fairness_tokens_per_s: float | Literal["auto"] = "auto"
    """λ of `matched_tokens + λ · waiting_seconds`: how many cached tokens one second of waiting is worth. "auto": as
    many as this worker computes in a second, as measured; 0: longest prefix first; large: first come, first served."""
    max_waiting: int = 1024
    """Prompts that may wait in this worker's line; the next one is refused, and goes to another worker."""

    @property
    def step_limits(self) -> StepLimits:
        return StepLimits(chunk_tokens=self.chunk_tokens, prompts=min(self.max_prompts, self.chunk_tokens))


class DecodeConfig(WorkerConfig, frozen=True, kw_only=True):
    max_batch: int = 32
    """Most requests in one decode step. On a GPU 256, by default: its steps take as long as weights and KV take to be
    read, nearly whatever the number of rows (`cluster.defaults` has this and what follows from it)."""
    max_handoffs: int = 16
    """Most open handoffs, and prompts that it computes itself; past it the worker says no, and the router offers again.
    On a GPU 128, by default: also half a batch."""
    local_chunk_tokens: int = 64
    """Most prompt tokens that one step prefills here: where the router finds that cheaper than a prefill worker, or
    there is none. On a GPU 512, by default; in a cluster without prefill workers as many as a prefill worker's step."""
    mixed_step_s: float = 0.05
    """A step that serves running requests takes prompt tokens only as far as it is predicted to last no longer: the
    gap between two tokens that prompts may cause. Where those rows alone take as long, it takes a block of a prompt."""
    itl_target_ms: float | Literal["auto", "off"] = "off"
    """A step waits for prompts that prefill workers are filling in, so that their rows join it, as long as every stream
    is predicted to have its next token within so many milliseconds of its last: fuller batches for later tokens.
    "auto": three times what the step takes, at most 100; so by default where both pools lend each other the cores of
    one host. "off": no step waits ([routing.md](routing.md#full-batches))."""
    preemption: Literal["recompute", "swap", "auto", "off"] = "auto"
    """The way in which room is made when the pool is exhausted: the last of all requests gives its blocks away, and has
    its KV computed again later, or (`swap`) copied to host memory and back; `auto`: whichever is predicted to be the
    cheaper for it, as measured. `off`: a request is only taken with room for its whole `max_tokens`: only searches can
    exhaust it."""
    growth_tokens: int = 64
    """Room for so many tokens of its answer is promised to a request when it is taken, unless preemption is off."""
    orphan_s: float = 30.0
    """The time for which a resumable request whose router is gone runs on, and an ended one is remembered. 0:
    neither."""

    def __post_init__(self) -> None:
        if not isinstance(self.itl_target_ms, str) and not self.itl_target_ms > 0:
            raise ValueError(f"itl_target_ms: {self.itl_target_ms}; more than 0 (off: no step waits)")

    @property
    def itl_target_s(self) -> float | Literal["auto"] | None:
        """Return the target in seconds; None where no step waits."""
        if isinstance(self.itl_target_ms, str):
            return "auto" if self.itl_target_ms == "auto" else None
        return self.itl_target_ms / 1000

    @property
    def step_limits(self) -> StepLimits:
        # A row draws behind each of its drafts too, also beside a batch that is full.
        prompts = 1 + self.engine.draft_tokens if self.engine.may_draft else 1
        prompts = max(1, min(prompts, self.local_chunk_tokens))
        return StepLimits(chunk_tokens=self.local_chunk_tokens, batch=self.max_batch, prompts=prompts)

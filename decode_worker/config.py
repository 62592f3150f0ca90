"""What a decode worker is told."""

from typing import Literal

import msgspec

from engine.config import EngineConfig, StepLimits, TierConfig
from transfer.config import TransferConfig


class DecodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    max_batch: int = 32
    """Most requests in one decode step. On a GPU 256, by default: its steps take as long as weights and KV take to be
    read, nearly whatever the number of rows (`cluster.defaults` has this and what follows from it)."""
    max_handoffs: int = 16
    """Most open handoffs; past it the worker says no, and the router offers again. On a GPU 128, by default: also half
    a batch."""
    local_chunk_tokens: int = 64
    """Prompt tokens that one step prefills here when no prefill worker is left. On a GPU 512, by default."""
    tiers: TierConfig = TierConfig()
    preemption: Literal["recompute", "swap", "auto", "off"] = "auto"
    """What happens when the pool is exhausted: the last of all requests gives its blocks away, and has its KV computed
    again later, or (`swap`) copied to host memory and back; `auto`: whichever is predicted to be the cheaper for it, as
    measured. `off`: a request is only taken with room for its whole `max_tokens`: only searches can exhaust it."""
    growth_tokens: int = 64
    """Room for so many tokens of its answer is promised to a request when it is taken, unless preemption is off."""
    orphan_s: float = 30.0
    """How long a resumable request whose router is gone runs on, and an ended one is remembered. 0: neither."""

    @property
    def step_limits(self) -> StepLimits:
        return StepLimits(chunk_tokens=self.local_chunk_tokens, batch=self.max_batch)

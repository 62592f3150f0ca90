"""What a prefill worker is told."""

from typing import Literal

import msgspec

from engine.config import EngineConfig, StepLimits, TierConfig
from transfer.config import TransferConfig


class PrefillConfig(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig = EngineConfig()
    tiers: TierConfig = TierConfig()
    transfer: TransferConfig = TransferConfig()
    chunk_tokens: int = 128
    """Token budget of one step, shared by the prompts in progress. On a GPU 4,096, by default (`cluster.defaults`)."""
    max_prompts: int = 128
    """Most prompts that share a step: each may have its first token drawn, which takes memory by the vocabulary."""
    fairness_tokens_per_s: float | Literal["auto"] = "auto"
    """λ of `matched_tokens + λ · waiting_seconds`: how many cached tokens one second of waiting is worth. "auto": as
    many as this worker computes in a second, as measured; 0: longest prefix first; large: first come, first served."""
    max_waiting: int = 1024

    @property
    def step_limits(self) -> StepLimits:
        return StepLimits(chunk_tokens=self.chunk_tokens, prompts=min(self.max_prompts, self.chunk_tokens))

"""Rotary tables: cosines and sines of every position, by the scalings that families use."""

import math

import torch
from torch import Tensor

from engine.model.config import (
    FactorsRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    RopeTable,
    YarnRope,
)


def rope_table(config: ModelConfig, table: RopeTable, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin `[context_tokens, rotated dimensions / 2]` of the rotary embedding (RoFormer, arXiv
    2104.09864).

    A table, not a computation at each step: vectorised cosines of the same angle differ in their last bit by where the
    angle lies in the tensor, which would make a row depend on its batch.
    """
    # 32 bits throughout, as the models were trained: position 8000 differs visibly from a 64-bit table.
    angles = torch.outer(torch.arange(config.context_tokens).float(), _frequencies(config, table))
    cos, sin = angles.cos(), angles.sin()
    if table.scale != 1.0:
        cos, sin = cos * table.scale, sin * table.scale
    return cos.to(dtype), sin.to(dtype)


def _frequencies(config: ModelConfig, table: RopeTable) -> Tensor:
    dims = config.rotary_dims(table)
    exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
    frequencies = 1.0 / table.theta**exponents
    match scaling := table.scaling:
        case None:
            return frequencies
        case LinearRope():
            return frequencies / scaling.factor
        case FactorsRope():
            return frequencies / torch.tensor(scaling.factors)
        case LongRope():
            return frequencies / torch.tensor(scaling.factors(config.context_tokens))
        case Llama3Rope():
            wavelengths = 2 * math.pi / frequencies
            original = scaling.original_context_tokens
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
            return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
        case YarnRope():
            slowed = _ramp(scaling, dims, table.theta)
            return slowed * frequencies / scaling.factor + (1 - slowed) * frequencies


def _ramp(scaling: YarnRope, dims: int, theta: float) -> Tensor:
    """Return how much each frequency is slowed down: 0 where it turns `beta_fast` times within the original context or
    more, 1 where it turns `beta_slow` times or less (YaRN, section 3.2)."""

    def dimension(turns: float) -> float:
        return dims * math.log(scaling.original_context_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 0.001
    return ((torch.arange(dims // 2).float() - low) / width).clamp(0, 1)

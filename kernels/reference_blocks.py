"""The specification of the GPU's block kernels, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.block_shape import BlockShape
from kernels.pool import KVPool
from kernels.reference_rows import quantize
from kernels.wp64 import GOLDEN, MULTIPLIER


def wp64(words: Tensor, shape: BlockShape, tokens: int) -> Tensor:
    """Digest `words` int64 `[heads, shape.words]` of one block with `tokens` valid tokens; returns int64 `[heads]`."""
    index = torch.arange(shape.words, device=words.device)
    offset = index // (shape.row_bytes // 8) % shape.block_size
    low = high = offset < tokens
    if shape.scaled:
        scale = (index - shape.payload_words) * 2
        in_payload = index < shape.payload_words
        low = torch.where(in_payload, low, scale % shape.block_size < tokens)
        high = torch.where(in_payload, high, (scale + 1) % shape.block_size < tokens)
    kept = torch.where(low, words, words & ~0xFFFFFFFF)
    kept = torch.where(high, kept, kept & 0xFFFFFFFF)
    x = kept + (index + 1) * GOLDEN
    x = x ^ _shifted(x, 32)
    x = x * MULTIPLIER
    x = x ^ _shifted(x, 29)
    return torch.where(low | high, x, 0).sum(-1)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift int64 right as if it were unsigned."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def convert_blocks(
    source: KVPool, target: KVPool, source_blocks: Sequence[int], target_blocks: Sequence[int]
) -> None:
    """Specifies `kernels.block_convert`."""
    for old, new in zip(source_blocks, target_blocks, strict=True):
        rows = source.payload[old].float()
        if source.scales is not None:
            rows = rows * source.scales[old].unsqueeze(-1)
        if target.scales is None:
            target.payload[new] = rows.to(target.payload.dtype)
        else:
            target.payload[new], target.scales[new] = quantize(rows, target.format)

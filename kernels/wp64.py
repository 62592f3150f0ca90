"""The digest `wp64` of a KV head's slice of a block, on the CPU. Its kernel, made on the way of a copy, is in
`kernels.block_copy`, which has the formula and what it is good for; specification: `kernels.reference_blocks.wp64`.
"""

import numpy as np
import numpy.typing as npt

from kernels.block_shape import BlockShape

ALGORITHM = "wp64"
GOLDEN = 0x1E3779B97F4A7C15
MULTIPLIER = 0x2545F4914F6CDD1D


def wp64(heads: npt.NDArray[np.uint8], shape: BlockShape, tokens: int) -> list[int]:
    """Return one unsigned digest for each row of `heads`, `[kv_heads, 8 * shape.words]`, of a block with `tokens` valid
    tokens. numpy releases the GIL while it works. Raises ValueError where the sizes do not fit."""
    if heads.ndim != 2 or heads.shape[1] != 8 * shape.words or not 0 <= tokens <= shape.block_size:
        raise ValueError(f"{heads.shape} bytes with {tokens} valid tokens do not fit {shape}")
    words = heads.view(np.uint64)
    if tokens < shape.block_size:
        words = words & _valid(shape, tokens)
    mixed = words + np.arange(1, shape.words + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(MULTIPLIER)
    mixed ^= mixed >> np.uint64(29)
    if tokens < shape.block_size:
        mixed[:, _valid(shape, tokens) == 0] = 0
    return [int(digest) for digest in mixed.sum(axis=1, dtype=np.uint64)]


def _valid(shape: BlockShape, tokens: int) -> npt.NDArray[np.uint64]:
    """Return a mask for each word: its valid bytes are ones."""
    is_valid = np.arange(shape.block_size) < tokens
    rows = np.tile(is_valid, shape.layers * 2)
    payload = np.repeat(rows, shape.row_bytes)
    scales = np.repeat(rows, 4) if shape.scaled else rows[:0]
    return (np.concatenate([payload, scales]) * np.uint8(0xFF)).view(np.uint64)

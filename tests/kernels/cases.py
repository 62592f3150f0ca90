"""Pools for kernel tests: shuffled blocks, NaN wherever nobody may read."""

from collections.abc import Sequence

import torch

from kernels.pool import KVPool, eight_bit_pool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tables_for(
    contexts: Sequence[int], block_size: int, generator: torch.Generator, spare: int = 3
) -> tuple[list[list[int]], int]:
    """A block table per context, of blocks in random order, and how many blocks the pool needs."""
    need = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(need) + spare, generator=generator).tolist()
    tables, at = [], 0
    for count in need:
        tables.append(order[at : at + count])
        at += count
    return tables, len(order)


def poisoned_pool(
    blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, layers: int = 2
) -> KVPool:
    """A pool of which no row is valid yet: NaN, for int8 NaN in its scales."""
    shape = (blocks, kv_heads, layers, 2, block_size, head_dim)
    if dtype in (torch.int8, torch.float8_e4m3fn):
        _, pool = eight_bit_pool(*shape[:3], block_size, head_dim, dtype=dtype, device=DEVICE)
        pool.payload.view(torch.uint8).fill_(0x7F)
        assert pool.scales is not None
        pool.scales.fill_(float("nan"))
        return pool
    return KVPool(torch.full(shape, float("nan"), dtype=dtype, device=DEVICE))


def fill(
    pool: KVPool,
    tables: Sequence[Sequence[int]],
    contexts: Sequence[int],
    generator: torch.Generator,
    first: Sequence[int] | None = None,
) -> None:
    """Random keys and values for tokens `first[r] ..< contexts[r]` of every row, in all layers and heads."""
    for row, (table, context) in enumerate(zip(tables, contexts, strict=True)):
        for token in range(first[row] if first else 0, context):
            block, offset = table[token // pool.block_size], token % pool.block_size
            target = pool.payload[block, :, :, :, offset]
            values = torch.randn(target.shape, generator=generator)
            if pool.scales is None:
                target.copy_(values)
            else:
                # Beyond the largest E4M3, torch 2.11 makes NaN and 2.13 the largest.
                codes = values * 40.0 if pool.format == "int8" else (values * 100.0).clamp(-448.0, 448.0)
                target.copy_(
                    codes.to(torch.int8) if pool.format == "int8" else codes.to(target.dtype)
                )
                scales = 0.02 + 0.01 * torch.rand(target.shape[:-1], generator=generator)
                pool.scales[block, :, :, :, offset] = scales.to(pool.scales.device)

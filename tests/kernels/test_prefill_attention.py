"""The prefill kernel against dense attention in 64 bits."""

from typing import Any

import pytest
import torch

from kernels import reference_attention as reference
from kernels.configs import KernelConfig
from kernels.prefill_attention import plan_prefill, prefill_attention, rows_per_tile
from tests.kernels.cases import DEVICE, fill, poisoned_pool, tables_for


def _check(
    counts: list[int],
    contexts: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    kv: torch.dtype = torch.float16,
    dtype: torch.dtype = torch.float16,
    config: KernelConfig,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: float = 0.0,
    tolerance: float = 3e-3,
) -> None:
    generator = torch.Generator().manual_seed(sum(contexts))
    tables, blocks = tables_for(contexts, block_size, generator)
    pool = poisoned_pool(blocks, kv_heads, block_size, head_dim, kv)
    oldest = [
        max(0, n - c - window + 1) if window else 0 for c, n in zip(counts, contexts, strict=True)
    ]
    fill(pool, tables, contexts, generator, oldest)
    rows = sum(counts)
    q = torch.randn(rows + 2, heads, head_dim, generator=generator).to(DEVICE, dtype)
    width = max(map(len, tables))
    table = torch.tensor(
        [t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=DEVICE
    )
    tiles = plan_prefill(counts, contexts, rows_per_tile(config, heads // kv_heads))
    assert [t[3] + t[2] for t in tiles] == sorted((t[3] + t[2] for t in tiles), reverse=True)
    out = torch.full_like(q, 7.0)
    lse = torch.full((rows + 2, heads), 7.0, device=DEVICE)
    logits = sinks * torch.linspace(-1, 2, heads, device=DEVICE) if sinks else None
    prefill_attention(
        q,
        pool,
        1,
        torch.tensor(tiles, dtype=torch.int32, device=DEVICE),
        table,
        config,
        window=window,
        out=out,
        lse=lse,
        scale=scale,
        softcap=softcap,
        sinks=logits,
    )
    scoring = reference.Scoring(window, scale, softcap, logits)
    want, want_lse = reference.prefill(q, pool, 1, counts, contexts, tables, scoring)
    assert bool((out[rows:] == 7.0).all()) and bool((lse[rows:] == 7.0).all()), (
        "padding was written"
    )
    torch.testing.assert_close(out[:rows].double(), want[:rows], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse[:rows].double(), want_lse[:rows], atol=1e-3, rtol=1e-4)


SMALL = KernelConfig(tile=16, warps=4, stages=2, rows=16)


def test_ragged_chunks_over_cached_prefixes() -> None:
    """Guards the diagonal at every offset of a chunk against tiles of keys and of queries."""
    _check([1, 5, 16, 9], [1, 5, 33, 40], config=SMALL)


@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_block_sizes(block_size: int) -> None:
    """Guards the look-up at a tile that begins inside a block and one that spans many."""
    _check([7, 20], [39, 20], block_size=block_size, config=SMALL)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 80), (2, 2, 96), (9, 1, 64)])
def test_head_shapes(heads: int, kv_heads: int, head_dim: int) -> None:
    """Guards tiles whose rows are not a multiple of the group: 16 rows hold five queries of three heads."""
    _check([11], [30], heads=heads, kv_heads=kv_heads, head_dim=head_dim, config=SMALL)


@pytest.mark.parametrize("kv", [torch.int8, torch.float8_e4m3fn])
def test_eight_bit_keys_and_values(kv: torch.dtype) -> None:
    _check([6], [23], kv=kv, config=SMALL, tolerance=5e-3)


@pytest.mark.parametrize("window", [1, 7, 20])
def test_sliding_window(window: int) -> None:
    """Guards the lower edge, which differs from row to row; tokens before the first row's are NaN here."""
    _check([12, 3], [45, 30], window=window, config=SMALL)


@pytest.mark.parametrize(
    ("kv", "options"),
    [
        (torch.float32, {"softcap": 1.5}),
        (torch.float32, {"sinks": 2.0, "window": 9}),
        (torch.float32, {"softcap": 0.6, "sinks": 30.0, "scale": 0.5, "window": 20}),
        (torch.int8, {"softcap": 1.5, "sinks": -2.0, "scale": 0.1}),
    ],
)
def test_scales_caps_and_sinks(kv: torch.dtype, options: dict[str, Any]) -> None:
    """Guards the cap before the mask, on both sides of the diagonal, and the sink that joins every row once."""
    tolerance = 4e-3 if kv == torch.int8 else 2e-5
    _check([12, 1, 3], [45, 1, 30], dtype=torch.float32, kv=kv, config=SMALL, tolerance=tolerance, **options)


def test_in_32_bits_it_is_exact_to_rounding() -> None:
    _check([13, 2], [13, 50], dtype=torch.float32, kv=torch.float32, config=SMALL, tolerance=2e-5)


def test_misfits_are_refused() -> None:
    with pytest.raises(ValueError, match="new tokens"):
        plan_prefill([5], [4], 8)
    with pytest.raises(ValueError, match="cannot hold"):
        rows_per_tile(SMALL, 17)
    pool = poisoned_pool(2, 2, 16, 16, torch.float16)
    q = torch.zeros(1, 4, 16, dtype=torch.float16, device=DEVICE)
    tables = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="int32"):
        prefill_attention(q, pool, 0, tables.long(), tables, SMALL)
    with pytest.raises(ValueError, match="do not fit"):
        prefill_attention(q[:, :3].contiguous(), pool, 0, tables, tables, SMALL)

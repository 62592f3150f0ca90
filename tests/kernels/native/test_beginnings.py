"""Sequences that begin with the same blocks: read once for all of them, with the bits of each alone."""

import random
import time

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.native import Native, PoolShape, Sequences, native
from tests.kernels.native.test_eight_bits import narrowed

NATIVE = native()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the native kernels are not built here")


def case(
    seed: int, kv_heads: int, dim: int, block_size: int
) -> tuple[Tensor, list[int], list[Tensor]]:
    """A pool whose unused rows are NaN; lengths and tables of sequences that branch off one another."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    contexts: list[int] = []
    tables: list[list[int]] = []
    blocks = 0
    for _ in range(draw.randrange(2, 12)):
        parent = draw.choice([*tables, []])
        kept = draw.randrange(len(parent) + 1)
        context = max(1, kept * block_size + draw.randrange(-60, 90))  # or it ends within what it shares
        kept = min(kept, -(-context // block_size))
        more = -(-context // block_size) - kept
        contexts.append(context)
        tables.append(parent[:kept] + list(range(blocks, blocks + more)))
        blocks += more
    order = torch.randperm(blocks + 2)
    pool = torch.full((len(order), kv_heads, 1, 2, block_size, dim), float("nan"))
    placed = [order[torch.tensor(table)] for table in tables]
    for context, table in zip(contexts, placed, strict=True):
        for t in range(context):
            row = pool[table[t // block_size], :, 0, :, t % block_size]
            if row.isnan().any():
                pool[table[t // block_size], :, 0, :, t % block_size] = torch.randn(kv_heads, 2, dim)
    return pool, contexts, placed


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("threads", "window"), [(1, 0), (2, 0), (1, 100), (2, 30)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(9, 3, 64, 16), (4, 4, 16, 1), (8, 1, 80, 64)])
def test_beginnings_are_shared_without_a_trace(
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    threads: int,
    window: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under a window too, of which sequences of other lengths see other parts of what they share."""
    assert NATIVE is not None
    monkeypatch.setattr(NATIVE, "threads", lambda: threads)
    shape = PoolShape(kv_heads, 1, block_size, dim)
    for seed in range(25 if dtype == torch.float32 else 4):
        pool, contexts, tables = case(seed, kv_heads, dim, block_size)
        numbers = pool
        if dtype != torch.float32:
            pool, numbers = narrowed(pool, dtype)
        qkv = torch.randn(len(contexts), heads + 2 * kv_heads, dim)
        together = attend(NATIVE, qkv, heads, contexts, tables, pool, shape, window)
        alone = [
            attend(NATIVE, qkv[i : i + 1].clone(), heads, contexts[i : i + 1], tables[i : i + 1], pool, shape, window)
            for i in range(len(contexts))
        ]
        assert torch.equal(together, torch.cat(alone))
        counts = [1] * len(contexts)
        want = reference.paged_attention(qkv[:, :heads], numbers, 0, counts, contexts, tables, window=window)
        torch.testing.assert_close(together.view(len(qkv), heads, dim).double(), want, atol=3e-6, rtol=1e-5)


def attend(
    kernels: Native,
    qkv: Tensor,
    heads: int,
    contexts: list[int],
    tables: list[Tensor],
    pool: Tensor,
    shape: PoolShape,
    window: int = 0,
) -> Tensor:
    out = torch.zeros(len(qkv), heads * shape.head_dim)
    sequences = Sequences.of([1] * len(contexts), contexts, tables)
    kernels.attend(qkv, heads, sequences, pool, shape, 0, out, window=window)
    return out


def test_one_beginning_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight sequences of 2,000 tokens: processor time over one beginning and over eight, the least of several."""
    assert NATIVE is not None
    monkeypatch.setattr(NATIVE, "threads", lambda: 1)
    blocks, shape = 125, PoolShape(3, 1, 16, 64)
    pool = torch.randn(8 * blocks, 3, 1, 2, 16, 64)
    qkv = torch.randn(8, 9 + 6, 64)
    apart = [torch.arange(i * blocks, (i + 1) * blocks) for i in range(8)]

    def spent_s(tables: list[Tensor]) -> float:
        times = []
        for _ in range(15):
            began_s = time.thread_time()
            attend(NATIVE, qkv, 9, [2000] * 8, tables, pool, shape)
            times.append(time.thread_time() - began_s)
        return min(times)

    assert spent_s([apart[0]] * 8) < spent_s(apart) * 0.8

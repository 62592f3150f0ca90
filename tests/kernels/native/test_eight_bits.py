"""8-bit KV by the native kernels: the very bits of the torch reference in the pool, and attention against the float64
reference over the numbers that codes and scales stand for."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import kv_write, reference
from kernels.native import Native, PoolShape, native
from kernels.pool import eight_bit_views
from tests.kernels.native.test_native import OPTIONS, attend, attention_case, scoring

NATIVE = native()
pytestmark = pytest.mark.skipif(
    NATIVE is None, reason="the native kernels were not built here: they need a C++ compiler at installation"
)
DTYPES = [torch.int8, torch.float8_e4m3fn]
SPANS = [(1, 1), (1, 17), (5, 5), (3, 22), (9, 41), (1, 33)]


@pytest.fixture
def kernels() -> Native:
    assert NATIVE is not None
    return NATIVE


class EightBits(NamedTuple):
    """A pool of 8 bits, in uint8 `memory`."""

    memory: Tensor
    codes: Tensor
    scales: Tensor


def poisoned(blocks: int, shape: PoolShape, dtype: torch.dtype) -> EightBits:
    """A pool without any number: all bytes are 255, which in scales is none."""
    head_bytes = shape.layers * 2 * shape.block_size * (shape.head_dim + 4)
    memory = torch.full((blocks, shape.kv_heads, head_bytes), 0xFF, dtype=torch.uint8)
    return EightBits(memory, *eight_bit_views(memory, shape.layers, shape.block_size, shape.head_dim, dtype))


def narrowed(wide: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a pool of 8 bits with what `wide` holds, and the numbers in it as float64. Rows that are no numbers have
    a scale that is none."""
    blocks, kv_heads, layers, _, block_size, dim = wide.shape
    pool = poisoned(blocks, PoolShape(kv_heads, layers, block_size, dim), dtype)
    codes, scales = kv_write.quantize(wide, dtype)
    pool.codes.copy_(codes)
    pool.scales.copy_(scales)
    return pool.codes, codes.double() * scales.double().unsqueeze(-1)


def rows_of_every_kind(dim: int) -> Tensor:
    """Rows that try the ends: sizes from 1e-30 to 1e30, zeros, and numbers half way between two codes, of which the
    first of a row is the largest code, so that the scale is a power of two."""
    rows = [torch.randn(dim) * 10.0**power for power in range(-30, 31, 4)]
    rows += [torch.zeros(dim), -torch.zeros(dim), torch.eye(dim)[3] * 7, torch.randn(dim) * torch.logspace(-9, 6, dim)]
    halves = torch.arange(-127, 127) + 0.5
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    for most, numbers in ((127.0, halves), (448.0, codes), (448.0, middles), (448.0, -middles)):
        for part in numbers.split(dim - 1):
            rows.append(torch.cat([torch.tensor([most]), part, part.new_zeros(dim - 1 - len(part))]) / 4)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "block_size"), [(16, 1), (48, 5), (64, 16), (128, 16)])
def test_what_is_written_has_the_bits_of_the_reference(
    kernels: Native, dtype: torch.dtype, dim: int, block_size: int
) -> None:
    """Guards blocks that move between workers of both kinds: codes, scales, and bytes that are not to be written."""
    heads, shape = 3, PoolShape(2, 3, block_size, dim)
    every = rows_of_every_kind(dim)
    tokens = len(every) // 2 // shape.kv_heads
    k, v = every[: 2 * tokens * shape.kv_heads].view(2, tokens, shape.kv_heads, dim)
    qkv = torch.cat([torch.randn(tokens, heads, dim), k, v], 1)
    blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(blocks * block_size)[:tokens]
    pool, wanted = poisoned(blocks, shape, dtype), poisoned(blocks, shape, dtype)
    kernels.rotate_and_write(qkv, heads, None, torch.zeros(tokens).long(), None, pool.codes, shape, 1, slots)
    kv_write.write_kv(k, v, wanted.codes, 1, kv_write.plan_kv_write(slots, wanted.codes), wanted.scales)
    assert torch.equal(pool.memory, wanted.memory)
    assert wanted.scales.isfinite().sum() == 2 * tokens * shape.kv_heads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_none(kernels: Native, dtype: torch.dtype, spoiled: float) -> None:
    """Guards a spoiled row that would be read as a number: it has the reference's scale, which is no number or not
    finite, and so is no number where it is read. Nobody else's answer changes."""
    shape = PoolShape(1, 1, 16, 32)
    pool = poisoned(2, shape, dtype)
    qkv = torch.randn(20, 1 + 2, 32)
    tables, spans = [torch.tensor([0]), torch.tensor([1])], [(10, 10), (10, 10)]
    slots = torch.cat([torch.arange(10), torch.arange(16, 26)])
    for which, seen in ((1, 3), (2, 4)):
        given = qkv.clone()
        answers = []
        for value in (1.0, spoiled):
            given[10 + seen, which, 7] = value
            kernels.rotate_and_write(given, 1, None, torch.zeros(20).long(), None, pool.codes, shape, 0, slots)
            answers.append(attend(kernels, given, 1, pool.codes, 0, spans, tables))
        clean, got = answers
        assert not pool.scales[1, 0, 0, which - 1, seen].isfinite()
        assert clean.isfinite().all() and torch.equal(got[: 10 + seen], clean[: 10 + seen])
        assert got[10 + seen :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (32, 1)])
@pytest.mark.parametrize(("dim", "block_size"), [(16, 1), (64, 16), (80, 4), (96, 64), (128, 16), (256, 32)])
def test_attention(kernels: Native, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    """Head grouping, block order, scales by row, contexts that end anywhere."""
    qkv, wide, tables = attention_case(heads, kv_heads, dim, block_size, SPANS, torch.float32)
    pool, numbers = narrowed(wide, dtype)
    counts, contexts = [c for c, _ in SPANS], [n for _, n in SPANS]
    want = reference.paged_attention(qkv[:, :heads], numbers, 1, counts, contexts, tables)
    got = attend(kernels, qkv, heads, pool, 1, SPANS, tables).double()
    torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 256])
def test_the_error_is_that_of_32_bits(kernels: Native, dtype: torch.dtype, dim: int) -> None:
    """Against float64 over the numbers that the codes stand for: the root of the mean square, beside that of 32-bit
    attention over the same numbers."""
    spans = [(1, 200)] * 6
    qkv, wide, tables = attention_case(8, 2, dim, 16, spans, torch.float32)
    pool, numbers = narrowed(wide, dtype)
    want = reference.paged_attention(qkv[:, :8], numbers, 1, [1] * 6, [200] * 6, tables)
    narrow, floats = (attend(kernels, qkv, 8, kept, 1, spans, tables).double() for kept in (pool, numbers.float()))
    assert 0 < (narrow - want).square().mean().sqrt() < 1.25 * (floats - want).square().mean().sqrt()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, *OPTIONS])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"), [(9, 3, 64, 16), (32, 1, 16, 1), (8, 2, 256, 32), (3, 3, 80, 5)]
)
def test_a_row_has_the_bits_that_it_has_alone(
    kernels: Native,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    options: dict[str, Any],
) -> None:
    """In company, in whichever chunk, under windows, caps, sinks and other scales; and against float64."""
    spans = [(1, 1), (1, 17), (5, 5), (3, 22), (1, 40), (30, 75)]
    window = options.get("window", 0)
    qkv, wide, tables = attention_case(heads, kv_heads, dim, block_size, spans, torch.float32, window)
    pool, numbers = narrowed(wide, dtype)
    given = scoring(heads, options)
    got = attend(kernels, qkv, heads, pool, 1, spans, tables, **given)
    counts, contexts = [c for c, _ in spans], [n for _, n in spans]
    want = reference.paged_attention(qkv[:, :heads], numbers, 1, counts, contexts, tables, **given)
    torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-5)
    for row in range(30):
        context = 75 - 30 + row + 1
        alone = attend(kernels, qkv[11 + row : 12 + row].clone(), heads, pool, 1, [(1, context)], [tables[5]], **given)
        assert torch.equal(alone[0], got[11 + row])


def test_a_pool_that_lies_otherwise_is_refused(kernels: Native) -> None:
    """Guards memory behind a pool: a kernel computes addresses from sizes alone."""
    shape = PoolShape(2, 2, 16, 32)
    pool = poisoned(3, shape, torch.int8)
    qkv, slots = torch.randn(1, 5, 32), torch.zeros(1, dtype=torch.int64)
    others = (pool.codes.contiguous(), pool.codes[:, :1], pool.codes[..., :16], pool.codes.float()[:, :1])
    for other in others:
        with pytest.raises(ValueError, match="no pool of"):
            kernels.rotate_and_write(qkv, 1, None, slots, None, other, shape, 0, slots)
    assert (pool.memory == 0xFF).all()

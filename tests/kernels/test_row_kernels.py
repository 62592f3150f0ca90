"""Norm, gate, rotation and KV write against their references."""

import pytest
import torch
import triton
import triton.language as tl

from kernels import reference_rows as reference
from kernels.configs import KernelConfig
from kernels.quantize import encode_e4m3, encode_int8, widen_e4m3, widen_pairs
from kernels.rms_norm import rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul
from tests.kernels.cases import DEVICE, poisoned_pool

CONFIG = KernelConfig(tile=32, warps=4, stages=1, rows=2)


@triton.jit
def _convert(x_ptr, e4m3_ptr, int8_ptr, wide_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    codes = encode_e4m3(x)
    tl.store(e4m3_ptr + at, codes)
    tl.store(int8_ptr + at, encode_int8(tl.minimum(tl.maximum(x, -127.0), 127.0)))
    tl.store(wide_ptr + at, widen_e4m3(codes).to(tl.float32) * 256.0)


@triton.jit
def _widen_pairs(pairs_ptr, low_ptr, high_ptr, N: tl.constexpr, FORMAT: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    low, high = widen_pairs(tl.load(pairs_ptr + at), FORMAT)
    tl.store(low_ptr + at, low)
    tl.store(high_ptr + at, high)


@pytest.mark.parametrize(
    ("form", "dtype", "factor"), [("int8", torch.int8, 128), ("e4m3", torch.float8_e4m3fn, 256)]
)
def test_every_pair_of_codes_is_widened_exactly(form: str, dtype: torch.dtype, factor: int) -> None:
    """Guards the sign that moves, the byte beside that must not, and numbers below the smallest normal one."""
    pairs = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).to(DEVICE)
    low, high = (torch.empty(2**16, dtype=torch.float16, device=DEVICE) for _ in range(2))
    _widen_pairs[(4,)](pairs, low, high, N=2**14, FORMAT=form)
    codes = pairs.view(torch.uint8).view(-1, 2)
    for side, found in enumerate((low, high)):
        want = codes[:, side].contiguous().view(dtype).float() / factor
        is_number = want.isfinite()
        assert torch.equal(found.float()[is_number], want[is_number])


def test_eight_bit_codes_are_those_of_torch() -> None:
    """Guards every rounding boundary: all E4M3 values, their midpoints, the numbers next to those, and beyond 448."""
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    up, down = (torch.nextafter(middle, torch.full_like(middle, edge)) for edge in (1e9, -1e9))
    halves = torch.arange(-127, 127) + 0.5
    x = torch.cat([values, middle, up, down, halves, torch.tensor([1e-9, -1e-9, 500.0, -1e6])])
    x = torch.cat([x, torch.zeros(2048 - x.numel())]).to(DEVICE)
    codes = torch.empty(2048, dtype=torch.uint8, device=DEVICE)
    small = torch.empty(2048, dtype=torch.int8, device=DEVICE)
    wide = torch.empty(2048, dtype=torch.float32, device=DEVICE)
    _convert[(1,)](x, codes, small, wide, N=2048)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes, want.view(torch.uint8))
    assert torch.equal(wide, want.float())
    assert torch.equal(small, x.clamp(-127, 127).round().to(torch.int8))


@pytest.mark.parametrize("hidden", [8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm(hidden: int, dtype: torch.dtype) -> None:
    """Guards the mean over the true width and the order of addition, rounding and norm."""
    generator = torch.Generator().manual_seed(hidden)
    x, residual = (torch.randn(3, hidden, generator=generator).to(DEVICE, dtype) for _ in "ab")
    weight = torch.randn(hidden, generator=generator).to(DEVICE, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    plain = rms_norm(x, weight, 1e-5, CONFIG)
    want = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(plain.double(), want, atol=tolerance, rtol=tolerance)
    total = x + residual
    fused = rms_norm(x, weight, 1e-5, CONFIG, residual=residual)
    assert torch.equal(residual, total)
    want = reference.rms_norm(total, weight, 1e-5)
    torch.testing.assert_close(fused.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("width", [5, 64, 71])
def test_silu_mul(width: int) -> None:
    """Guards the gate and up halves and the ragged last tile."""
    gate_up = 4 * torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out = silu_mul(gate_up, CONFIG).double()
    torch.testing.assert_close(out, reference.silu_mul(gate_up), atol=1e-5, rtol=1e-5)
    out = silu_mul(gate_up, CONFIG, gelu=True).double()
    torch.testing.assert_close(out, reference.gelu_mul(gate_up), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kv", "norm", "block_size", "head_dim", "turned"),
    [
        (torch.float16, False, 16, 64, 64),
        (torch.float32, True, 1, 80, 80),
        (torch.int8, True, 4, 16, 16),
        (torch.float8_e4m3fn, False, 32, 96, 96),
        (torch.float32, True, 16, 80, 60),
        (torch.float32, False, 16, 64, 32),
        (torch.int8, True, 4, 32, 10),
        (torch.float32, True, 4, 48, 0),
        (torch.int8, False, 4, 16, 0),
    ],
)
def test_rotation_and_write(kv: torch.dtype, norm: bool, block_size: int, head_dim: int, turned: int) -> None:
    """Guards slots, halves, heads and scales: everything but the named slots stays as it was, padding is dropped."""
    generator = torch.Generator().manual_seed(head_dim)
    heads, kv_heads, tokens = 3, 2, 5
    pool = poisoned_pool(40 // block_size + 2, kv_heads, block_size, head_dim, kv)
    want = poisoned_pool(40 // block_size + 2, kv_heads, block_size, head_dim, kv)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator)
    qkv[1, heads] = 0.0
    slots = torch.randperm(40, generator=generator)[:tokens]
    slots[3] = -1
    angles = torch.rand(50, turned // 2, generator=generator) * 6
    weights = torch.randn(2, head_dim, generator=generator).to(DEVICE)
    q_norm, k_norm = weights if norm else (None, None)
    arguments = (
        slots,
        torch.randperm(50, generator=generator)[:tokens],
        angles.cos(),
        angles.sin(),
    )
    arguments = tuple(tensor.to(DEVICE) for tensor in arguments)
    if not turned:
        arguments = (*arguments[:2], None, None)
    qkv = qkv.to(DEVICE)
    q = rope_kv_write(qkv, pool, 1, *arguments, CONFIG, q_norm=q_norm, k_norm=k_norm)
    expected = reference.rope_kv_write(qkv, want, 1, *arguments, q_norm=q_norm, k_norm=k_norm)
    torch.testing.assert_close(q.double(), expected, atol=1e-5, rtol=1e-5)
    got, wanted = pool.payload.float(), want.payload.float()
    if kv == torch.int8:  # a product on the edge between two codes may fall either way
        assert (got - wanted).abs().max() <= 1
        assert (got != wanted).float().mean() < 0.01
    else:
        step = {torch.float16: 1e-3, torch.float32: 1e-5, torch.float8_e4m3fn: 0.13}[kv]
        torch.testing.assert_close(got, wanted, atol=step, rtol=step, equal_nan=True)
    if pool.scales is not None:
        torch.testing.assert_close(pool.scales, want.scales, equal_nan=True)
        assert (pool.scales == 0).any(), "the row of zeros was meant to be there"
        assert bool(pool.scales.isnan().any())

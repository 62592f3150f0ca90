# mypy: allow-untyped-defs, allow-incomplete-defs
"""Eight-bit values inside kernels, to the bit as torch would round them, on every architecture and in the interpreter.

int8:  code = round_to_even(x / scale),            scale = max|row| / 127
e4m3:  code = float8_e4m3fn(x / scale), saturated, scale = max|row| / 448

E4M3 is built and read by integer arithmetic: GPUs before sm_89 have no such type, and the interpreter's conversion is
wrong for some values. Widening moves the bits into a float16, whose exponent bias differs by 8: a factor of 256, which
`widen_e4m3` leaves to the caller, since a scale is multiplied in anyhow. Specification: `kernels.reference_rows`.
"""

import triton
import triton.language as tl


@triton.jit
def widen_e4m3(codes):
    """Widen uint8 E4M3 codes to float16, divided by 256; exact, subnormals included."""
    bits = codes.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def widen_pairs(pairs, FORMAT: tl.constexpr):
    """Widen int16 of two neighbouring codes each to float16: the lower bytes and the upper ones, int8 divided by 128
    and E4M3 by 256; exact. A byte becomes the fraction of a number of 8 to 16, or is moved under a float16's exponent.
    """
    if FORMAT == "int8":
        low = ((pairs & 0xFF) ^ 0x4880).to(tl.float16, bitcast=True) - 9.0
        high = (((pairs >> 8) & 0xFF) ^ 0x4880).to(tl.float16, bitcast=True) - 9.0
    else:
        low = pairs << 7  # its sign is a bit too low: the sum carries it up
        low = ((low & 0x7F80) + (low & 0x4000)).to(tl.float16, bitcast=True)
        high = ((pairs & -0x8000) | ((pairs >> 1) & 0x3F80)).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def encode_int8(x):
    """Round float32 within ±127 to int8. Adding 1.5 * 2^23 rounds to an even integer."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def encode_e4m3(x):
    """Round float32 to uint8 E4M3 codes, to nearest even, saturating at 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    # Normal numbers: keep three bits of the fraction, to nearest even, and move the exponent's bias from 127 to 7.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the step is 2^-9, the last bit of a float32 around 2^14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantize_rows(low, high, FORMAT: tl.constexpr):
    """Quantize two halves of rows, float32 `[R, H]` each; returns their codes, and the rows' scales `[R]`. A row of
    zeros has scale 0."""
    most = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    scale = most * (1.0 / 127.0 if FORMAT == "int8" else 1.0 / 448.0)
    divisor = tl.where(scale > 0.0, scale, 1.0)[:, None]
    low = tl.div_rn(low, tl.broadcast_to(divisor, low.shape))
    high = tl.div_rn(high, tl.broadcast_to(divisor, high.shape))
    if FORMAT == "int8":
        return encode_int8(low), encode_int8(high), scale
    else:
        return encode_e4m3(low), encode_e4m3(high), scale

# mypy: allow-untyped-defs, allow-incomplete-defs
"""What the products of a mixture share on a GPU, whether its weights are numbers (`kernels.grouped_experts`) or codes
(`kernels.coded_experts`): tiles of rows, the gate, and where an answer goes. `there` and `wanted` say which of a tile's
rows and columns exist."""

import triton
import triton.language as tl


@triton.jit
def load_rows(at_ptr, rows, columns, there, LENGTH: tl.constexpr):
    """Load columns of rows of `LENGTH`; 0 for what does not exist."""
    inside = there[:, None] & (columns < LENGTH)[None, :]
    return tl.load(at_ptr + (rows * LENGTH)[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def add_bias(total, bias_ptr, dims, wanted):
    return total + tl.load(bias_ptr + dims, mask=wanted, other=0.0).to(tl.float32)[None, :]


@triton.jit
def gated(gate, up, alpha, limit, CLAMP: tl.constexpr):
    """SiLU of the gate times up; with CLAMP, that of `kernels.experts.ClampedGate`."""
    if CLAMP:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        answer = (up + 1.0) * (gate * tl.sigmoid(alpha * gate))
    else:
        answer = gate * tl.sigmoid(gate) * up
    return answer


@triton.jit
def store_rows(out_ptr, answer, rows, dims, there, wanted, LENGTH: tl.constexpr):
    """Store an answer in rows of `LENGTH`, rounded to their type."""
    place = (rows * LENGTH)[:, None] + dims[None, :]
    tl.store(out_ptr + place, answer.to(out_ptr.dtype.element_ty), mask=there[:, None] & wanted[None, :])

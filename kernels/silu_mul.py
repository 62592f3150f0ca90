# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gate of a feed-forward layer:  out = silu(gate) * up,  silu(x) = x / (1 + e^-x);  or with GELU for silu, by its
tanh:  gelu(x) = x / (1 + e^-2u),  u = sqrt(2 / pi) (x + 0.044715 x^3).

Specification: `kernels.reference_rows.silu_mul` and `gelu_mul`. Sources: SwiGLU and GEGLU, Shazeer 2020 (arXiv
2002.05202); Hendrycks and Gimpel 2016 (arXiv 1606.08415).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import KernelConfig
from kernels.launch import check_interpretable


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr = False):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = dims < WIDTH
    gate = tl.load(gate_up_ptr + row * (2 * WIDTH) + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * WIDTH) + WIDTH + dims, mask=inside, other=0.0)
    inner = gate
    if GELU:
        # Below, the answer is zero but for denormals, and the exponential would overflow.
        inner = tl.maximum(gate * (1.5957691216057308 + 0.07135481282553484 * gate * gate), -80.0)
    answer = gate * tl.sigmoid(inner) * up.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + dims, answer.to(up.dtype), mask=inside)


def silu_mul(gate_up: Tensor, config: KernelConfig, gelu: bool = False) -> Tensor:
    """Compute silu(gate) * up, or gelu(gate) * up, for `gate_up` `[rows, 2 * width]`, contiguous, the gate first.
    Returns `[rows, width]`. Raises ValueError where shapes do not fit."""
    rows, both = gate_up.shape
    if both % 2 or not gate_up.is_contiguous():
        raise ValueError(f"{tuple(gate_up.shape)} is no gate and up side by side")
    check_interpretable(gate_up)
    out = torch.empty(rows, both // 2, dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_kernel[(rows, triton.cdiv(both // 2, config.tile))](
        gate_up, out, WIDTH=both // 2, TILE=config.tile, GELU=gelu, num_warps=config.warps, num_stages=config.stages
    )
    return out

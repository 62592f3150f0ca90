# mypy: allow-untyped-defs, allow-incomplete-defs
"""RMS normalization, with the residual addition before it:  h = x + r;  out = h / sqrt(mean(h^2) + eps) * weight.

One program per row, the row in registers: it is read once and written once. Specification:
`kernels.reference_rows.rms_norm`. Source: Zhang and Sennrich 2019.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import KernelConfig
from kernels.launch import check_interpretable


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    HIDDEN: tl.constexpr,
    PAD: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    dims = tl.arange(0, PAD)
    inside = dims < HIDDEN
    x = tl.load(x_ptr + row + dims, mask=inside, other=0.0)
    if RESIDUAL:
        held = tl.load(residual_ptr + row + dims, mask=inside, other=0.0)
        # Rounded first: what is normalized is what the next layer will find in the residual.
        x = (x.to(tl.float32) + held.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row + dims, x, mask=inside)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + dims, (wide * factor * weight).to(x.dtype), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, config: KernelConfig, *, residual: Tensor | None = None
) -> Tensor:
    """Normalize `x` `[rows, hidden]`, contiguous, by `weight` `[hidden]`. With `residual`, like x: adds x to it in
    place and normalizes the sum. Returns a new tensor like x. Raises ValueError where shapes do not fit."""
    rows, hidden = x.shape
    if weight.shape != (hidden,) or not x.is_contiguous():
        raise ValueError(
            f"weight {tuple(weight.shape)} for rows of {hidden}, or rows not contiguous"
        )
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(f"residual {tuple(residual.shape)} for {tuple(x.shape)}")
    check_interpretable(x, weight)
    out = torch.empty_like(x)
    rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        HIDDEN=hidden,
        PAD=triton.next_power_of_2(hidden),
        RESIDUAL=residual is not None,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out

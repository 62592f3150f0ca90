"""The specification of the GPU's row kernels, in plain PyTorch."""

import torch
from torch import Tensor

from kernels.pool import LARGEST, KVPool


def quantize(rows: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantize float32 `[..., head_dim]` to int8 or E4M3 codes, with float32 scales `[...]`: value = code * scale."""
    most = torch.tensor(1.0 / LARGEST[kind], dtype=torch.float32)
    scales = rows.abs().amax(-1) * most
    scaled = rows / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    if kind == "int8":
        return scaled.round().to(torch.int8), scales
    return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scales


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Specifies `kernels.rms_norm`, in float64."""
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def silu_mul(gate_up: Tensor) -> Tensor:
    """Specifies `kernels.silu_mul`: float64 `[rows, width]`."""
    gate, up = gate_up.double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Specifies the same with GELU by its tanh."""
    gate, up = gate_up.double().chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[tokens, heads, head_dim]` by tables `[tokens, rotary_dim / 2]` of each token's position; float64.
    The first `rotary_dim` columns turn, one half of them against the other; the rest pass."""
    half = cos.shape[1]
    low, high, rest = x.double().split([half, half, x.shape[-1] - 2 * half], -1)
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    return torch.cat([low * c - high * s, high * c + low * s, rest], -1)


def rope_kv_write(
    qkv: Tensor,
    pool: KVPool,
    layer: int,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Specifies `kernels.rope_kv_write`; the queries in float64. Nothing is rotated without tables."""
    heads = qkv.shape[1] - 2 * pool.kv_heads
    q, k, v = qkv.double().split([heads, pool.kv_heads, pool.kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    if cos is not None and sin is not None:
        q, k = rotate(q, cos[positions], sin[positions]), rotate(k, cos[positions], sin[positions])
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, pool.block_size)
        for kv, row in enumerate((k[t], v[t])):
            if pool.scales is None:
                pool.payload[block, :, layer, kv, offset] = row.to(pool.payload.dtype)
            else:
                codes, scales = quantize(row.float(), pool.format)
                pool.payload[block, :, layer, kv, offset] = codes
                pool.scales[block, :, layer, kv, offset] = scales
    return q


def mask_logits(logits: Tensor, plain: Tensor, masks: Tensor, places: Tensor) -> Tensor:
    """Specifies `kernels.mask_logits`; returns what becomes of `logits`."""
    logits = logits.clone()
    for mask, place in zip(masks.tolist(), places.tolist(), strict=True):
        allowed = torch.tensor([bool(mask[t // 32] >> t % 32 & 1) for t in range(logits.shape[1])])
        kept = logits[place].masked_fill(~allowed, float("-inf"))
        is_left = bool((kept > float("-inf")).any())
        logits[place] = kept if is_left else plain[place].masked_fill(~allowed, float("-inf"))
    return logits

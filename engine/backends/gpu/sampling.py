"""Sampling on a GPU: one launch for all rows of a step, with the CPU's random numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import upload
from engine.sampling import adjusted, is_adjusted
from engine.step import Row
from kernels.configs import KernelConfig
from kernels.mask_logits import mask_logits
from kernels.sample import SamplingRows, sample


def draw_tokens(logits: Tensor, draws: Sequence[Row], config: KernelConfig, masking: KernelConfig) -> Tensor:
    """int64 `[draws]` on the logits' device, without waiting for it. `logits` float32 `[>= draws, vocab]`.
    `config` and `masking`: of the kernels that draw, and that apply masks."""
    plain = logits = logits[: len(draws)]
    if any(map(is_adjusted, draws)):
        logits = torch.stack([adjusted(row, want) for row, want in zip(logits, draws, strict=True)])
    if any(want.allowed for want in draws):
        _constrain(logits, plain, draws, masking)
    if all(want.record.sampling.temperature == 0.0 for want in draws):
        return logits.argmax(-1)
    return sample(logits.contiguous(), _rows(draws, logits.device), config)


def _constrain(logits: Tensor, plain: Tensor, draws: Sequence[Row], config: KernelConfig) -> None:
    """Leave out, in place, what the rows' masks forbid, which go to the device as they are, a bit for each token. Where
    that leaves nothing of a row, it is left out of the `plain` logits instead, as on the CPU."""
    places = [at for at, want in enumerate(draws) if want.allowed]
    nbytes = 4 * ((logits.shape[1] + 31) // 32)
    packed = bytearray().join(draws[at].allowed.ljust(nbytes, b"\0") for at in places)
    masks = torch.frombuffer(packed, dtype=torch.int32).view(len(places), -1)
    there = upload(torch.tensor(places), logits.device)
    mask_logits(logits, plain.contiguous(), upload(masks, logits.device), there, config)


def _rows(draws: Sequence[Row], device: torch.device) -> SamplingRows:
    params = [want.record.sampling for want in draws]
    seeds, indexes, positions = zip(*(want.draw_key for want in draws), strict=True)
    filters = [p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]
    counts = [p.top_k for p in params], [_signed(seed) for seed in seeds], indexes, positions
    floats = upload(torch.tensor(filters, dtype=torch.float64), device)
    longs = upload(torch.tensor(counts, dtype=torch.int64), device)
    return SamplingRows(
        temperature=floats[0],
        top_k=longs[0].clamp(max=2**31 - 1).int(),
        top_p=floats[1],
        min_p=floats[2],
        seed=longs[1],
        sample_index=longs[2],
        position=longs[3],
    )


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed

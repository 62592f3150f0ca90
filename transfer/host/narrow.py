"""Blocks that travel in 8 bits, on the CPU: converted by the sender on the way out, and back by the receiver.

A block of 16 or 32 bits a value travels as int8 or E4M3 codes with a float32 scale for each row (one token's key or
value of one head in one layer), in the order that a pool of that type has (`engine.kv.layout`). The digest covers what
travels. What is lost is the rounding to 8 bits: at most 1/254 (int8) or 1/28 (E4M3) of the largest value
of a row.
On a device: `transfer.gpu.narrow`.
"""

import torch
from torch import Tensor

from engine.kv.layout import KVLayout
from engine.storage.paged import pool_views
from kernels.kv_write import quantize


def convert(view: memoryview, form: KVLayout, other: KVLayout) -> memoryview:
    """The bytes of a block in `form`, in fresh memory, as they are in `other`, which has another dtype and else the
    same sizes. torch releases the GIL while it works."""
    source, scales = pool_views(_memory(view), form)
    rows = source.float()
    if scales is not None:
        rows *= scales.unsqueeze(-1)
    made = torch.empty(1, other.block_bytes, dtype=torch.uint8)
    target, target_scales = pool_views(made, other)
    if target_scales is None:
        target.copy_(rows)
    else:
        codes, factors = quantize(rows, target.dtype)
        target.view(torch.uint8).copy_(codes.view(torch.uint8))
        target_scales.copy_(factors)
    return made.view(-1).numpy().data


def _memory(view: memoryview) -> Tensor:
    return torch.frombuffer(view, dtype=torch.uint8).view(1, -1)

"""The work that each entry of the table of configurations is measured on: the shapes of K1, K5, K6 and K7."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from benchmarks.gpu.card import Card
from benchmarks.gpu.decode import attention_step, narrowed
from benchmarks.gpu.others import prefill_step
from kernels.block_copy import PROGRAMS, as_words, copy_blocks
from kernels.block_shape import BlockShape
from kernels.configs import ConfigKey, KernelConfig
from kernels.decode_plan import SharedPrefix
from kernels.pool import FORMATS, KVPool

Step = Callable[[KernelConfig], Callable[[], Tensor]]


def step_of(card: Card, key: ConfigKey) -> Step:
    """Return the work of an entry of the table, at the shapes of `card`: a function that takes a configuration and
    returns the launch."""
    if key.kernel == "copy_blocks":
        return _copy_step(card)
    if card.sizes.unit == 1:
        heads = card.sizes.kv_heads * key.group
        card = replace(card, sizes=replace(card.sizes, heads=heads, head_dim=key.head_dim))
    return _prefill(card, key) if key.kernel == "prefill" else _decode(card, key)


def _pool(card: Card, key: ConfigKey, blocks: int) -> KVPool:
    size = card.sizes
    pool = KVPool(card.random(blocks, size.kv_heads, 1, 2, key.block_size, size.head_dim))
    dtype: torch.dtype = getattr(torch, key.dtype)
    return pool if FORMATS[dtype] == "native" else narrowed(card, pool, dtype)


def _decode(card: Card, key: ConfigKey) -> Step:
    """Make the step of K1's batch; with shared prefixes K5's."""
    size, block = card.sizes, key.block_size
    is_shared = key.kernel == "decode_shared"
    prefix = (size.tokens(8192) // block * block or block) if is_shared else 0
    lengths = [prefix + 32] * (2 * size.batch) if is_shared else [size.tokens(4096)] * size.batch
    shared, own = prefix // block, -(-(lengths[0] - prefix) // block)
    order = list(range(shared + own * len(lengths)))
    Random(0).shuffle(order)
    tables = [
        order[:shared] + order[at : at + own]
        for at in range(shared, len(order), own)
    ]
    pool = _pool(card, key, len(order))
    q = card.random(len(lengths), size.heads, size.head_dim)
    prefixes = [SharedPrefix(tuple(range(len(lengths))), prefix)] if is_shared else []
    return lambda config: attention_step(
        card, q, pool, lengths, tables, shared=prefixes, config=config
    )


def _prefill(card: Card, key: ConfigKey) -> Step:
    """Make the step of K7's prompt of 4k."""
    size = card.sizes
    length = size.tokens(4096)
    order = list(range(-(-length // key.block_size)))
    Random(0).shuffle(order)
    pool = _pool(card, key, len(order))
    q = card.random(length, size.heads, size.head_dim)
    return lambda config: prefill_step(card, q, pool, length, order, config)


def _copy_step(card: Card) -> Step:
    """Make the step of K6's packing with digests, on a worker's grid."""
    size = card.sizes
    shape = BlockShape(size.layers, 16, size.head_dim * card.dtype.itemsize)
    count = max(4, size.tokens(size.tokens(1 << 29)) // (size.kv_heads * shape.words * 8))
    source = as_words(card.random(2 * count, size.kv_heads, shape.words * 8 // card.dtype.itemsize))
    order = list(range(2 * count))
    Random(0).shuffle(order)
    scattered, in_order = card.ids(order[:count]), card.ids(list(range(count)))
    tokens, target = card.ids([16] * count), torch.zeros_like(source[:count])

    def step(config: KernelConfig) -> Callable[[], Tensor]:
        target.zero_()

        def work() -> Tensor:
            copy_blocks(
                source, target, scattered, in_order, shape, config, tokens=tokens, programs=PROGRAMS
            )
            return target.view(card.dtype)

        return work

    return step

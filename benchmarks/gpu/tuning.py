"""The candidates for an entry of the table of configurations, each measured on the work that the entry is for.

A candidate that needs more registers or shared memory than there is, or that the compiler refuses, is passed over; one
whose answer differs from that of the present entry is never taken, and told.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from random import Random

import torch
from torch import Tensor

from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.decode import attention_step, narrowed
from benchmarks.gpu.others import PROGRAMS_PER_SM, prefill_step
from kernels.block_copy import as_words, copy_blocks
from kernels.block_shape import BlockShape
from kernels.configs import TABLE, ConfigKey, KernelConfig
from kernels.decode_plan import SharedPrefix
from kernels.launch import REFUSED
from kernels.pool import FORMATS, KVPool

Step = Callable[[KernelConfig], Callable[[], Tensor]]
"""The work of a candidate, which returns its answer."""

APART = 2e-2
"""Answers that differ in nothing but the order of addition are closer than this, of values up to 1."""
GAIN = 0.99
"""An entry is replaced by what takes less than this share of its time."""
IN_DRY_RUN = 2
"""Candidates, and one entry of each kernel."""


def tuned(card: Card, kernels: Sequence[str]) -> tuple[list[Line], list[str]]:
    """A line for each entry of the table: the fastest of its candidates, and how long it and the present one take.
    And which candidates gave another answer."""
    is_dry = card.sizes.unit > 1
    lines: list[Line] = []
    wrong: list[str] = []
    for kernel in kernels:
        keys = [key for key in TABLE if key.kernel == kernel and key.arch == card.arch]
        for key in keys[:1] if is_dry else keys:
            some = list(candidates(key))[:IN_DRY_RUN] if is_dry else candidates(key)
            lines.append(_fastest(card, key, some, wrong))
            print("  ".join(f"{name}={value}" for name, value in lines[-1].items()), flush=True)
    return lines, wrong


def candidates(key: ConfigKey) -> Iterator[KernelConfig]:
    """What may be faster than the table's entry, which is not among them."""
    present = TABLE[key]
    tiles = [512, 1024, 2048] if key.kernel == "copy_blocks" else [32, 64, 128]
    rows = [64, 128] if key.kernel == "prefill" else [present.rows]
    for tile, warps, depth, high in product(tiles, (4, 8), (2, 3, 4, 5), rows):
        found = KernelConfig(tile, warps, depth, high)
        if found != replace(present, origin="contract"):
            yield found


def _fastest(card: Card, key: ConfigKey, some: Iterable[KernelConfig], wrong: list[str]) -> Line:
    step = _step(card, key)
    present = best = TABLE[key]
    want = step(present)().clone()
    present_s = best_s = card.timer.seconds(step(present))
    for config in some:
        try:
            work = step(config)
            apart = float((work().float() - want.float()).abs().max())
            taken_s = card.timer.seconds(work)
        except REFUSED:
            continue
        if not apart <= APART:
            wrong.append(f"{key} with {config}: {apart:.3g} apart")
        elif taken_s < min(best_s, GAIN * present_s):
            best, best_s = config, taken_s
    shape = {name: value for name, value in asdict(best).items() if name != "origin"}
    return {**asdict(key), **shape, "us": best_s * 1e6, "present_us": present_s * 1e6}


def _step(card: Card, key: ConfigKey) -> Step:
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
    """K1's batch; with shared prefixes K5's."""
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
    """K7's prompt of 4k."""
    size = card.sizes
    length = size.tokens(4096)
    order = list(range(-(-length // key.block_size)))
    Random(0).shuffle(order)
    pool = _pool(card, key, len(order))
    q = card.random(length, size.heads, size.head_dim)
    return lambda config: prefill_step(card, q, pool, length, order, config)


def _copy_step(card: Card) -> Step:
    """K6's packing with digests, on the programs of 16 SMs."""
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
                source, target, scattered, in_order, shape, config, tokens=tokens, programs=16 * PROGRAMS_PER_SM
            )
            return target.view(card.dtype)

        return work

    return step

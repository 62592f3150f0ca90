"""Measures prefill attention (K7) and the copying of blocks (K6) with the device to itself; beside a step: `overlap`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.card import Card, Line
from kernels.block_copy import PROGRAMS, as_words, copy_blocks
from kernels.block_shape import BlockShape
from kernels.configs import ConfigKey, KernelConfig, config_for
from kernels.pool import KVPool
from kernels.prefill_attention import plan_prefill, prefill_attention, rows_per_tile
from kernels.prefill_hopper import ROWS, prefill_hopper, runs_on


def prefill(card: Card) -> Iterator[Line]:
    """Measure K7: one causal prompt, and a chunk of 2048 at the end of it; beside torch's own causal attention, in the
    kernel that it chooses and in cuDNN's."""
    size = card.sizes
    lengths = size.tokens(4096), size.tokens(16384)
    for length in lengths:
        chunk = size.tokens(2048)
        for count in (length, chunk):
            taken = _prefill_s(card, count, length)
            yield _prefill_line(card, f"{count} new of {length}", count, length, taken)
        if runs_on(card.device):
            taken = _prefill_s(card, length, length, hopper=True)
            yield _prefill_line(card, f"{length} new of {length}, the kernel for sm_90", length, length, taken)
        theirs = card.timer.seconds(_torch(card, length))
        yield _prefill_line(card, "torch, contiguous", length, length, theirs)
    # Last, since what fails on the way may leave the device unusable.
    for length in lengths:
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                theirs = card.timer.seconds(_torch(card, length))
        except RuntimeError as error:
            yield {"id": "K7", "what": "torch, cuDNN", "refused": str(error).partition("\n")[0]}
        else:
            yield _prefill_line(card, "torch, cuDNN", length, length, theirs)


def _prefill_s(card: Card, count: int, length: int, *, hopper: bool = False) -> float:
    size, block = card.sizes, 64
    order = list(range(-(-length // block)))
    Random(0).shuffle(order)
    pool = KVPool(card.random(len(order), size.kv_heads, 1, 2, block, size.head_dim))
    q = card.random(count, size.heads, size.head_dim)
    return card.timer.seconds(prefill_step(card, q, pool, length, order, hopper=hopper))


def prefill_step(
    card: Card,
    q: Tensor,
    pool: KVPool,
    length: int,
    table: Sequence[int],
    config: KernelConfig | None = None,
    *,
    hopper: bool = False,
) -> Callable[[], Tensor]:
    """Return a function that attends with `q` `[count, heads, head_dim]`, the last rows of one context; always into the
    same memory. `config`: by default the table's. `hopper`: with the kernel for sm_90, which has one of its own."""
    size = card.sizes
    group = size.heads // size.kv_heads
    dtype = str(pool.payload.dtype).removeprefix("torch.")
    key = ConfigKey("prefill", size.head_dim, group, pool.block_size, dtype, card.arch)
    chosen = config or config_for(key)
    planned = plan_prefill([len(q)], [length], ROWS // group if hopper else rows_per_tile(chosen, group))
    tiles = torch.tensor(planned, dtype=torch.int32).to(card.device)
    tables, out = card.ids(list(table)).unsqueeze(0), torch.empty_like(q)
    if hopper:
        return lambda: prefill_hopper(q, pool, 0, tiles, tables, out=out)
    return lambda: prefill_attention(q, pool, 0, tiles, tables, chosen, out=out)


def _torch(card: Card, length: int) -> Callable[[], Tensor]:
    size = card.sizes
    q = card.random(1, size.heads, length, size.head_dim)
    k, v = (card.random(1, size.kv_heads, length, size.head_dim) for _ in range(2))
    return partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)


def _prefill_line(card: Card, what: str, count: int, length: int, taken: float) -> Line:
    """Make a line. It counts operations of the pairs that a causal mask leaves: 4 x head_dim each."""
    pairs = count * (length - count) + count * (count + 1) / 2
    operations = 4 * card.sizes.head_dim * card.sizes.heads * pairs
    rate = operations / taken / 1e12
    context: Line = {"tokens": count, "context": length}
    return {"id": "K7", "what": what, **context, "us": taken * 1e6, "tflop_per_s": rate}


PROGRAMS_PER_SM = 4
"""Programs of the copy kernel that fit, by their registers and shared memory (`tests/kernels/contract`)."""


def copies(card: Card) -> Iterator[Line]:
    """Measure K6: scattered blocks of 16 tokens into a row of them and back, on as many programs as a worker's copies
    have and on as many as the card holds, with and without digests."""
    size = card.sizes
    shape = BlockShape(size.layers, 16, size.head_dim * card.dtype.itemsize)
    block_bytes = size.kv_heads * shape.words * 8
    count = max(4, size.tokens(size.tokens(1 << 30)) // block_bytes)
    pool = as_words(card.random(2 * count, size.kv_heads, shape.words * 8 // card.dtype.itemsize))
    packed = torch.empty_like(pool[:count])
    order = list(range(2 * count))
    Random(0).shuffle(order)
    scattered, in_order = card.ids(order[:count]), card.ids(list(range(count)))
    tokens = card.ids([16] * count)
    key = ConfigKey("copy_blocks", size.head_dim, 0, 64, "bfloat16", card.arch)
    config = config_for(key)
    plain = card.timer.seconds(lambda: packed.copy_(pool[:count]))
    yield _copy_line("torch, contiguous", packed.nbytes, plain, plain)
    ways = {"pack": (pool, packed, scattered, in_order), "unpack": (packed, pool, in_order, scattered)}
    for grid, programs in (("a worker's", PROGRAMS), ("the card's", PROGRAMS_PER_SM * card.sms)):
        for way, (source, target, sources, targets) in ways.items():
            for digest in (False, True):
                taken = card.timer.seconds(
                    partial(
                        copy_blocks,
                        source,
                        target,
                        sources,
                        targets,
                        shape,
                        config,
                        tokens=tokens if digest else None,
                        programs=programs,
                    )
                )
                what = f"{way}{', digests' if digest else ''}"
                line = _copy_line(what, packed.nbytes, taken, plain)
                yield {**line, "grid": grid, "programs": programs}


def _copy_line(what: str, nbytes: int, taken: float, plain: float) -> Line:
    rate = 2 * nbytes / taken / 1e12
    return {"id": "K6", "what": what, "us": taken * 1e6, "tb_per_s": rate, "of_copy": plain / taken}

"""Paged decode attention: K0 to K5, K8, and what splitting contexts is for. `docs/kernels.md` says what bounds it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.card import Card, Line
from kernels.configs import ConfigKey, KernelConfig, config_for
from kernels.decode_attention import decode_attention, decode_residency
from kernels.decode_buffers import DecodeBuffers
from kernels.decode_plan import SharedPrefix, geometry_for, plan_decode
from kernels.kv_write import quantize
from kernels.pool import KVPool, eight_bit_pool

ORDERS = {
    "blocks, heads, layers, 2": (0, 1, 2, 3, 4, 5),
    "blocks, layers, 2, heads": (0, 3, 1, 2, 4, 5),
    "layers, blocks, 2, heads": (1, 3, 0, 2, 4, 5),
}
"""Orders in memory, as the permutations that lead from them to `[blocks, heads, layers, 2, tokens, head_dim]`."""


LEAST_POOL_BYTES = 32 << 30


def orders(card: Card) -> Iterator[Line]:
    """Measure K0: the layout's order in memory, over a pool that no cache of translations holds. A card without room
    for such a pool gets one line that says so: a smaller one would tell nothing."""
    size = card.sizes
    if card.device.type == "cuda" and size.pool_bytes < LEAST_POOL_BYTES:
        refused = f"a pool of {size.pool_bytes >> 30} GiB, and K0 takes {LEAST_POOL_BYTES >> 30}"
        yield {"id": "K0", "refused": refused}
        return
    block = 64
    shape = (0, size.kv_heads, size.layers, 2, block, size.head_dim)
    per_block = size.kv_heads * size.layers * 2 * block * size.head_dim * card.dtype.itemsize
    length = size.tokens(4096)
    blocks = max(size.pool_bytes // per_block, size.batch * -(-length // block))
    memory = card.random(blocks * per_block // card.dtype.itemsize)
    first = 0.0
    for name, order in ORDERS.items():
        whole = (blocks, *shape[1:])
        inverse = sorted(range(6), key=order.__getitem__)
        payload = memory.view([whole[at] for at in inverse]).permute(order)
        taken = _seconds(card, KVPool(payload), [length] * size.batch, blocks, layer=size.layers // 2)
        first = first or taken
        line = _line(card, "K0", name, [length] * size.batch, taken, card.dtype.itemsize)
        yield {**line, "pool_bytes": memory.nbytes, "of_first": taken / first}


def shapes(card: Card) -> Iterator[Line]:
    """Measure K1, K2, K3 and the two sides of splitting, beside torch's own attention over contiguous KV."""
    size = card.sizes
    long = size.tokens(64 * 1024)
    cases: list[tuple[str, str, list[int], bool]] = [
        ("K1", "batch", [size.tokens(4096)] * size.batch, True),
        ("K2", "one", [size.tokens(1024)], True),
        ("K3", "skewed", [long, *[size.tokens(512)] * (2 * size.batch - 1)], True),
        ("split", "one long, split", [long], True),
        ("split", "one long, not split", [long], False),
    ]
    for name, what, lengths, split in cases:
        pool, blocks = _pool(card, lengths, 64)
        taken = _seconds(card, pool, lengths, blocks, split=split)
        yield _line(card, name, what, lengths, taken, card.dtype.itemsize)
        if split and len(set(lengths)) == 1:
            yield _torch(card, name, len(lengths), lengths[0])


def eight_bits(card: Card) -> Iterator[Line]:
    """Measure K4: at K1's shape, as a ratio to 16 bits in the same run."""
    size = card.sizes
    lengths = [size.tokens(4096)] * size.batch
    pool, blocks = _pool(card, lengths, 64)
    plain = _seconds(card, pool, lengths, blocks)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        small = narrowed(card, pool, dtype)
        taken = _seconds(card, small, lengths, blocks)
        with_scales = (size.head_dim + 4) / size.head_dim
        line = _line(card, "K4", str(dtype).removeprefix("torch."), lengths, taken, with_scales)
        of_16_bit = _kv_bytes(card, lengths, card.dtype.itemsize)
        yield {**line, "bytes_of_16_bit": of_16_bit, "times_16_bit_speed": plain / taken}


def narrowed(card: Card, pool: KVPool, dtype: torch.dtype) -> KVPool:
    """Return a pool of one layer in 8 bits."""
    count, heads, _, _, block, head_dim = pool.payload.shape
    _, small = eight_bit_pool(count, heads, 1, block, head_dim, dtype=dtype, device=card.device)
    assert small.scales is not None
    for at in range(0, count, 64):  # a few at a time: they are widened to 32 bits
        codes, scales = quantize(pool.payload[at : at + 64].float(), dtype)
        small.payload[at : at + 64] = codes
        small.scales[at : at + 64] = scales
    return small


def shared(card: Card) -> list[Line]:
    """Measure K5: 64 requests behind one prefix, with and without knowing that it is one."""
    size = card.sizes
    prefix = size.tokens(8192) // 64 * 64 or 64
    lengths = [prefix + 32] * (2 * size.batch)
    pool, blocks = _pool(card, lengths, 64)
    common = SharedPrefix(tuple(range(len(lengths))), prefix)
    plain = _seconds(card, pool, lengths, blocks, tables_of=common)
    once = _seconds(card, pool, lengths, blocks, tables_of=common, shared=[common])
    read = [prefix, *(length - prefix for length in lengths)]
    line = _line(card, "K5", f"{len(lengths)} behind one prefix", read, once, card.dtype.itemsize)
    return [{**line, "plain_us": plain * 1e6, "times_plain_speed": plain / once}]


def blocks(card: Card) -> Iterator[Line]:
    """Measure K8: what paging costs: shuffled blocks of each size against contiguous ones of 128 tokens."""
    size = card.sizes
    lengths = [size.tokens(4096)] * size.batch
    base = 0.0
    for block, scattered in ((128, False), (1, True), (16, True), (64, True), (128, True)):
        pool, count = _pool(card, lengths, block)
        taken = _seconds(card, pool, lengths, count, scattered=scattered)
        base = base or taken
        what = f"blocks of {block}, {'shuffled' if scattered else 'in order'}"
        line = _line(card, "K8", what, lengths, taken, card.dtype.itemsize)
        yield {**line, "of_contiguous": taken / base}


def _pool(card: Card, lengths: Sequence[int], block: int) -> tuple[KVPool, int]:
    size = card.sizes
    count = sum(-(-length // block) for length in lengths)
    return KVPool(card.random(count, size.kv_heads, 1, 2, block, size.head_dim)), count


def _seconds(
    card: Card,
    pool: KVPool,
    lengths: list[int],
    blocks: int,
    *,
    layer: int = 0,
    split: bool = True,
    scattered: bool = True,
    shared: Sequence[SharedPrefix] = (),
    tables_of: SharedPrefix | None = None,
) -> float:
    """Time one step's attention, the merge included."""
    size = card.sizes
    order = list(range(blocks))
    if scattered:
        Random(0).shuffle(order)
    need = [-(-length // pool.block_size) for length in lengths]
    tables = [order[sum(need[:at]) : sum(need[: at + 1])] for at in range(len(need))]
    if tables_of is not None:
        head = tables_of.tokens // pool.block_size
        tables = [tables[0][:head] + table[head:] for table in tables]
    q = card.random(len(lengths), size.heads, size.head_dim)
    step = attention_step(card, q, pool, lengths, tables, layer=layer, split=split, shared=shared)
    return card.timer.seconds(step)


def attention_step(
    card: Card,
    q: Tensor,
    pool: KVPool,
    lengths: list[int],
    tables: Sequence[Sequence[int]],
    *,
    layer: int = 0,
    split: bool = True,
    shared: Sequence[SharedPrefix] = (),
    config: KernelConfig | None = None,
) -> Callable[[], Tensor]:
    """Return a function that computes `[batch, heads, head_dim]` of one step, planned beforehand; always into the same
    memory. `config`: by default the table's."""
    size = card.sizes
    group = size.heads // size.kv_heads
    dtype = str(pool.payload.dtype).removeprefix("torch.")
    kind = "decode_shared" if shared else "decode"
    key = ConfigKey(kind, size.head_dim, group, pool.block_size, dtype, card.arch)
    chosen = config or config_for(key)
    width = max(map(len, tables))
    per_sm = size.programs_per_sm or decode_residency(size.heads, q.dtype, pool, chosen, width)
    geometry = geometry_for(
        batch=len(lengths),
        kv_heads=size.kv_heads,
        group=group,
        programs=per_sm * card.sms,
        tile=chosen.tile,
        packed_rows=chosen.rows,
    )
    if not split:
        geometry = replace(geometry, min_chunk_tiles=max(lengths))
    buffers = DecodeBuffers(
        geometry,
        batch=len(lengths),
        heads=size.heads,
        head_dim=size.head_dim,
        table_blocks=width,
        device=card.device,
    )
    buffers.load(plan_decode(lengths, geometry, shared), lengths, tables)
    out = torch.empty_like(q)
    return lambda: decode_attention(q, pool, layer, buffers, chosen, out=out)[0]


def _line(
    card: Card, name: str, what: str, lengths: Sequence[int], taken: float, value_bytes: float
) -> Line:
    read = _kv_bytes(card, lengths, value_bytes)
    return {"id": name, "what": what, "us": taken * 1e6, "bytes": read, "tb_per_s": read / taken / 1e12}


def _kv_bytes(card: Card, lengths: Sequence[int], value_bytes: float) -> int:
    return int(sum(lengths) * card.sizes.kv_heads * card.sizes.head_dim * 2 * value_bytes)


def _torch(card: Card, name: str, batch: int, length: int) -> Line:
    """Attend with torch's own kernels over KV that lies in order: not paged, so it has less to do."""
    size = card.sizes
    q = card.random(batch, size.heads, 1, size.head_dim)
    k, v = (card.random(batch, size.kv_heads, length, size.head_dim) for _ in range(2))
    taken = card.timer.seconds(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True))
    what = "torch, contiguous"
    return _line(card, name, what, [length] * batch, taken, card.dtype.itemsize)

"""Attention over paged KV: decode and chunked prefill in one call.

Sequence i of a step has `count_i` new query rows at the end of a context of `context_i` tokens (the new rows included)
whose keys and values lie in the blocks of its block table. Row r of the sequence attends to the first
`context_i - count_i + r + 1` tokens:

    out[r] = softmax(q[r] K^T / sqrt(head_dim)) V      per query head, K and V shared by a group of query heads

The pool is `[blocks, kv_heads, layers, 2, block_size, head_dim]`. What depends only on the step's shape (which rows to
gather, the masks) is planned once per step and reused by every layer. No sequence's result depends on another's, and
stale rows past a sequence's end are never used. Contexts are gathered a few sequences at a time, so that what a step
holds does not grow with their sum. 8-bit rows are widened on the way. Source: PagedAttention (Kwon et al. 2023, section
4); specification in `kernels.reference`.

**Stable** plans give each query row bits that depend on its own prefix alone, however its prompt was cut into chunks.
The library's kernel walks the keys in tiles of 512, and its products, given four rows or a multiple, add a tile's keys
in an order that depends on the tile's width only: one order for every width up to 192 and from 384 on, since masked
keys add exactly nothing there. So the last tile is widened to such a width with masked zero keys, and query rows are
padded to a multiple of four. `engine.backends.determinism` checks on each machine that this holds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

ROW_MULTIPLE = 4
KEY_TILE = 512
LANES = 16
GATHER_BYTES = 16 * 1024 * 1024
"""Bytes of keys and values of one layer that are gathered at a time; a longer context is gathered alone."""
NARROW, WIDE = 192, 384
"""A last tile with a width between these two is added up in another order."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Sequences that one call attends to: either one with many rows, or all decoding ones of the same width.

    `rows`: int64 `[sequences * count]` query rows. `mask`: additive, `[sequences, 1, 1 or rows of a group, width]`, or
    None where every row sees all."""

    rows: Tensor
    sequences: int
    count: int
    width: int
    blocks: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Gather:
    """What is gathered at once, and the calls that read it. `index`: flat row numbers of layer 0 in the pool seen as
    `[blocks * kv_heads * layers * 2, block_size * head_dim]`, sequence after sequence, each ordered `[2, kv_heads, its
    blocks]`. `stale`: rows of what is gathered, seen as `[-1, head_dim]`, that lie past a sequence's end and must be
    zero."""

    index: Tensor
    stale: Tensor
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Says where each sequence's KV lies. Valid for every layer of one step over one pool."""

    gathers: tuple[_Gather, ...]
    row_multiple: int


def stable_width(context: int) -> int:
    """Return how many keys a stable plan computes with for a context of so many tokens."""
    rest = context % KEY_TILE
    lanes = -(-rest // LANES) * LANES
    return context - rest + (lanes if lanes <= NARROW else max(lanes, WIDE))


def plan_attention(
    query_counts: list[int],
    context_lens: list[int],
    block_tables: list[Tensor],
    pool: Tensor,
    heads: int,
    stable: bool = False,
    *,
    dtype: torch.dtype | None = None,
    gather_bytes: int | None = None,
) -> AttentionPlan:
    """Plan a step. `block_tables[i]` is int64 `[blocks of i]`, at least ceil(context / block_size) long; `heads` query
    heads of `dtype`, by default the pool's."""
    _, kv_heads, _, _, block_size, head_dim = pool.shape
    dtype = pool.dtype if dtype is None else dtype
    most = GATHER_BYTES if gather_bytes is None else gather_bytes
    group, multiple = heads // kv_heads, ROW_MULTIPLE if stable else 1
    starts = [sum(query_counts[:at]) for at in range(len(query_counts))]
    widths = [stable_width(context) if stable else context for context in context_lens]
    block_bytes = 2 * kv_heads * block_size * head_dim * dtype.itemsize
    gathers, members, held = [], list[list[int]](), 0
    for together in _together(query_counts, widths):
        need = -(-widths[together[0]] // block_size) * block_bytes
        for some in _cut(together, max(1, most // need)):
            if members and held + len(some) * need > most:
                gathers.append(_gather(members, context_lens, widths, block_tables, pool))
                members, held = [], 0
            members.append(some)
            held += len(some) * need
    gathers.append(_gather(members, context_lens, widths, block_tables, pool))

    def part(some: list[int]) -> _Part:
        count, width = query_counts[some[0]], widths[some[0]]
        rows = torch.cat([torch.arange(starts[at], starts[at] + count) for at in some])
        mask = _mask(count, [context_lens[at] for at in some], width, group, dtype, multiple)
        return _Part(rows, len(some), count, width, -(-width // block_size), mask)

    return AttentionPlan(
        tuple(_Gather(index, stale, tuple(map(part, of))) for index, stale, of in gathers), multiple
    )


def _gather(
    members: list[list[int]],
    contexts: list[int],
    widths: list[int],
    block_tables: list[Tensor],
    pool: Tensor,
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return the index and the stale rows of these sequences, one after the other; and the sequences."""
    _, kv_heads, layers, _, block_size, _ = pool.shape
    kv = torch.arange(2).view(2, 1, 1)
    head = torch.arange(kv_heads).view(1, kv_heads, 1) * (layers * 2)
    indices, stales, offset = [], [torch.empty(0, dtype=torch.int64)], 0
    for at in (at for some in members for at in some):
        blocks = -(-widths[at] // block_size)
        table = block_tables[at][: -(-contexts[at] // block_size)]
        table = torch.cat([table, table[:1].expand(blocks - len(table))])
        indices.append((table * (kv_heads * layers * 2) + head + kv).view(-1))
        if contexts[at] < widths[at]:
            slab = torch.arange(2 * kv_heads).view(-1, 1) * (blocks * block_size) + offset
            stales.append((slab + torch.arange(contexts[at], widths[at])).view(-1))
        offset += 2 * kv_heads * blocks * block_size
    return torch.cat(indices), torch.cat(stales), members


def _cut(members: list[int], most: int) -> Iterable[list[int]]:
    return (members[at : at + most] for at in range(0, len(members), most))


def _together(counts: list[int], widths: list[int]) -> Iterable[list[int]]:
    """Group the sequences by call: decoding ones of one width together; any other alone."""
    decoding: dict[int, list[int]] = {}
    for at, (count, width) in enumerate(zip(counts, widths, strict=True)):
        if count == 1:
            decoding.setdefault(width, []).append(at)
        else:
            yield [at]
    yield from decoding.values()


def _mask(
    count: int, contexts: list[int], width: int, group: int, dtype: torch.dtype, multiple: int
) -> Tensor | None:
    if count == 1:
        if all(context == width for context in contexts):
            return None
        hidden = torch.arange(width) >= torch.tensor(contexts).view(-1, 1)
        mask = torch.zeros(len(contexts), width, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return mask.view(len(contexts), 1, 1, width)
    (context,) = contexts
    causal = torch.full((count, width), float("-inf"), dtype=dtype).triu_(context - count + 1)
    rows = causal.repeat(group, 1)
    if padding := -len(rows) % multiple:
        rows = torch.cat([rows, rows[-1:].expand(padding, width)])
    return rows.view(1, 1, -1, width)


def paged_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    plan: AttentionPlan,
    out: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Attend with `q` `[rows, heads, head_dim]` -> `out` `[rows, heads, head_dim]`, written for the planned rows only.
    `scales` `[blocks, kv_heads, layers, 2, block_size]` belong to an 8-bit pool: value = pool * scale of its row."""
    _, kv_heads, layers, _, _, head_dim = pool.shape
    if q.shape[1] % kv_heads or q.shape[2] != head_dim or not 0 <= layer < layers:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a pool {tuple(pool.shape)}, layer {layer}")
    for gather in plan.gathers:
        _read(q, pool, layer, gather, plan.row_multiple, out, scales)
    return out


def _read(
    q: Tensor,
    pool: Tensor,
    layer: int,
    gather: _Gather,
    row_multiple: int,
    out: Tensor,
    scales: Tensor | None,
) -> None:
    """Gather, attend, and let go of what was gathered: the next is not held beside it."""
    kv_heads, block_size, head_dim = pool.shape[1], pool.shape[4], pool.shape[5]
    gathered = _rows(pool, scales, layer, gather.index, q.dtype)
    if len(gather.stale):
        gathered.index_fill_(0, gather.stale, 0.0)
    offset = 0
    for part in gather.parts:
        size = part.sequences * 2 * kv_heads * part.blocks * block_size
        kv = gathered[offset : offset + size].view(part.sequences, 2, kv_heads, -1, head_dim)
        offset += size
        out.index_copy_(0, part.rows, _attend(q, kv, part, row_multiple))


def _rows(
    pool: Tensor, scales: Tensor | None, layer: int, index: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `[rows, head_dim]` in `dtype`: the rows at `index`, as in `_Gather`, but of this layer."""
    _, _, layers, _, block_size, head_dim = pool.shape
    if scales is None:
        rows = pool.view(-1, block_size * head_dim).index_select(0, index + 2 * layer)
        return rows.view(-1, head_dim).to(dtype)
    slab, kv = index // (2 * layers), index % 2
    codes = pool.view(torch.uint8).flatten(0, 1)[:, layer][slab, kv].view(pool.dtype)
    factors = scales.flatten(0, 1)[:, layer][slab, kv].unsqueeze(-1)
    return codes.float().mul_(factors).view(-1, head_dim).to(dtype)


def _attend(q: Tensor, kv: Tensor, part: _Part, row_multiple: int) -> Tensor:
    """Make one call of the library; returns `[rows of the part, heads, head_dim]`."""
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    group = q.shape[1] // kv_heads
    # The group's query heads are packed as extra rows, so that each K/V byte is read once per KV head.
    shape = (part.sequences, part.count, kv_heads, group, head_dim)
    rows = q.index_select(0, part.rows).view(shape).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(part.sequences, kv_heads, group * part.count, head_dim)
    if padding := -rows.shape[2] % row_multiple:
        rows = pad(rows, (0, 0, 0, padding))
    answer = scaled_dot_product_attention(
        rows, kv[:, 0, :, : part.width], kv[:, 1, :, : part.width], attn_mask=part.mask
    )[:, :, : group * part.count]
    answer = answer.view(part.sequences, kv_heads, group, part.count, head_dim)
    return answer.permute(0, 3, 1, 2, 4).reshape(len(part.rows), -1, head_dim)

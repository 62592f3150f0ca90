"""Attention over paged KV: decode and chunked prefill in one call.

Sequence i of a step has `count_i` new query rows at the end of a context of `context_i` tokens (the new rows included)
whose keys and values lie in the blocks of its block table. Row r of the sequence attends to the first
`context_i - count_i + r + 1` tokens:

    out[r] = softmax(q[r] K^T / sqrt(head_dim)) V      per query head, K and V shared by a group of query heads

Under a sliding window it attends to the last `window` of them; scores may have another scale, a soft cap, and a sink
(one more score per head, of a value that is zero). Caps and sinks are beyond the library's kernel: such layers walk the
keys here, in tiles of the same size.

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
from typing import NamedTuple

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

    `rows`: int64 `[sequences * count]` query rows. Of each sequence's `blocks`, keys `lead ..< lead + width` are
    computed with. `mask`: additive, `[sequences, 1, 1 or rows of a group, width]`, or None where every row sees all."""

    rows: Tensor
    sequences: int
    count: int
    lead: int
    width: int
    blocks: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Gather:
    """What is gathered at once, and the calls that read it. `index`: flat row numbers of layer 0 in the pool seen as
    `[blocks * kv_heads * layers * 2, block_size * head_dim]`, sequence after sequence, each ordered `[2, kv_heads, its
    blocks]`. `stale`: rows of what is gathered, seen as `[-1, head_dim]`, that lie past a sequence's end or before
    its window, and must be zero."""

    index: Tensor
    stale: Tensor
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Says where each sequence's KV lies. Valid for every layer of one step over one pool that has the same window."""

    gathers: tuple[_Gather, ...]
    row_multiple: int


def stable_width(context: int) -> int:
    """Return how many keys a stable plan computes with for a context of so many tokens."""
    rest = context % KEY_TILE
    lanes = -(-rest // LANES) * LANES
    return context - rest + (lanes if lanes <= NARROW else max(lanes, WIDE))


class _Reach(NamedTuple):
    """The keys of one sequence: those from `low` to its context are seen by some row of it; those from `start` to `end`
    are computed with. Both are positions, and so is `begin`, where the first block that is gathered begins."""

    low: int
    context: int
    start: int
    end: int
    begin: int

    @staticmethod
    def of(count: int, context: int, window: int, block_size: int, stable: bool) -> "_Reach":
        low = max(0, context - count + 1 - window) if window else 0
        start = low - low % (KEY_TILE if stable else block_size)
        end = stable_width(context) if stable else context
        return _Reach(low, context, start, end, start - start % block_size)

    @property
    def width(self) -> int:
        return self.end - self.start

    def blocks(self, block_size: int) -> int:
        return -(-(self.end - self.begin) // block_size)


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
    window: int = 0,
) -> AttentionPlan:
    """Plan a step. `block_tables[i]` is int64 `[blocks of i]`, at least ceil(context / block_size) long; `heads` query
    heads of `dtype`, by default the pool's. `window`: how many keys a row sees, itself included; 0: all before it.
    Blocks before the window are not read."""
    _, kv_heads, _, _, block_size, head_dim = pool.shape
    dtype = pool.dtype if dtype is None else dtype
    most = GATHER_BYTES if gather_bytes is None else gather_bytes
    group, multiple = heads // kv_heads, ROW_MULTIPLE if stable else 1
    starts = [sum(query_counts[:at]) for at in range(len(query_counts))]
    reaches = [
        _Reach.of(count, context, window, block_size, stable)
        for count, context in zip(query_counts, context_lens, strict=True)
    ]
    block_bytes = 2 * kv_heads * block_size * head_dim * dtype.itemsize
    gathers, members, held = [], list[list[int]](), 0
    for together in _together(query_counts, reaches):
        need = reaches[together[0]].blocks(block_size) * block_bytes
        for some in _cut(together, max(1, most // need)):
            if members and held + len(some) * need > most:
                gathers.append(_gather(members, reaches, block_tables, pool))
                members, held = [], 0
            members.append(some)
            held += len(some) * need
    gathers.append(_gather(members, reaches, block_tables, pool))

    def part(some: list[int]) -> _Part:
        count, reach = query_counts[some[0]], reaches[some[0]]
        rows = torch.cat([torch.arange(starts[at], starts[at] + count) for at in some])
        mask = _mask(count, [reaches[at] for at in some], window, group, dtype, multiple)
        lead = reach.start - reach.begin
        return _Part(rows, len(some), count, lead, reach.width, reach.blocks(block_size), mask)

    return AttentionPlan(
        tuple(_Gather(index, stale, tuple(map(part, of))) for index, stale, of in gathers), multiple
    )


def _gather(
    members: list[list[int]],
    reaches: list[_Reach],
    block_tables: list[Tensor],
    pool: Tensor,
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return the index and the stale rows of these sequences, one after the other; and the sequences."""
    _, kv_heads, layers, _, block_size, _ = pool.shape
    kv = torch.arange(2).view(2, 1, 1)
    head = torch.arange(kv_heads).view(1, kv_heads, 1) * (layers * 2)
    indices, stales, offset = [], [torch.empty(0, dtype=torch.int64)], 0
    for at in (at for some in members for at in some):
        reach = reaches[at]
        blocks = reach.blocks(block_size)
        table = block_tables[at][reach.begin // block_size : -(-reach.context // block_size)]
        table = torch.cat([table, table[-1:].expand(blocks - len(table))])
        indices.append((table * (kv_heads * layers * 2) + head + kv).view(-1))
        slab = torch.arange(2 * kv_heads).view(-1, 1) * (blocks * block_size) + offset - reach.begin
        for first, last in ((reach.start, reach.low), (reach.context, reach.end)):
            if first < last:
                stales.append((slab + torch.arange(first, last)).view(-1))
        offset += 2 * kv_heads * blocks * block_size
    return torch.cat(indices), torch.cat(stales), members


def _cut(members: list[int], most: int) -> Iterable[list[int]]:
    return (members[at : at + most] for at in range(0, len(members), most))


def _together(counts: list[int], reaches: list[_Reach]) -> Iterable[list[int]]:
    """Group the sequences by call: decoding ones of one width together; any other alone."""
    decoding: dict[tuple[int, int], list[int]] = {}
    for at, (count, reach) in enumerate(zip(counts, reaches, strict=True)):
        if count == 1:
            decoding.setdefault((reach.start - reach.begin, reach.width), []).append(at)
        else:
            yield [at]
    yield from decoding.values()


def _mask(
    count: int, reaches: list[_Reach], window: int, group: int, dtype: torch.dtype, multiple: int
) -> Tensor | None:
    width = reaches[0].width
    if count == 1:
        if all(reach.low == reach.start and reach.context == reach.end for reach in reaches):
            return None
        keys = torch.arange(width)
        hidden = keys >= torch.tensor([reach.context - reach.start for reach in reaches]).view(-1, 1)
        hidden |= keys < torch.tensor([reach.low - reach.start for reach in reaches]).view(-1, 1)
        mask = torch.zeros(len(reaches), width, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return mask.view(len(reaches), 1, 1, width)
    (reach,) = reaches
    last = reach.context - reach.start - count  # the last key that the first row sees
    causal = torch.full((count, width), float("-inf"), dtype=dtype).triu_(last + 1)
    if window:
        causal += torch.full((count, width), float("-inf"), dtype=dtype).tril_(last - window)
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
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with `q` `[rows, heads, head_dim]` -> `out` `[rows, heads, head_dim]`, written for the planned rows only.
    `scales` `[blocks, kv_heads, layers, 2, block_size]` belong to an 8-bit pool: value = pool * scale of its row.
    `scale`: of scores, by default 1 / sqrt(head_dim); `softcap`: of scaled scores, 0 for none; `sinks` `[heads]`: a
    further score each, without a value."""
    _, kv_heads, layers, _, _, head_dim = pool.shape
    if q.shape[1] % kv_heads or q.shape[2] != head_dim or not 0 <= layer < layers:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a pool {tuple(pool.shape)}, layer {layer}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"{len(sinks)} sinks for {q.shape[1]} heads")
    scoring = _Scoring(scale, softcap, sinks)
    for gather in plan.gathers:
        _read(q, pool, layer, gather, plan.row_multiple, out, scales, scoring)
    return out


class _Scoring(NamedTuple):
    """What becomes of products of queries and keys before the softmax."""

    scale: float | None
    softcap: float
    sinks: Tensor | None


def _read(
    q: Tensor,
    pool: Tensor,
    layer: int,
    gather: _Gather,
    row_multiple: int,
    out: Tensor,
    scales: Tensor | None,
    scoring: _Scoring,
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
        out.index_copy_(0, part.rows, _attend(q, kv, part, row_multiple, scoring))


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


def _attend(q: Tensor, kv: Tensor, part: _Part, row_multiple: int, scoring: _Scoring) -> Tensor:
    """Attend to what was gathered; returns `[rows of the part, heads, head_dim]`."""
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    group = q.shape[1] // kv_heads
    # The group's query heads are packed as extra rows, so that each K/V byte is read once per KV head.
    shape = (part.sequences, part.count, kv_heads, group, head_dim)
    rows = q.index_select(0, part.rows).view(shape).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(part.sequences, kv_heads, group * part.count, head_dim)
    if padding := -rows.shape[2] % row_multiple:
        rows = pad(rows, (0, 0, 0, padding))
    keys, values = (kv[:, which, :, part.lead : part.lead + part.width] for which in (0, 1))
    if scoring.softcap or scoring.sinks is not None:
        tile = KEY_TILE if row_multiple > 1 else part.width
        answer = _by_tiles(rows, keys, values, part, scoring, tile)
    else:
        answer = scaled_dot_product_attention(rows, keys, values, attn_mask=part.mask, scale=scoring.scale)
    answer = answer[:, :, : group * part.count].view(part.sequences, kv_heads, group, part.count, head_dim)
    return answer.permute(0, 3, 1, 2, 4).reshape(len(part.rows), -1, head_dim)


def _by_tiles(rows: Tensor, keys: Tensor, values: Tensor, part: _Part, scoring: _Scoring, tile: int) -> Tensor:
    """Attend with a cap or sinks, in float32 and by an online softmax over whole tiles of keys; the last is filled up,
    so that a row's sums are made alike whatever its context is computed with."""
    sequences, kv_heads, count, head_dim = rows.shape
    top = torch.full((sequences, kv_heads, count, 1), float("-inf"))
    total = torch.zeros_like(top)
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(1, kv_heads, -1, 1).expand(sequences, -1, -1, part.count)
        top[:, :, : sinks.shape[2] * part.count] = sinks.reshape(sequences, kv_heads, -1, 1)
        total += top.isfinite()
    queries = rows.float() * (head_dim**-0.5 if scoring.scale is None else scoring.scale)
    answer = torch.zeros(rows.shape)
    for start in range(0, part.width, tile):
        some = slice(start, min(start + tile, part.width))
        missing = tile - (some.stop - start)
        k, v = (pad(side[:, :, some].float(), (0, 0, 0, missing)) for side in (keys, values))
        scores = queries @ k.transpose(-1, -2)
        if scoring.softcap:
            scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        if part.mask is not None:
            scores[..., : tile - missing] += part.mask[..., some]
        scores[..., tile - missing :] = float("-inf")
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet compares with 0: -inf minus -inf is not a number.
        shift = new_top.masked_fill(new_top == float("-inf"), 0.0)
        weights, keep = scores.sub_(shift).exp_(), (top - shift).exp_()
        answer = answer * keep + weights @ v
        total = total * keep + weights.sum(-1, keepdim=True)
        top = new_top
    return (answer / total).to(rows.dtype)

# mypy: allow-untyped-defs, allow-incomplete-defs
"""The inner step of every attention kernel: fetch a tile of keys and values by block table, fold it into a softmax.

Queries are packed: row m of a tile is query head `m % GROUP` of the KV head, of query `m // GROUP`, so that each key
and value byte is read once per KV head and not once per query head. Scores become powers of two (`scale` holds log2 e)
as one multiply-add of the exponent. A soft cap acts on natural scores: `scale` is then what the hyperbolic tangent is
taken of, and the cap times log2 e makes the exponent. A sink, one more score of a head without a value, joins the sum
at the very end.

8-bit keys and values are read two at a time, as 16 bits: what the hardware can transpose, and copy 16 bytes at a time.
Even and odd columns are widened apart and multiplied apart, with the even and the odd columns of the queries. They are
widened to float16, exactly, and not to the queries' bfloat16, which costs three times the instructions; a query is one
of both but beyond the range of float16, where it is cut off. The scales of keys and values are folded into scores and
probabilities, one multiplication per token instead of one per element.

Sources: online softmax, Milakov and Gimelshein 2018; tiling, FlashAttention-2 (Dao 2023); paging, PagedAttention (Kwon
et al. 2023); scales folded into S and P, vLLM's Triton attention.
"""

import math

import triton
import triton.language as tl

from kernels.quantize import widen_pairs

LOG2_E = 1.0 / math.log(2.0)
LEAST_DIMS = 16
"""Columns that a product on a GPU sums over at least."""


def padded_dims(head_dim: int, kv_format: str) -> int:
    """Return the columns of a tile of queries, keys or values: a power of two, and as many as one product needs. 8-bit
    rows are multiplied in two halves, the even and the odd columns."""
    return max(triton.next_power_of_2(head_dim), LEAST_DIMS * (1 if kv_format == "native" else 2))


@triton.jit
def row_offsets(
    table,
    start,
    end,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SCALE_TOKEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where tokens `start .. start + TILE` lie: int64 element offsets of their payload rows and of their scales.

    A tile within one block needs one table entry; smaller blocks need one per token. Tokens from `end` on get the
    offsets of block 0, which the caller's mask must keep from being read.
    """
    lanes = tl.arange(0, TILE)
    if BLOCK_SIZE >= TILE:
        # `start` is a multiple of TILE, and so is BLOCK_SIZE.
        inside = tl.where(start < end, start // BLOCK_SIZE, 0)
        block = tl.load(table + inside).to(tl.int64)
        offset = start % BLOCK_SIZE + lanes
        rows = block * STRIDE_BLOCK + offset * STRIDE_TOKEN
        scales = block * SCALE_BLOCK + offset * SCALE_TOKEN
    else:
        tokens = start + lanes
        block = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0).to(tl.int64)
        offset = tokens % BLOCK_SIZE
        rows = block * STRIDE_BLOCK + offset * STRIDE_TOKEN
        scales = block * SCALE_BLOCK + offset * SCALE_TOKEN
    return rows, scales


@triton.jit
def load_tile(base, rows, valid, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """`[TILE, PAD]`: rows that are not `valid`, and columns from WIDTH on, are zero."""
    columns = tl.arange(0, PAD)
    mask = valid[:, None] if WIDTH == PAD else valid[:, None] & (columns < WIDTH)[None, :]
    return tl.load(base + rows[:, None] + columns[None, :], mask=mask, other=0)


@triton.jit
def halves(x):
    """The even and the odd columns of `[M, N]`."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def load_scales(base, offsets, valid, FORMAT: tl.constexpr):
    """float32 `[TILE]`, with the factor that `widen_pairs` leaves out.

    Read as the first column of `[TILE, n]`, of which the rest is masked out: a load of fewer elements than a program
    has threads is cheap in Triton's eyes, and Triton 3.6 has every thread copy all scales that it will multiply with.
    """
    columns = tl.arange(0, max(1, 256 // offsets.shape[0]))
    first = valid[:, None] & (columns == 0)[None, :]
    found = tl.load(base + offsets[:, None] + columns[None, :], mask=first, other=0.0)
    for _ in tl.static_range(4):
        if found.shape[1] > 1:
            found, _rest = halves(found)
    return tl.reshape(found, offsets.shape) * (128.0 if FORMAT == "int8" else 256.0)


@triton.jit
def fold(scores, scale, top, total):
    """One tile of scores `[M, TILE]` into the running maximum and sum `[M]`: its probabilities relative to the new
    maximum, by how much what was summed before shrinks, and the new `(top, total)`. -inf is not seen."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    # -inf minus -inf is NaN: a row without a visible token so far compares with 0 instead.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top * scale)
    probs = tl.exp2(scores * scale - shift[:, None])
    keep = tl.exp2(top * scale - shift)
    return probs, keep, new_top, total * keep + tl.sum(probs, 1)


@triton.jit
def sweep(
    q,
    payload,
    scales,
    table,
    begin,
    end,
    lowest,
    position,
    scale,
    acc,
    top,
    total,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_KV: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SCALE_KV: tl.constexpr,
    SCALE_TOKEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    FORMAT: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Online softmax of `q` `[M, DIM_PAD]` over tokens `begin ..< end` of one table and KV head: the new
    `(acc, top, total)`. `begin` is a multiple of TILE where blocks are not smaller than tiles.

    Tokens before `lowest` are never read. MASK says what a row sees of the others: "all"; "range", those before `end`;
    "causal", those up to its `position` `[M]`, and the last WINDOW of them if there is a window; "window", the last
    WINDOW up to `position` of those before `end`. A row that has seen nothing keeps top = -inf and total = 0.
    """
    lanes = tl.arange(0, TILE)
    PACKED: tl.constexpr = 1 if FORMAT == "native" else 2
    if FORMAT != "native":
        WIDE: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
        q_even, q_odd = halves(tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(WIDE))
        even, odd = halves(acc)
    # Table entries are fetched one tile ahead by hand: the pipeliner would spend stages on a load whose address waits
    # for a load. It must not stage the entries themselves, which a stage count on this very loop would make it do:
    # then nothing is ahead at all. So the stages come with the launch, and concern what feeds a product.
    next_rows, next_scales = row_offsets(
        table,
        begin,
        end,
        STRIDE_BLOCK // PACKED,
        STRIDE_TOKEN // PACKED,
        SCALE_BLOCK,
        SCALE_TOKEN,
        BLOCK_SIZE,
        TILE,
    )
    for start in range(begin, end, TILE):
        rows = next_rows
        scale_rows = next_scales
        next_rows, next_scales = row_offsets(
            table,
            start + TILE,
            end,
            STRIDE_BLOCK // PACKED,
            STRIDE_TOKEN // PACKED,
            SCALE_BLOCK,
            SCALE_TOKEN,
            BLOCK_SIZE,
            TILE,
        )
        tokens = start + lanes
        valid = (tokens < end) & (tokens >= lowest)
        if FORMAT == "native":
            k = load_tile(payload, rows, valid, HEAD_DIM, DIM_PAD)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            k_even, k_odd = widen_pairs(load_tile(payload, rows, valid, HEAD_DIM // 2, DIM_PAD // 2), FORMAT)
            scores = tl.dot(q_even, tl.trans(k_even.to(q_even.dtype)), input_precision="ieee")
            scores = tl.dot(q_odd, tl.trans(k_odd.to(q_odd.dtype)), scores, input_precision="ieee")
            scores = scores * load_scales(scales, scale_rows, valid, FORMAT)[None, :]
        if SOFTCAP > 0.0:
            scores = _tanh(scores * scale)
        if MASK == "range":
            scores = tl.where(valid[None, :], scores, float("-inf"))
        elif MASK == "causal":
            if WINDOW > 0:
                # Both edges in one comparison: a token that is still to come is at a huge unsigned distance.
                distance = position[:, None] - tokens[None, :]
                visible = distance.to(tl.uint32) < WINDOW
            else:
                visible = valid[None, :] & (tokens[None, :] <= position[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        elif MASK == "window":
            visible = valid[None, :] & (tokens[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        probs, keep, top, total = fold(scores, SOFTCAP * 1.4426950408889634 if SOFTCAP > 0.0 else scale, top, total)
        if FORMAT == "native":
            v = load_tile(payload + STRIDE_KV, rows, valid, HEAD_DIM, DIM_PAD)
            acc = acc * keep[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        else:
            probs = probs * load_scales(scales + SCALE_KV, scale_rows, valid, FORMAT)[None, :]
            probs = probs.to(q_even.dtype)
            v_even, v_odd = widen_pairs(
                load_tile(payload + STRIDE_KV // 2, rows, valid, HEAD_DIM // 2, DIM_PAD // 2), FORMAT
            )
            even = even * keep[:, None] + tl.dot(probs, v_even.to(probs.dtype), input_precision="ieee")
            odd = odd * keep[:, None] + tl.dot(probs, v_odd.to(probs.dtype), input_precision="ieee")
    if FORMAT != "native":
        acc = tl.reshape(tl.join(even, odd), [q.shape[0], DIM_PAD])
    return acc, top, total


@triton.jit
def _tanh(x):
    """By two powers of two and a division: at the ends of the range it is 1 and -1."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def finish(acc, top, total, scale, SOFTCAP: tl.constexpr):
    """Output `[M, DIM_PAD]` and natural log-sum-exp `[M]`; zero and -inf for a row that saw nothing."""
    safe = tl.where(total > 0.0, total, 1.0)
    exponent = SOFTCAP * 1.4426950408889634 if SOFTCAP > 0.0 else scale
    return acc / safe[:, None], (top * exponent + tl.log2(safe)) * 0.6931471805599453


@triton.jit
def with_sink(answer, lse, sink):
    """Join one more score `[M]` that has no value to an `answer` `[M, N]` and its natural `lse` `[M]`: once per row,
    when nothing else will join."""
    top = tl.maximum(lse, sink)
    joined = top + tl.log(tl.exp(lse - top) + tl.exp(sink - top))
    return answer * tl.exp(lse - joined)[:, None], joined


def exponent_scale(scale: float | None, head_dim: int, softcap: float = 0.0) -> float:
    """What makes a score an exponent of two; 1 / sqrt(head_dim) by default. With a cap: what makes a score the cap's
    argument. Raises ValueError unless it is positive, since the largest score must stay the largest, and for a cap that
    is not."""
    if scale is not None and scale <= 0.0:
        raise ValueError(f"scale {scale} is not positive")
    if softcap < 0.0:
        raise ValueError(f"a soft cap of {softcap} is not positive")
    natural = head_dim**-0.5 if scale is None else scale
    return float(natural / softcap if softcap else natural * LOG2_E)

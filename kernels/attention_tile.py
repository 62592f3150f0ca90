# mypy: allow-untyped-defs, allow-incomplete-defs
"""The inner step of every attention kernel: fetch a tile of keys and values by block table, fold it into a softmax.

Queries are packed: row m of a tile is query head `m % GROUP` of the KV head, of query `m // GROUP`, so that each key
and value byte is read once per KV head and not once per query head. Scores are kept in powers of two (the scale holds
log2 e). 8-bit keys and values are widened to the queries' 16-bit type before the product, exactly, and their scales
are folded into scores and probabilities, one multiplication per token instead of one per element.

Sources: online softmax, Milakov and Gimelshein 2018; tiling, FlashAttention-2 (Dao 2023); paging, PagedAttention (Kwon
et al. 2023); scales folded into S and P, vLLM's Triton attention.
"""

import math

import triton
import triton.language as tl

from kernels.quantize import widen_e4m3

LOG2_E = 1.0 / math.log(2.0)


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
def load_tile(
    base, rows, valid, like, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, FORMAT: tl.constexpr
):
    """`[TILE, DIM_PAD]` in the type of `like`: rows that are not `valid` and columns past the head are zero.

    E4M3 arrives 256 times too small.
    """
    dims = tl.arange(0, DIM_PAD)
    mask = valid[:, None] if HEAD_DIM == DIM_PAD else valid[:, None] & (dims < HEAD_DIM)[None, :]
    tile = tl.load(base + rows[:, None] + dims[None, :], mask=mask, other=0)
    if FORMAT == "e4m3":
        tile = widen_e4m3(tile)
    return tile.to(like.dtype)


@triton.jit
def load_scales(base, offsets, valid, FORMAT: tl.constexpr):
    """float32 `[TILE]`, for E4M3 with the 256 that `load_tile` leaves out."""
    scales = tl.load(base + offsets, mask=valid, other=0.0)
    if FORMAT == "e4m3":
        scales = scales * 256.0
    return scales


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
):
    """Online softmax of `q` `[M, DIM_PAD]` over tokens `begin ..< end` of one table and KV head: the new
    `(acc, top, total)`. `begin` is a multiple of TILE where blocks are not smaller than tiles.

    Tokens before `lowest` are never read. MASK says what a row sees of the others: "all"; "range", those before `end`;
    "causal", those up to its `position` `[M]`, and the last WINDOW of them if there is a window. A row that has seen
    nothing keeps top = -inf and total = 0.
    """
    lanes = tl.arange(0, TILE)
    # Table entries are fetched one tile ahead by hand: the pipeliner would spend stages on a load whose address waits
    # for a load. It must not stage the entries themselves, which a stage count on this very loop would make it do:
    # then nothing is ahead at all. So the stages come with the launch, and concern what feeds a product.
    next_rows, next_scales = row_offsets(
        table, begin, end, STRIDE_BLOCK, STRIDE_TOKEN, SCALE_BLOCK, SCALE_TOKEN, BLOCK_SIZE, TILE
    )
    for start in range(begin, end, TILE):
        rows = next_rows
        scale_rows = next_scales
        next_rows, next_scales = row_offsets(
            table,
            start + TILE,
            end,
            STRIDE_BLOCK,
            STRIDE_TOKEN,
            SCALE_BLOCK,
            SCALE_TOKEN,
            BLOCK_SIZE,
            TILE,
        )
        tokens = start + lanes
        valid = (tokens < end) & (tokens >= lowest)
        k = load_tile(payload, rows, valid, q, HEAD_DIM, DIM_PAD, FORMAT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if FORMAT != "native":
            scores = scores * load_scales(scales, scale_rows, valid, FORMAT)[None, :]
        if MASK == "range":
            scores = tl.where(valid[None, :], scores, float("-inf"))
        elif MASK == "causal":
            visible = valid[None, :] & (tokens[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (tokens[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # -inf minus -inf is NaN: a row without a visible token so far compares with 0 instead.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        probs = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(top - shift)
        total = total * keep + tl.sum(probs, 1)
        top = new_top
        if FORMAT != "native":
            probs = probs * load_scales(scales + SCALE_KV, scale_rows, valid, FORMAT)[None, :]
        v = load_tile(payload + STRIDE_KV, rows, valid, q, HEAD_DIM, DIM_PAD, FORMAT)
        acc = acc * keep[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
    return acc, top, total


@triton.jit
def finish(acc, top, total):
    """Output `[M, DIM_PAD]` and natural log-sum-exp `[M]`; zero and -inf for a row that saw nothing."""
    safe = tl.where(total > 0.0, total, 1.0)
    return acc / safe[:, None], (top + tl.log2(safe)) * 0.6931471805599453

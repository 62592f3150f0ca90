# mypy: allow-untyped-defs, allow-incomplete-defs
"""Copy whole KV blocks, and digest them on the way: copy-on-write, tiers, packing for migration and unpacking after it.

A block is `[kv_heads, words]` of 64-bit words. The digest of a (block, head) is `wp64`, word-parallel: a sum, so that
words may be taken in any order by any number of programs, of a mixed word each,

    wp64 = sum_i mix(word_i + (i + 1) * GOLDEN)  mod 2^64,    mix(x) = fold29(fold32(x) * MULTIPLIER),
    foldN(x) = x xor (x >> N)

over the words with a valid byte, their invalid bytes taken as zero. Every mix is a bijection: one changed word always
changes the sum, words in the wrong place do with probability 1 - 2^-64. It guards against accidents, not against an
adversary. A partly filled block has `tokens` valid rows in every layer, for keys and values; the scales of 8-bit rows,
two to a word behind the payload, are valid as their rows are.

The grid is small and fixed, so that a copy takes a few SMs from the model that runs beside it. Specification:
`kernels.reference_blocks`; on the CPU, `kernels.wp64`. The mixing steps are those of SplitMix64 (Steele, Lea, Flood
2014), cut to one multiplication.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.block_shape import BlockShape
from kernels.configs import KernelConfig

PROGRAMS = 64
"""Programs in the grid of a worker's copies."""


@triton.jit
def _wp64(word, index):
    """Mix words as `wp64` does: int64 in, int64 out; arithmetic wraps, and shifts are those of unsigned numbers."""
    x = (word + (index + 1) * 0x1E3779B97F4A7C15).to(tl.uint64, bitcast=True)
    x = x ^ (x >> 32)
    x = x * 0x2545F4914F6CDD1D
    return (x ^ (x >> 29)).to(tl.int64, bitcast=True)


# However many they are, and wherever their tensor lies: they are read one at a time.
_NUMBERS = ("source_blocks_ptr", "target_blocks_ptr", "tokens_ptr", "units", "parts")


@triton.jit(do_not_specialize=_NUMBERS)
def copy_blocks_kernel(
    source_ptr,
    target_ptr,
    source_blocks_ptr,
    target_blocks_ptr,
    tokens_ptr,
    digests_ptr,
    units,
    parts,
    SOURCE_BLOCK: tl.constexpr,
    SOURCE_HEAD: tl.constexpr,
    TARGET_BLOCK: tl.constexpr,
    TARGET_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    PAYLOAD_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COPY: tl.constexpr,
    DIGEST: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Units are (block, head, part of its words), taken in turn. Strides are in words."""
    part = (WORDS + parts * TILE - 1) // (parts * TILE) * TILE
    lanes = tl.arange(0, TILE)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        piece = unit // parts
        number = piece // HEADS
        head = piece % HEADS
        begin = unit % parts * part
        end = tl.minimum(begin + part, WORDS)
        source_block = tl.load(source_blocks_ptr + number).to(tl.int64)
        source = source_ptr + source_block * SOURCE_BLOCK + head * SOURCE_HEAD
        target_block = tl.load(target_blocks_ptr + number).to(tl.int64)
        target = target_ptr + target_block * TARGET_BLOCK + head * TARGET_HEAD
        tokens = tl.load(tokens_ptr + number)
        sums = tl.zeros([TILE], dtype=tl.int64)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            at = start + lanes
            inside = at < end
            word = tl.load(source + at, mask=inside, other=0)
            if COPY:
                tl.store(target + at, word, mask=inside)
            if DIGEST:
                low = at // ROW_WORDS % BLOCK_SIZE < tokens
                high = low
                if WORDS > PAYLOAD_WORDS:
                    scale = (at - PAYLOAD_WORDS) * 2
                    low = tl.where(at < PAYLOAD_WORDS, low, scale % BLOCK_SIZE < tokens)
                    high = tl.where(at < PAYLOAD_WORDS, high, (scale + 1) % BLOCK_SIZE < tokens)
                    word = tl.where(low, word, word & -4294967296)
                    word = tl.where(high, word, word & 4294967295)
                sums += tl.where(inside & (low | high), _wp64(word, at.to(tl.int64)), 0)
        if DIGEST:
            tl.atomic_add(digests_ptr + piece, tl.sum(sums, 0))


def copy_blocks(
    source: Tensor,
    target: Tensor | None,
    source_blocks: Tensor,
    target_blocks: Tensor,
    shape: BlockShape,
    config: KernelConfig,
    *,
    tokens: Tensor | None = None,
    programs: int = PROGRAMS,
) -> Tensor | None:
    """Copy `source[source_blocks[i]]` to `target[target_blocks[i]]` (nowhere if `target` is None).

    `source`, `target`: int64 `[blocks, heads, shape.words]`, the last dimension contiguous: a pool's memory seen as
    words (`as_words`), a staging buffer, or a range of either's heads. `source_blocks`, `target_blocks`, `tokens`:
    int32 `[n]` on the same device; target blocks are distinct and none of them is a source. With `tokens`, the valid
    tokens of each source block, returns the digests int64 `[n, heads]`, else None. Raises ValueError where shapes do
    not fit.
    """
    onto = source if target is None else target
    count, heads = source_blocks.numel(), source.shape[1]
    if source.shape[1:] != (heads, shape.words) or onto.shape[1:] != source.shape[1:]:
        raise ValueError(
            f"{tuple(source.shape)} to {tuple(onto.shape)}: not blocks of {shape.words} words"
        )
    if source.stride(-1) != 1 or onto.stride(-1) != 1 or target_blocks.numel() != count:
        raise ValueError("words must be contiguous, and each source block needs one target")
    if tokens is not None and tokens.numel() != count:
        raise ValueError(f"{tokens.numel()} token counts for {count} blocks")
    digests = torch.zeros(count, heads, dtype=torch.int64, device=source.device)
    # Few blocks are cut up, so that they keep the whole grid busy.
    parts = triton.next_power_of_2(max(1, min(programs // max(1, count * heads), 16)))
    units = count * heads * parts
    if count and (target is not None or tokens is not None):
        copy_blocks_kernel[(min(programs, units),)](
            source,
            onto,
            source_blocks,
            target_blocks,
            source_blocks if tokens is None else tokens,
            digests,
            units,
            parts,
            SOURCE_BLOCK=source.stride(0),
            SOURCE_HEAD=source.stride(1),
            TARGET_BLOCK=onto.stride(0),
            TARGET_HEAD=onto.stride(1),
            HEADS=heads,
            WORDS=shape.words,
            PAYLOAD_WORDS=shape.payload_words,
            ROW_WORDS=shape.row_bytes // 8,
            BLOCK_SIZE=shape.block_size,
            COPY=target is not None,
            DIGEST=tokens is not None,
            TILE=config.tile,
            STAGES=config.stages,
            num_warps=config.warps,
            num_stages=config.stages,
        )
    return digests if tokens is not None else None


def as_words(memory: Tensor) -> Tensor:
    """Return contiguous `[blocks, heads, ...]` of any type as int64 `[blocks, heads, words]`, the same memory."""
    blocks, heads = memory.shape[:2]
    return memory.view(blocks, heads, -1).view(torch.int64)

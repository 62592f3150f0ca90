# mypy: allow-untyped-defs, allow-incomplete-defs
"""Paged prefill attention for sm_90, with what only Hopper has: `kernels.prefill_attention`'s work, by its plan.

A program has three parts that run beside each other. One warp copies: every block of keys, and every block of values,
is one box of a bulk tensor copy, which lands in shared memory as the matrix unit wants it and says so to a barrier. Two
warpgroups compute, half of the tile's packed rows each: while the matrix unit multiplies for one of them, the other
takes exponents, by turns; and within one, the scores of the next tile are multiplied beside the values of this one.

Of the last tile of values, what lies behind the context is set to zero by the copying warp before anybody multiplies
it: those bytes are whatever the block held before, and zero times NaN is NaN. Keys there are masked after they were
multiplied.

Not for 8-bit pools, windows, and head sizes other than `HEAD_SIZES`: `unfit` says so, and `prefill_attention` does
those. It runs nowhere but on such a GPU, so nothing chooses it unless it is asked for (`engine.prefill_kernel`): first
`benchmarks.gpu.correct` has to pass on one. Its own source runs in tests, over a small model of barriers and copies.

Specification: `kernels.reference_attention.prefill`. Sources: FlashAttention-3 (Shah et al. 2024): producer and
consumers, turns, overlap within a warpgroup.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention_tile import exponent_scale
from kernels.pool import KVPool
from kernels.prefill_attention import TILE_FIELDS

HEAD_SIZES = (64, 128)
ROWS, TILE, STAGES = 128, 128, 2
"""Packed rows of a program, keys of an inner step, and steps of keys (and of values) in shared memory."""
WARPS = 4
"""Warps that it is launched with; the other consumer's and the copying one come on top."""
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 40
_ZEROED_ROWS = gl.constexpr(8)


@gluon.jit
def _copy_tile(desc, first_row, table, start, end, ready, tile, ROWS_BLOCK: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Bring the rows of tokens `start ..< start + TILE` into `tile` `[TILE, HEAD_DIM]`, one box a block. Blocks that
    begin at `end` or later are not in the table: block 0 is copied in their place."""
    TILE_ROWS: gl.constexpr = tile.shape[0]
    BOX: gl.constexpr = desc.block_shape[0]
    mbarrier.expect(ready, TILE_ROWS * tile.shape[1] * 2)
    for part in gl.static_range(TILE_ROWS // BOX):
        token = start + part * BOX
        block = gl.load(table + gl.where(token < end, token // BLOCK_SIZE, 0))
        row = block * ROWS_BLOCK + first_row + token % BLOCK_SIZE
        tma.async_copy_global_to_shared(desc, [row, 0], ready, tile.slice(part * BOX, BOX))


@gluon.jit
def _zero_behind(tile, rows):
    """Set the rows of `tile` from `rows` on to zero."""
    COLUMNS: gl.constexpr = tile.shape[1]
    PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [1, 1], [1, 0])
    lanes = gl.arange(0, _ZEROED_ROWS, gl.SliceLayout(1, PIECE))
    for part in gl.static_range(tile.shape[0] // _ZEROED_ROWS):
        piece = tile.slice(part * _ZEROED_ROWS, _ZEROED_ROWS)
        kept = (part * _ZEROED_ROWS + lanes < rows)[:, None]
        piece.store(gl.where(kept, piece.load(PIECE), 0.0))
    fence_async_shared()


@gluon.jit
def _produce(
    desc,
    table,
    key_row,
    value_row,
    end,
    k_tiles,
    v_tiles,
    k_ready,
    k_free,
    v_ready,
    v_free,
    last_ready,
    ROWS_BLOCK: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """The copying warp: keys and values of every tile before `end`, each into the stage that both consumers gave back.
    """
    BUFFERS: gl.constexpr = k_tiles.shape[0]
    STEP: gl.constexpr = k_tiles.shape[1]
    for start in range(0, end, STEP):
        at = start // STEP
        stage = at % BUFFERS
        # A barrier's first phase is over once everybody has arrived once: for the first use of a stage nobody has.
        unused = (at // BUFFERS & 1) ^ 1
        mbarrier.wait(k_free.index(stage), unused)
        _copy_tile(
            desc, key_row, table, start, end, k_ready.index(stage), k_tiles.index(stage), ROWS_BLOCK, BLOCK_SIZE
        )
        mbarrier.wait(v_free.index(stage), unused)
        tile = v_tiles.index(stage)
        if start + STEP <= end:
            _copy_tile(desc, value_row, table, start, end, v_ready.index(stage), tile, ROWS_BLOCK, BLOCK_SIZE)
        else:
            _copy_tile(desc, value_row, table, start, end, last_ready, tile, ROWS_BLOCK, BLOCK_SIZE)
            mbarrier.wait(last_ready, 0)
            _zero_behind(tile, end - start)
            mbarrier.arrive(v_ready.index(stage), count=1)


@gluon.jit
def _probabilities(
    scores, scale, top, total, seen, LAYOUT: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr
):
    """As `attention_tile.fold`, with the cap, and the mask where there is one: keys `seen` `[M]` and later are hidden
    from a row."""
    if SOFTCAP > 0.0:
        scores = 1.0 - 2.0 / (gl.exp2(scores * scale * 2.8853900817779268) + 1.0)
        scale = SOFTCAP * 1.4426950408889634
    if MASKED:
        keys = gl.arange(0, scores.shape[1], gl.SliceLayout(0, LAYOUT))
        scores = gl.where(keys[None, :] < seen[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    shift = gl.where(new_top == float("-inf"), 0.0, new_top * scale)
    probs = gl.exp2(scores * scale - shift[:, None])
    keep = gl.exp2(top * scale - shift)
    return probs, keep, new_top, total * keep + gl.sum(probs, 1)


@gluon.jit
def _step(
    at, q, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns, probs, acc, top, total, scale, seen,
    GROUP_INDEX: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of tile `at`, beside the values of the tile before by the probabilities of then."""
    BUFFERS: gl.constexpr = k_tiles.shape[0]
    STEP: gl.constexpr = k_tiles.shape[1]
    HALF: gl.constexpr = q.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, q.shape[1], 16])
    stage = at % BUFFERS
    before = (at - 1) % BUFFERS
    mbarrier.wait(k_ready.index(stage), at // BUFFERS & 1)
    mbarrier.wait(v_ready.index(before), (at - 1) // BUFFERS & 1)
    mbarrier.wait(turns.index(GROUP_INDEX), at & 1 if GROUP_INDEX == 1 else (at & 1) ^ 1)
    zeros = gl.zeros([HALF, STEP], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma(probs, v_tiles.index(before), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - GROUP_INDEX), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_free.index(stage), count=1)
    # A row's first key of this tile is number `at * TILE`.
    fresh, keep, top, total = _probabilities(
        scores, scale, top, total, seen - at * STEP, S_LAYOUT, SOFTCAP, MASKED
    )
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return gl.convert_layout(fresh.to(q.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2)), acc, top, total


@gluon.jit
def _rows_at(tile, packed, kv_head, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Which rows of `[rows * HEADS]` the `packed` rows of a tile are, and which are there. Read anew where needed, and
    not kept in registers through all of a program."""
    row = gl.load(tile + 1) + packed // GROUP
    return row.to(gl.int64) * HEADS + kv_head * GROUP + packed % GROUP, packed < gl.load(tile + 2) * GROUP


@gluon.jit
def _consume(
    q_ptr, out_ptr, lse_ptr, sinks_ptr, tile, kv_head, first_position, end, scale,
    q_tile, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns,
    GROUP_INDEX: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: its half of the tile's packed rows, over all keys before `end`."""
    HALF: gl.constexpr = q_tile.shape[0]
    DIM: gl.constexpr = q_tile.shape[1]
    STEP: gl.constexpr = k_tiles.shape[1]
    BUFFERS: gl.constexpr = k_tiles.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])

    packed = GROUP_INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(1, MEMORY))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, MEMORY))
    rows, present = _rows_at(tile, packed, kv_head, HEADS, GROUP)
    q_tile.store(gl.load(q_ptr + rows[:, None] * DIM + dims[None, :], mask=present[:, None], other=0.0))
    fence_async_shared()

    row = GROUP_INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S_LAYOUT))
    # Rows that are not there see what the last one sees. Divided last, or the compiler keeps the quotients, which no
    # program changes, in memory instead of registers.
    seen = gl.minimum((first_position * GROUP + row) // GROUP + 1, end)
    top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([HALF, DIM], gl.float32, O_LAYOUT)

    # The first tile has no values before it.
    mbarrier.wait(k_ready.index(0), 0)
    mbarrier.wait(turns.index(GROUP_INDEX), 0 if GROUP_INDEX == 1 else 1)
    zeros = gl.zeros([HALF, STEP], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - GROUP_INDEX), count=1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(0), count=1)
    fresh, _keep, top, total = _probabilities(scores, scale, top, total, seen, S_LAYOUT, SOFTCAP, True)
    probs = gl.convert_layout(fresh.to(q_tile.dtype), P_LAYOUT)

    tiles = (end + STEP - 1) // STEP
    unmasked = gl.maximum((first_position + 1) // STEP, 1)
    for number in range(1, unmasked):
        probs, acc, top, total = _step(
            number, q_tile, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns, probs, acc, top, total, scale,
            seen, GROUP_INDEX, SOFTCAP, False,
        )  # fmt: skip
    for number in range(unmasked, tiles):
        probs, acc, top, total = _step(
            number, q_tile, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns, probs, acc, top, total, scale,
            seen, GROUP_INDEX, SOFTCAP, True,
        )  # fmt: skip

    last = (tiles - 1) % BUFFERS
    mbarrier.wait(v_ready.index(last), (tiles - 1) // BUFFERS & 1)
    acc = warpgroup_mma(probs, v_tiles.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    exponent = SOFTCAP * 1.4426950408889634 if SOFTCAP > 0.0 else scale
    lse = (top * exponent + gl.log2(total)) * 0.6931471805599453
    part = 1.0 / total
    if SINKS:
        sink = gl.load(sinks_ptr + kv_head * GROUP + row % GROUP).to(gl.float32)
        highest = gl.maximum(lse, sink)
        joined = highest + gl.log(gl.exp(lse - highest) + gl.exp(sink - highest))
        part = part * gl.exp(lse - joined)
        lse = joined
    if WITH_LSE:
        rows, present = _rows_at(tile, row, kv_head, HEADS, GROUP)
        gl.store(lse_ptr + rows, lse, mask=present)
    answer = acc * gl.convert_layout(part, gl.SliceLayout(1, O_LAYOUT))[:, None]
    answer = gl.convert_layout(answer.to(out_ptr.dtype.element_ty), MEMORY)
    rows, present = _rows_at(tile, packed, kv_head, HEADS, GROUP)
    gl.store(out_ptr + rows[:, None] * DIM + dims[None, :], answer, mask=present[:, None])


@gluon.jit(do_not_specialize=["table_blocks", "layer_row"])
def prefill_hopper_kernel(
    q_ptr,
    pool,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    tables_ptr,
    sinks_ptr,
    table_blocks,
    layer_row,
    scale,
    ROWS_BLOCK: gl.constexpr,
    ROWS_HEAD: gl.constexpr,
    ROWS_KV: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    WITH_LSE: gl.constexpr,
    TILE: gl.constexpr,
    M: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    tile = tiles_ptr + gl.program_id(0) * 4
    kv_head = gl.program_id(1)
    sequence = gl.load(tile)
    first_position = gl.load(tile + 3)
    end = first_position + gl.load(tile + 2)
    table = tables_ptr + sequence.to(gl.int64) * table_blocks
    key_row = layer_row + kv_head * ROWS_HEAD

    LAYOUT: gl.constexpr = pool.layout
    q_tiles = gl.allocate_shared_memory(pool.dtype, [2, M // 2, HEAD_DIM], LAYOUT)
    k_tiles = gl.allocate_shared_memory(pool.dtype, [STAGES, TILE, HEAD_DIM], LAYOUT)
    v_tiles = gl.allocate_shared_memory(pool.dtype, [STAGES, TILE, HEAD_DIM], LAYOUT)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    last_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        # Both consumers give a stage back.
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    mbarrier.init(last_ready, count=1)
    fence_async_shared()

    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_ptr, out_ptr, lse_ptr, sinks_ptr, tile, kv_head, first_position, end, scale,
                    q_tiles.index(0), k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns,
                    0, HEADS, GROUP, SOFTCAP, SINKS, WITH_LSE,
                ),
            ),
            (
                _consume,
                (
                    q_ptr, out_ptr, lse_ptr, sinks_ptr, tile, kv_head, first_position, end, scale,
                    q_tiles.index(1), k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns,
                    1, HEADS, GROUP, SOFTCAP, SINKS, WITH_LSE,
                ),
            ),
            (
                _produce,
                (
                    pool, table, key_row, key_row + ROWS_KV, end, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
                    last_ready, ROWS_BLOCK, BLOCK_SIZE,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


prefill_hopper_kernel.launch_warps = WARPS


def runs_on(device: torch.device) -> bool:
    """Say whether this is a GPU of compute capability 9.0: later ones lack its matrix instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def unfit(
    kv_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, block_size: int, group: int, *, window: int = 0
) -> str:
    """Say why this kernel cannot attend with queries of `dtype`, `group` for each KV head, over such a pool; "" if it
    can."""
    if kv_dtype not in (torch.float16, torch.bfloat16) or dtype != kv_dtype:
        return f"queries in {dtype} over KV in {kv_dtype}: it takes one 16-bit type"
    if head_dim not in HEAD_SIZES:
        return f"heads of {head_dim}: it takes {' and '.join(map(str, HEAD_SIZES))}"
    if window:
        return f"a window of {window} tokens"
    if not 8 <= block_size <= 256:
        return f"blocks of {block_size} tokens: it takes 8 to 256"
    if group > ROWS:
        return f"{group} queries for a KV head: it takes {ROWS}"
    return ""


def prefill_hopper(
    q: Tensor,
    pool: KVPool,
    layer: int,
    tiles: Tensor,
    tables: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend as `kernels.prefill_attention.prefill_attention` does, with the same arguments; `tiles` from
    `plan_prefill` with `ROWS // group` rows. Raises ValueError where it cannot (`unfit`), or shapes do not fit."""
    rows, heads, head_dim = q.shape
    if head_dim != pool.head_dim or heads % pool.kv_heads or not q.is_contiguous():
        raise ValueError(f"queries {tuple(q.shape)} do not fit {pool.kv_heads} KV heads of {pool.head_dim}")
    if reason := unfit(pool.payload.dtype, q.dtype, head_dim, pool.block_size, heads // pool.kv_heads):
        raise ValueError(f"the kernel for sm_90 cannot do {reason}")
    if tiles.dtype != torch.int32 or tables.dtype != torch.int32 or tiles.shape[1:] != (TILE_FIELDS,):
        raise ValueError("tiles must be int32 [n, 4] and tables int32 [sequences, blocks]")
    if lse is not None and (lse.shape != (rows, heads) or lse.dtype != torch.float32):
        raise ValueError(f"lse must be float32 [{rows}, {heads}]")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"{len(sinks)} sinks for {heads} heads")
    out = torch.empty_like(q) if out is None else out
    block, head, per_layer, kv, _, _ = (stride // head_dim for stride in pool.payload.stride())
    prefill_hopper_kernel[(tiles.shape[0], pool.kv_heads)](
        q,
        _boxes(pool),
        out,
        out if lse is None else lse,
        tiles,
        tables,
        out if sinks is None else sinks,
        tables.shape[1],
        layer * per_layer,
        exponent_scale(scale, head_dim, softcap),
        ROWS_BLOCK=block,
        ROWS_HEAD=head,
        ROWS_KV=kv,
        BLOCK_SIZE=pool.block_size,
        HEAD_DIM=head_dim,
        HEADS=heads,
        GROUP=heads // pool.kv_heads,
        SOFTCAP=float(softcap),
        SINKS=sinks is not None,
        WITH_LSE=lse is not None,
        TILE=TILE,
        M=ROWS,
        STAGES=STAGES,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=WARPS,
    )
    return out


def _boxes(pool: KVPool) -> TensorDescriptor:
    """The pool's memory as one table of rows, which is copied in boxes of a block, or of a tile if that is less.
    Raises ValueError where the pool is not rows beside rows, or has more of them than 31 bits count."""
    payload = pool.payload
    if payload.stride(4) != pool.head_dim or any(stride % pool.head_dim for stride in payload.stride()[:4]):
        raise ValueError(f"strides {payload.stride()} are not whole rows of {pool.head_dim}")
    last = sum((n - 1) * stride for n, stride in zip(payload.shape[:5], payload.stride()[:5], strict=True))
    rows = last // pool.head_dim + 1
    if rows >= 1 << 31:
        raise ValueError(f"a pool of {rows} rows, more than 31 bits count")
    table = payload.as_strided((rows, pool.head_dim), (pool.head_dim, 1))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    box = [min(pool.block_size, TILE), pool.head_dim]
    return TensorDescriptor(table, list(table.shape), list(table.stride()), box, layout)

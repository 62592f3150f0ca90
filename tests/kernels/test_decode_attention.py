"""The decode kernel against dense attention in 64 bits, in the interpreter where there is no GPU."""

from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from kernels import reference_attention as reference
from kernels.configs import KernelConfig
from kernels.decode_attention import decode_attention
from kernels.decode_buffers import DecodeBuffers
from kernels.decode_plan import DecodeGeometry, SharedPrefix, plan_decode
from tests.kernels.cases import DEVICE, fill, poisoned_pool, tables_for

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


def _run(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    kv: torch.dtype = torch.float16,
    dtype: torch.dtype = torch.float16,
    tile: int = 16,
    programs: int = 3,
    window: int = 0,
    rows_per_item: int = 1,
    shared: list[SharedPrefix] | None = None,
    moved: bool = False,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Output and lse of the kernel, then of the reference, then how many slots the plan used."""
    generator = torch.Generator().manual_seed(5)
    tables, blocks = tables_for(lengths, block_size, generator)
    for prefix in shared or []:
        for row in prefix.rows:
            count = prefix.tokens // block_size
            tables[row][:count] = tables[prefix.rows[0]][:count]
    pool = poisoned_pool(blocks, kv_heads, block_size, head_dim, kv)
    fill(pool, tables, lengths, generator, [max(0, n - window) if window else 0 for n in lengths])
    if window:
        unused = next(block for block in range(blocks) if all(block not in table for table in tables))
        for row, length in enumerate(lengths):
            before = max(0, length - window) // block_size
            tables[row][:before] = [unused] * before
    if moved:
        move = torch.randperm(blocks, generator=generator)
        pool.payload[move] = pool.payload.clone()
        tables = [[int(move[block]) for block in table] for table in tables]
    geometry = DecodeGeometry(
        kv_heads=kv_heads,
        programs=programs,
        tile=tile,
        rows_per_item=rows_per_item,
        max_items=64,
        max_slots=64,
        min_chunk_tiles=1,
        window=window,
    )
    buffers = DecodeBuffers(
        geometry, batch=len(lengths), heads=heads, head_dim=head_dim, table_blocks=max(map(len, tables)) + 1,
        device=DEVICE,
    )  # fmt: skip
    plan = plan_decode(lengths, geometry, shared or [])
    buffers.load(plan, lengths, tables)
    generator.manual_seed(6)
    q = torch.randn(len(lengths), heads, head_dim, generator=generator).to(DEVICE, dtype)
    guarded = torch.full((len(lengths) + 2, heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
    logits = sinks * torch.linspace(-1, 2, heads, device=DEVICE) if sinks else None
    out, lse = decode_attention(
        q, pool, 1, buffers, KernelConfig(tile=tile, warps=4, stages=3), out=guarded[1:-1], scale=scale,
        softcap=softcap, sinks=logits,
    )  # fmt: skip
    assert (guarded[0] == 7.0).all() and (guarded[-1] == 7.0).all(), "a guard row was written"
    want, want_lse = reference.decode(q, pool, 1, lengths, tables, reference.Scoring(window, scale, softcap, logits))
    return out.double(), lse.double(), want, want_lse, plan.slots


def _check(
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], tolerance: float
) -> int:
    out, lse, want, want_lse, slots = result
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-4)
    return slots


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (8, 1), (17, 1)])
def test_head_groups(heads: int, kv_heads: int) -> None:
    """Guards the packing: a wrong group division gives a query head another head's keys."""
    _check(_run([1, 21], heads=heads, kv_heads=kv_heads), 2e-3)


@pytest.mark.parametrize("block_size", [1, 16, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    """Guards the table look-up on both sides of the tile's size, and the look-up of one tile ahead past the end."""
    _check(_run([1, 33, 130], block_size=block_size, tile=32), 2e-3)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int) -> None:
    """Guards the padded columns of sizes that are no power of two."""
    _check(_run([19], head_dim=head_dim, heads=4, kv_heads=1), 2e-3)


@pytest.mark.parametrize("kv", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("block_size", [1, 32])
def test_eight_bit_keys_and_values(kv: torch.dtype, block_size: int) -> None:
    """Guards the scales: one per token and head, keys' and values' apart, found behind the payload."""
    _check(_run([18, 5], kv=kv, block_size=block_size, head_dim=64), 4e-3)


@pytest.mark.parametrize("window", [1, 15, 40])
def test_sliding_window(window: int) -> None:
    """Guards the window's edge: rows before it are NaN here, as a freed block's may be."""
    _check(_run([5, 41, 70], window=window), 2e-3)


@pytest.mark.parametrize(
    ("kv", "options"),
    [
        (torch.float32, {"softcap": 1.5}),
        (torch.float32, {"sinks": 2.0, "window": 40}),
        (torch.float32, {"softcap": 0.6, "sinks": 30.0, "scale": 0.5, "window": 25}),
        (torch.int8, {"softcap": 1.5, "sinks": -2.0, "scale": 0.1}),
    ],
)
def test_scales_caps_and_sinks(kv: torch.dtype, options: dict[str, Any]) -> None:
    """Guards the cap, which acts on natural scores, and the sink, which joins once: in rows that are cut into chunks,
    in rows that are not, never in padding."""
    for programs in (2, 12):
        result = _run([150, 3, 0, 37], programs=programs, dtype=torch.float32, kv=kv, **options)
        slots = _check(result, 4e-3 if kv == torch.int8 else 2e-5)
    assert slots >= 4


def test_shared_prefixes_under_a_window() -> None:
    """Guards rows of one item that see different parts of it, or none of a chunk, beside rows of no item: what a row
    does not see is NaN unless another does, and its own table does not name it."""
    shared = [SharedPrefix((0, 1, 2, 3, 5), 96), SharedPrefix((1, 2), 128)]
    lengths = [97, 130, 161, 150, 40, 96]
    for programs, rows_per_item in ((3, 4), (12, 2)):
        result = _run(
            lengths,
            shared=shared,
            window=70,
            programs=programs,
            rows_per_item=rows_per_item,
            kv=torch.float32,
            dtype=torch.float32,
            sinks=1.0,
        )
        assert _check(result, 2e-5) >= 6


def test_split_rows_are_merged_and_whole_ones_are_not() -> None:
    """Guards the merge: a long context on many programs beside rows of one chunk and a padding row."""
    slots = _check(_run([150, 3, 0, 37], programs=12, dtype=torch.float32, kv=torch.float32), 2e-5)
    assert slots >= 4, "nothing was split, so nothing was tested"


def test_how_it_is_split_does_not_matter() -> None:
    """Guards against a chunk counted twice or left out: one program or nine, the same answer."""
    runs = [
        _run([97, 64], programs=p, dtype=torch.float32, kv=torch.float32, kv_heads=1)
        for p in (1, 9)
    ]
    assert runs[0][4] < runs[1][4]
    torch.testing.assert_close(runs[0][0], runs[1][0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("rows_per_item", "kv"), [(4, torch.float32), (16, torch.int8)])
def test_shared_prefixes_are_attended_to_once_for_all_rows(
    rows_per_item: int, kv: torch.dtype
) -> None:
    """Guards cascade decode: two nested prefixes, more rows than one item holds or a wide tile for all, rows of their
    own tails, one row that ends with the prefix, one that shares nothing."""
    shared = [SharedPrefix((0, 1, 2, 4, 5), 48), SharedPrefix((1, 4), 80)]
    lengths = [50, 97, 48, 30, 81, 64]
    result = _run(
        lengths,
        shared=shared,
        rows_per_item=rows_per_item,
        programs=4,
        kv=kv,
        dtype=torch.float32,
    )
    assert _check(result, 2e-5) >= 8


def test_physical_blocks_may_lie_anywhere_bit_for_bit() -> None:
    """Guards the gather: the same tokens in other blocks must give the same bits."""
    assert torch.equal(_run([40, 9])[0], _run([40, 9], moved=True)[0])


def test_buffers_serve_one_step_after_another_in_the_same_memory() -> None:
    """Guards CUDA graphs: a second, smaller plan is read from the same addresses, and nothing of the first is left."""
    generator = torch.Generator().manual_seed(2)
    lengths = [70, 20, 33]
    tables, blocks = tables_for(lengths, 16, generator)
    pool = poisoned_pool(blocks, 1, 16, 16, torch.float32)
    fill(pool, tables, lengths, generator)
    geometry = DecodeGeometry(
        kv_heads=1,
        programs=4,
        tile=16,
        rows_per_item=1,
        max_items=16,
        max_slots=16,
        min_chunk_tiles=1,
    )
    buffers = DecodeBuffers(geometry, batch=3, heads=2, head_dim=16, table_blocks=5, device=DEVICE)
    tensors = (buffers.items, buffers.ranges, buffers.rows, buffers.slots, buffers.tables)
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert not any(address % 16 for address in addresses)
    q = torch.randn(3, 2, 16, generator=generator).to(DEVICE)
    config = KernelConfig(tile=16, warps=4, stages=3)
    for count in (3, 2, 3):
        step = [*lengths[:count], *[0] * (3 - count)]
        buffers.load(plan_decode(step, geometry), step, tables)
        out, lse = decode_attention(q, pool, 0, buffers, config)
        want, want_lse = reference.decode(q, pool, 0, step, tables)
        torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)
    assert addresses == [tensor.data_ptr() for tensor in tensors]


@pytest.mark.skipif(DEVICE == "cuda", reason="addresses are seen in the interpreter")
def test_buffers_without_a_plan_are_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the recording of decode steps at start, before any plan: in front of the buffers may be no memory."""
    geometry = DecodeGeometry(
        kv_heads=2, programs=3, tile=16, rows_per_item=1, max_items=8, max_slots=8
    )
    buffers = DecodeBuffers(geometry, batch=2, heads=4, head_dim=16, table_blocks=2, device=DEVICE)
    own = buffers.items.untyped_storage()
    read: list[int] = []
    plain = InterpreterBuilder.create_masked_load

    def load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        read.extend(ptrs.data[mask.data].astype(int).tolist())
        return plain(self, ptrs, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
    pool = poisoned_pool(1, 2, 16, 16, torch.float16)
    config = KernelConfig(tile=16, warps=4, stages=1, rows=16)
    out, lse = decode_attention(torch.zeros(2, 4, 16, dtype=torch.float16), pool, 0, buffers, config)
    assert not out.any() and lse.eq(float("-inf")).all()
    assert read and all(own.data_ptr() <= at < own.data_ptr() + own.nbytes() for at in read)


def test_misfits_are_refused() -> None:
    """Guards the border: a kernel given wrong shapes reads other people's memory without complaint."""
    geometry = DecodeGeometry(
        kv_heads=2, programs=2, tile=16, rows_per_item=1, max_items=8, max_slots=8
    )
    buffers = DecodeBuffers(geometry, batch=1, heads=4, head_dim=16, table_blocks=2, device=DEVICE)
    pool = poisoned_pool(2, 2, 16, 16, torch.float16)
    config = KernelConfig(tile=16, warps=4, stages=3)
    q = torch.zeros(1, 4, 16, dtype=torch.float16, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit"):
        decode_attention(q[..., :8].contiguous(), pool, 0, buffers, config)
    with pytest.raises(ValueError, match="rows"):
        decode_attention(q.expand(2, 4, 16).contiguous(), pool, 0, buffers, config)
    with pytest.raises(ValueError, match="tiles"):
        decode_attention(q, pool, 0, buffers, KernelConfig(tile=32, warps=4, stages=3))
    with pytest.raises(IndexError):
        decode_attention(q, pool, 2, buffers, config)
    with pytest.raises(ValueError, match="longer"):
        buffers.load(plan_decode([40], geometry), [40], [[0, 1, 0]])

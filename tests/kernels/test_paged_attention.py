"""The CPU kernels against their references: odd sizes, shuffled blocks, poison wherever nobody may read."""

import weakref
from typing import Any

import pytest
import torch

from kernels import paged_attention as kernel
from kernels import reference
from kernels.kv_write import plan_kv_write, write_kv
from kernels.paged_attention import paged_attention, plan_attention, stable_width
from kernels.reference_rows import quantize

HEADS = [(4, 4), (3, 1), (9, 3), (8, 2), (16, 2), (6, 1)]


SCORINGS: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 7, "scale": 0.2},
    {"softcap": 1.5},
    {"sinks": True},
    {"window": 20, "scale": 0.5, "softcap": 0.7, "sinks": True},
]
"""Scores are of the order of 1 here: caps and sinks of that size change every answer."""


def _scoring(heads: int, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "sinks": torch.linspace(-2.0, 3.0, heads)} if "sinks" in options else options


def _case(heads: int, kv_heads: int, block_size: int, spans: list[tuple[int, int]], layers: int = 2, window: int = 0):
    """A pool whose unused rows are NaN, those before a window included, with `spans` of (new rows, context) on shuffled
    blocks."""
    torch.manual_seed(heads * 100 + kv_heads * 10 + block_size)
    need = [-(-context // block_size) for _, context in spans]
    blocks = sum(need) + 3
    order = torch.randperm(blocks)
    pool = torch.full((blocks, kv_heads, layers, 2, block_size, 8), float("nan"))
    tables, at = [], 0
    for (count, context), n in zip(spans, need, strict=True):
        table = order[at : at + n]
        at += n
        for t in range(max(0, context - count + 1 - window) if window else 0, context):
            pool[table[t // block_size], :, :, :, t % block_size] = torch.randn(kv_heads, layers, 2, 8)
        tables.append(table)
    rows = sum(count for count, _ in spans)
    return torch.randn(rows + 2, heads, 8), pool, tables


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("stable", [True, False])
def test_equals_the_reference(heads: int, kv_heads: int, block_size: int, stable: bool) -> None:
    """Guards head grouping, block order, the causal diagonal and the cut at the last valid row."""
    spans = [(1, 1), (1, 17), (5, 5), (3, 22), (7, 39)]
    q, pool, tables = _case(heads, kv_heads, block_size, spans)
    counts, contexts = [c for c, _ in spans], [n for _, n in spans]
    plan = plan_attention(counts, contexts, tables, pool, heads, stable)
    for layer in range(2):
        out = paged_attention(q, pool, layer, plan, torch.zeros_like(q))
        want = reference.paged_attention(q, pool, layer, counts, contexts, tables)
        rows = sum(counts)
        torch.testing.assert_close(out[:rows].double(), want[:rows], atol=2e-6, rtol=1e-5)
        assert not out[rows:].any(), "padding rows were written"


@pytest.mark.parametrize("options", SCORINGS)
@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(9, 3, 4), (3, 1, 5), (4, 4, 16)])
@pytest.mark.parametrize("stable", [True, False])
def test_windows_scales_caps_and_sinks(
    heads: int, kv_heads: int, block_size: int, stable: bool, options: dict[str, Any]
) -> None:
    """Guards the window's edge, the order of scale, cap and mask, and the sink that counts once and whose value is
    zero. What lies before every row's window is NaN, as a block is that nobody keeps."""
    spans = [(1, 1), (1, 17), (5, 5), (3, 22), (1, 40), (19, 39), (2, 530)]
    window = options.get("window", 0)
    q, pool, tables = _case(heads, kv_heads, block_size, spans, layers=1, window=window)
    counts, contexts = [c for c, _ in spans], [n for _, n in spans]
    scoring = _scoring(heads, options)
    plan = plan_attention(counts, contexts, tables, pool, heads, stable, window=window)
    asked = {name: value for name, value in scoring.items() if name != "window"}
    out = paged_attention(q, pool, 0, plan, torch.zeros_like(q), **asked)
    want = reference.paged_attention(q, pool, 0, counts, contexts, tables, **scoring)
    rows = sum(counts)
    torch.testing.assert_close(out[:rows].double(), want[:rows], atol=3e-6, rtol=1e-5)
    assert not out[rows:].any(), "padding rows were written"
    plain = reference.paged_attention(q, pool, 0, counts[:1], contexts[:1], tables[:1])
    assert "sinks" not in options or not torch.allclose(plain[0], want[0]), "the sink was meant to matter"


def test_only_blocks_of_the_window_are_gathered() -> None:
    """Guards the cost of a window layer, which the context's length does not enter."""
    q, pool, tables = _case(9, 3, 4, [(1, 400), (3, 390)], layers=1, window=10)
    plan = plan_attention([1, 3], [400, 390], tables, pool, 9, window=10)
    assert sum(len(gather.index) for gather in plan.gathers) <= 2 * 3 * (4 + 5)
    with pytest.raises(ValueError, match="3 sinks for 9 heads"):
        paged_attention(q, pool, 0, plan, torch.zeros_like(q), sinks=torch.zeros(3))


def test_eight_bit_rows_are_scored_as_what_they_stand_for() -> None:
    _, pool, tables = _case(9, 3, 4, [(1, 30), (5, 44)], layers=1, window=12)
    pool = pool.nan_to_num(0.0)
    q = torch.randn(6, 9, 8)
    codes, scales = quantize(pool, "int8")
    plan = plan_attention([1, 5], [30, 44], tables, codes, 9, dtype=torch.float32, window=12)
    asked = {"softcap": 1.5, "sinks": torch.linspace(-2.0, 3.0, 9)}
    got = paged_attention(q, codes, 0, plan, torch.zeros_like(q), scales, **asked)
    wide = codes.double() * scales.unsqueeze(-1)
    want = reference.paged_attention(q, wide, 0, [1, 5], [30, 44], tables, window=12, **asked)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


def test_five_tokens_in_blocks_of_two_equal_dense_attention() -> None:
    """PagedAttention's worked example (Kwon et al. 2023, section 4.1): three blocks that lie anywhere, in any order,
    the last half empty, give what one contiguous matrix gives."""
    q, pool, tables = _case(4, 2, 2, [(5, 5)], layers=1)
    assert len(tables[0]) == 3 and pool[tables[0][2], ..., 1, :].isnan().all()
    rows = pool[tables[0], :, 0].permute(1, 2, 0, 3, 4).reshape(2, 2, 6, 8)[:, :, :5]
    keys, values = (rows[:, at].repeat_interleave(2, dim=0) for at in (0, 1))
    dense = torch.nn.functional.scaled_dot_product_attention(
        q[:5].transpose(0, 1), keys, values, is_causal=True
    )
    plan = plan_attention([5], [5], tables, pool, 4, True)
    paged = paged_attention(q, pool, 0, plan, torch.zeros_like(q))
    torch.testing.assert_close(paged[:5], dense.transpose(0, 1), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("stable", [True, False])
def test_result_is_independent_of_the_rest_of_the_batch(stable: bool) -> None:
    """Guards recovery and parity: a sequence's bits must not depend on its neighbours."""
    spans = [(1, 33), (6, 40), (1, 7)]
    q, pool, tables = _case(9, 3, 16, spans)
    together = paged_attention(
        q, pool, 1, plan_attention([1, 6, 1], [33, 40, 7], tables, pool, 9, stable), torch.zeros_like(q)
    )
    start = 0
    for (count, context), table in zip(spans, tables, strict=True):
        alone = paged_attention(
            q[start : start + count].clone(),
            pool,
            1,
            plan_attention([count], [context], [table], pool, 9, stable),
            torch.zeros(count, 9, 8),
        )
        assert torch.equal(alone, together[start : start + count])
        start += count


def _attend(context: int, cuts: list[int], stable: bool, window: int = 0, **scoring: Any) -> torch.Tensor:
    """A prompt of `context` tokens, attended to in chunks that end at `cuts`; always the same keys and queries."""
    q, pool, (table,) = _case(9, 3, 16, [(1, context)], layers=1)
    q, parts, start = torch.randn(context, 9, 8, generator=torch.Generator().manual_seed(1)), [], 0
    for cut in cuts:
        plan = plan_attention([cut - start], [cut], [table], pool, 9, stable, window=window)
        parts.append(paged_attention(q[start:cut], pool, 0, plan, torch.zeros(cut - start, 9, 8), **scoring))
        start = cut
    return torch.cat(parts)


def test_a_stable_plan_gives_a_row_the_same_bits_however_its_prompt_is_cut() -> None:
    """Guards recovery, which recomputes in chunks what was decoded one by one; the plain plan shows that it matters."""
    whole = _attend(700, [700], True)
    singly = list(range(1, 701))
    for cuts in ([128, 256, 384, 512, 640, 700], [1, 50, 193, 300, 511, 513, 700], singly):
        assert torch.equal(_attend(700, cuts, True), whole)
    assert not torch.equal(_attend(700, singly, False), _attend(700, [700], False))


@pytest.mark.parametrize("options", [{"window": 100}, {"window": 300, "softcap": 1.5}, {"sinks": True}])
def test_so_it_is_under_a_window_a_cap_and_sinks(options: dict[str, Any]) -> None:
    """Guards the first tile of a window, which other rows of a chunk may need and this one not."""
    scoring = _scoring(9, options)
    whole = _attend(1100, [1100], True, **scoring)
    singly = [*range(1, 40), *range(500, 640), *range(1000, 1101)]
    for cuts in ([128, 256, 384, 512, 640, 1100], [1, 50, 193, 300, 511, 513, 700, 1030, 1100], singly):
        assert torch.equal(_attend(1100, cuts, True, **scoring), whole)


@pytest.mark.parametrize(
    ("context", "width"),
    [(1, 16), (16, 16), (17, 32), (192, 192), (193, 384), (385, 400), (512, 512), (513, 528), (704, 704), (705, 896)],
)
def test_stable_widths(context: int, width: int) -> None:
    assert stable_width(context) == width


def test_what_is_gathered_does_not_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a step's memory: of many long contexts a few are held at a time, and no two gathers beside each other."""
    batch, context = 12, 40
    q, pool, tables = _case(9, 3, 4, [(1, context)] * batch)
    each = 2 * 3 * -(-context // 4) * 4 * pool.shape[-1] * pool.itemsize
    plan = plan_attention([1] * batch, [context] * batch, tables, pool, 9, gather_bytes=3 * each)
    real, held = kernel._rows, list[weakref.ref[torch.Tensor]]()
    sizes = []

    def gathered(*arguments: Any) -> torch.Tensor:
        assert all(ref() is None for ref in held), "the gather before is still held"
        found = real(*arguments)
        held.append(weakref.ref(found))
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(kernel, "_rows", gathered)
    got = paged_attention(q, pool, 0, plan, torch.zeros_like(q))
    assert sizes == [3 * each] * 4
    monkeypatch.undo()
    at_once = plan_attention([1] * batch, [context] * batch, tables, pool, 9)
    torch.testing.assert_close(got, paged_attention(q, pool, 0, at_once, torch.zeros_like(q)))


def test_physical_block_order_does_not_matter() -> None:
    """Guards the gather: moving blocks around the pool must not change one bit."""
    q, pool, tables = _case(9, 3, 4, [(1, 30), (4, 19)])
    before = paged_attention(q, pool, 0, plan_attention([1, 4], [30, 19], tables, pool, 9), torch.zeros_like(q))
    move = torch.randperm(pool.shape[0])
    moved = torch.empty_like(pool)
    moved[move] = pool
    after = paged_attention(
        q, moved, 0, plan_attention([1, 4], [30, 19], [move[t] for t in tables], moved, 9), torch.zeros_like(q)
    )
    assert torch.equal(before, after)


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_write_equals_the_reference_and_touches_nothing_else(block_size: int) -> None:
    """Guards slot arithmetic: one wrong stride lands a row in a neighbour's head or layer."""
    torch.manual_seed(7)
    pool = torch.full((9, 3, 2, 2, block_size, 8), float("nan"))
    want = pool.clone()
    slots = torch.randperm(9 * block_size)[:7]
    k, v = torch.randn(9, 3, 8), torch.randn(9, 3, 8)
    write_kv(k, v, pool, 1, plan_kv_write(slots, pool))
    reference.write_kv(k[:7], v[:7], want, 1, slots)
    assert torch.equal(pool.nan_to_num(99.0), want.nan_to_num(99.0))


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, pool, tables = _case(9, 3, 4, [(1, 4)])
    plan = plan_attention([1], [4], tables, pool, 9)
    with pytest.raises(ValueError, match="do not fit"):
        paged_attention(q[:, :, :4], pool, 0, plan, q)
    with pytest.raises(ValueError, match="layer 2"):
        paged_attention(q, pool, 2, plan, q)

"""The decode kernel's work list: everything covered once, evenly, within the buffers."""

import random
from collections import Counter
from dataclasses import replace
from itertools import count, islice

import pytest

from kernels.decode_plan import (
    NO_WORK,
    DecodeGeometry,
    DecodePlan,
    SharedPrefix,
    geometry_for,
    plan_decode,
)
from kernels.shared_prefixes import shared_prefixes

GEOMETRY = DecodeGeometry(
    kv_heads=8, programs=264, tile=64, rows_per_item=4, max_items=4096, max_slots=4096
)


def _check(plan: DecodePlan, lengths: list[int], geometry: DecodeGeometry) -> None:
    """Every token of every row and head in exactly one item, numbered as the slots are; no buffer overrun."""
    programs = geometry.programs
    assert plan.ranges[0] == programs and plan.ranges[-1] == len(plan.items) <= geometry.max_items
    assert len(plan.ranges) == programs + 1 and plan.ranges == sorted(plan.ranges)
    for first, begin, end in zip(plan.items, plan.ranges, plan.ranges[1:], strict=False):
        assert first != NO_WORK or begin == end, "a program without a first item has a second one"
    chunks: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
    sharing = {row for item in plan.items for row in plan.rows[item.first : item.first + item.size] if item.size > 1}
    if not geometry.window:
        sharing.clear()
    for item in plan.items:
        if item == NO_WORK:
            continue
        assert item.owner == plan.rows[item.first] and 0 < item.size <= geometry.rows_per_item and item.begin < item.end
        assert geometry.tile % 64 or item.begin % geometry.tile == 0
        if geometry.window:
            seen = min(lengths[row] for row in plan.rows[item.first : item.first + item.size]) - geometry.window
            assert lengths[item.owner] - geometry.window == seen, "the owner may have let go of these blocks"
        for row in plan.rows[item.first : item.first + item.size]:
            mine = chunks.setdefault((row, item.kv_head), {})
            assert item.chunk not in mine, "two items would write one slot"
            mine[item.chunk] = (item.begin, item.end)
    for row, length in enumerate(lengths):
        for head in range(geometry.kv_heads):
            mine = chunks.pop((row, head), {})
            assert sorted(mine) == list(range(plan.splits[row]))
            low = max(0, length - geometry.window) if geometry.window else 0
            at = mine[0][0] if mine else length
            assert at <= low and (row in sharing or at == low // geometry.tile * geometry.tile)
            for number in range(len(mine)):
                begin, end = mine[number]
                assert begin == at
                at = end
            assert at == length
    assert not chunks
    used = Counter(
        slot
        for first, count in zip(plan.first_slots, plan.splits, strict=True)
        if count > 1
        for slot in range(first, first + count)
    )
    assert all(times == 1 for times in used.values()) and max(used, default=-1) < geometry.max_slots
    assert len(used) == plan.slots


def test_equal_lengths_fill_the_grid() -> None:
    """Guards K1's shape (batch 32, 4k context, 8 heads, two programs per SM of 132): nobody idles for long."""
    plan = plan_decode([4096] * 32, GEOMETRY)
    _check(plan, [4096] * 32, GEOMETRY)
    assert plan.load <= 1.12 * plan.ideal


def test_one_long_row_does_not_hold_up_the_rest() -> None:
    """Guards the skewed batch (1 × 64k and 63 × 512): cut by total work, not by sequence or batch size."""
    lengths = [65536, *[512] * 63]
    plan = plan_decode(lengths, GEOMETRY)
    _check(plan, lengths, GEOMETRY)
    assert plan.load <= 1.1 * plan.ideal
    uncut = plan_decode(lengths, replace(GEOMETRY, min_chunk_tiles=4096))
    assert uncut.load > 5 * plan.load, "this batch shows nothing"


def test_a_single_short_row_is_split_over_programs_but_not_into_crumbs() -> None:
    plan = plan_decode([1024], GEOMETRY)
    _check(plan, [1024], GEOMETRY)
    assert plan.splits == [8]
    assert plan_decode([128], GEOMETRY).splits == [1]


def test_few_pieces_and_even_lanes_at_any_lengths() -> None:
    """Guards the point of one stretch per lane: one cut for each at most, and nobody has more than four tiles above
    what a perfect division gives. Equal chunks, dealt out, were up to three times as many, and less even."""
    rng = random.Random(6)
    for programs in (132, 264, 396):
        for batch in (8, 32, 64, 256):
            for lengths in ([1500] * batch, [rng.randint(1, 9000) for _ in range(batch)]):
                geometry = geometry_for(
                    batch=batch, kv_heads=8, group=4, programs=programs, tile=64, packed_rows=16
                )
                plan = plan_decode(lengths, geometry)
                _check(plan, lengths, geometry)
                lanes = programs // 8
                pieces = sum(item != NO_WORK for item in plan.items)
                assert pieces <= 8 * (batch + lanes)
                assert plan.load <= plan.ideal * programs / (8 * lanes) + 4


def test_a_grid_smaller_than_the_heads_still_does_all() -> None:
    """Guards the lanes of a grid with fewer programs than KV heads: a program has several heads."""
    geometry = replace(GEOMETRY, programs=3)
    lengths = [700, 64]
    plan = plan_decode(lengths, geometry)
    _check(plan, lengths, geometry)
    assert plan.splits == [1, 1]


def test_a_shared_prefix_is_read_once_per_item_of_rows() -> None:
    """Guards K5's arithmetic: 64 rows over 8k shared tokens cost a quarter at four rows an item, not the whole."""
    lengths = [8192 + 64] * 64
    together = plan_decode(lengths, GEOMETRY, [SharedPrefix(tuple(range(64)), 8192)])
    _check(together, lengths, GEOMETRY)
    apart = plan_decode(lengths, GEOMETRY)
    assert together.ideal < 0.3 * apart.ideal


def test_random_steps_are_covered_once() -> None:
    """Guards every path: windows, padding rows, nested prefixes, tight buffers."""
    rng = random.Random(4)
    cut = nested = windowed = 0
    for _ in range(300):
        geometry = DecodeGeometry(
            kv_heads=rng.choice([1, 3, 8]),
            programs=rng.choice([1, 7, 40]),
            tile=rng.choice([16, 64]),
            rows_per_item=rng.choice([1, 4]),
            max_items=600,
            max_slots=rng.choice([40, 400]),
            window=rng.choice([0, 0, 100, 2600, 2600]),
        )
        lengths = [rng.choice([0, 1, 63, rng.randint(1, 3000)]) for _ in range(rng.randint(1, 9))]
        shared = []
        rows = [row for row, length in enumerate(lengths) if length >= 64]
        if len(rows) > 2:
            shared.append(SharedPrefix(tuple(rows), 64))
            deeper = tuple(row for row in rows if lengths[row] >= 640)
            if len(deeper) > 1:
                shared.append(SharedPrefix(deeper, 640))
                nested += not geometry.window
        plan = plan_decode(lengths, geometry, shared)
        _check(plan, lengths, geometry)
        cut += plan.slots > 0
        windowed += geometry.window > 0 and any(item.size > 1 for item in plan.items)
    assert cut > 20 and nested > 10 and windowed > 5


def test_a_window_bounds_the_work() -> None:
    """Guards a window layer's cost, which its rows' lengths do not enter; and the layers beside it, which keep their
    prefixes."""
    shared = [SharedPrefix(tuple(range(32)), 8192)]
    lengths = [8192 + 64 * row for row in range(32)]
    geometry = replace(GEOMETRY, window=512, rows_per_item=16)
    plan = plan_decode(lengths, geometry, shared)
    _check(plan, lengths, geometry)
    tiles = sum(-(-(item.end - item.begin) // 64) for item in plan.items) // 8
    assert tiles <= 32 * 9
    shares = {plan.rows[item.first + at] for item in plan.items for at in range(item.size) if item.size > 1}
    assert shares == {row for row in range(32) if 8192 - (lengths[row] - 512) >= 2 * 64}
    alone = plan_decode(lengths, geometry)
    assert sum(-(-(item.end - item.begin) // 64) for item in alone.items) // 8 > tiles


def test_buffers_of_the_stated_size_hold_any_step() -> None:
    """Guards the sizes that are fixed when a graph is captured: no mix of lengths and prefixes may overrun them."""
    rng = random.Random(9)
    for _ in range(60):
        batch = rng.choice([1, 5, 40])
        geometry = geometry_for(
            batch=batch,
            kv_heads=rng.choice([1, 8]),
            group=4,
            programs=rng.choice([2, 64]),
            tile=64,
            packed_rows=rng.choice([16, 64]),
        )
        lengths = [rng.choice([1, 100, 40_000]) + 640 for _ in range(batch)]
        shared = [SharedPrefix(tuple(range(0, batch, step)), 64 * step) for step in (1, 2, 4)]
        _check(plan_decode(lengths, geometry, shared[: rng.randint(0, 3)]), lengths, geometry)


def test_any_grid_covers_real_trees_of_prefixes_once() -> None:
    """Guards the lanes: grids of any size against any number of heads, rows in the tree that their tables make, and the
    rows of an item all reading the same blocks."""
    rng = random.Random(17)
    shared_items = 0
    for _ in range(120):
        batch, tile = rng.choice([1, 3, 40, 130]), rng.choice([16, 64])
        geometry = geometry_for(
            batch=batch,
            kv_heads=rng.choice([1, 3, 8, 16]),
            group=rng.choice([1, 3, 8]),
            programs=rng.choice([1, 7, 132, rng.randint(1, 500)]),
            tile=tile,
            packed_rows=rng.choice([16, 64]),
        )
        longest = rng.choice([3 * tile, 6000])
        lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, batch))]
        names, tables = count(), list[list[int]]()
        for length in lengths:
            trunk = rng.choice(tables) if tables and rng.random() < 0.8 else []
            table = trunk[: rng.randint(0, -(-length // tile))]
            tables.append([*table, *islice(names, -(-length // tile) - len(table))])
        plan = plan_decode(lengths, geometry, shared_prefixes(tables, lengths, tile, min_tokens=tile))
        _check(plan, lengths, geometry)
        assert len(plan.rows) <= geometry.max_items
        for item in plan.items:
            rows = plan.rows[item.first : item.first + item.size]
            read = {tuple(tables[row][item.begin // tile : -(-item.end // tile)]) for row in rows}
            assert len(read) <= 1
            shared_items += len(rows) > 1
    assert shared_items > 1000


def test_what_cannot_be_planned_is_refused() -> None:
    """Guards against a plan that overruns its device buffers."""
    with pytest.raises(ValueError, match="do not fit"):
        plan_decode([64] * 9, replace(GEOMETRY, max_items=64))
    with pytest.raises(ValueError, match="not nested"):
        plan_decode([128, 32], GEOMETRY, [SharedPrefix((0, 1), 64)])
    with pytest.raises(ValueError, match="not nested"):
        plan_decode([256] * 3, GEOMETRY, [SharedPrefix((0, 1), 64), SharedPrefix((1, 2), 128)])

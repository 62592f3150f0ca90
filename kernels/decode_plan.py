"""The work list of the persistent decode grid: which program attends to what; made on the CPU while the step before
runs.

A decode step has one query row per sequence. Its context is cut into chunks; an item is one chunk for one KV head,
attended to by one row, or by several rows that share the chunk's blocks (a common prefix). Every KV head has as many
programs, its lanes, and the same plan. The rows' own tokens lie one after another on a tape that is cut where a lane
is full: each lane has one stretch, which is the end of one row, perhaps some whole ones, and the beginning of another.
So a step is even to within a tile or two whatever its lengths, in few pieces, and is planned in one pass over rows and
lanes. Common prefixes are cut into equal chunks and dealt out before, longest first, each to the lane with the least
work so far; the tape fills what is left.

A row whose context is one chunk writes its output at once. Otherwise chunk number n of the row leaves a partial result
in slot `first_slot + n`, and the slots are merged by their log-sum-exp. Rows that share a prefix share its chunks, so
the same n is right for all of them, however deep the tree of prefixes.

Under a sliding window a row's tokens begin with the tile in which its window does, so the list grows with windows and
not with contexts. A prefix is shared by the rows that see enough of it, from where the shortest of them does: what
others do not see of that is masked for them. Each row is in one such item at most, that of its longest prefix.

Sources: one contiguous stretch per program, Stream-K (Osama et al. 2023); longest first into a heap, FlashInfer's plan
(Ye et al. 2025, arXiv 2501.01005, section 3.3); shared prefixes as a matrix product, Hydragen (Juravsky et al. 2024),
cascade inference (FlashInfer 2024).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_OVERHEAD_TILES = 1  # an item's own cost beside its tiles: loading queries, storing its result
_GOOD_ENOUGH = 1.05  # of the load that a perfect division would give


@dataclass(frozen=True, slots=True)
class DecodeGeometry:
    """What stays fixed between steps, and so may be captured in a CUDA graph.

    `programs`: size of the grid, a small multiple of the number of SMs. `tile`: tokens per inner step. `rows_per_item`:
    query rows that one item can hold. `window`: tokens that a row sees at most, 0 = all. `max_items`, `max_slots`:
    how many of each the buffers hold.
    """

    kv_heads: int
    programs: int
    tile: int
    rows_per_item: int
    max_items: int
    max_slots: int
    min_chunk_tiles: int = 2
    window: int = 0


def geometry_for(
    *,
    batch: int,
    kv_heads: int,
    group: int,
    programs: int,
    tile: int,
    packed_rows: int,
    window: int = 0,
) -> DecodeGeometry:
    """Size the buffers for any step of up to `batch` rows, with shared prefixes up to three deep.

    `packed_rows`: of a tile, query heads of a group side by side. A step whose many sharing rows would need more slots
    is cut into longer chunks.
    """
    pieces = 8 * programs  # at most so many chunks of all heads beyond the uncut: see the shares in `plan_decode`
    return DecodeGeometry(
        kv_heads=kv_heads,
        programs=programs,
        tile=tile,
        rows_per_item=max(1, packed_rows // group),
        max_items=4 * batch * kv_heads + pieces + programs,
        max_slots=4 * batch + pieces,
        window=window,
    )


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Batch `rows` whose first `tokens` tokens lie in the same blocks. `tokens` is a multiple of the block size."""

    rows: tuple[int, ...]
    tokens: int


class WorkItem(NamedTuple):
    """One program's piece of work: tokens `begin ..< end` of KV head `kv_head`, for the `size` rows of the plan from
    `first`, their chunk number `chunk`. `owner` is the first of the rows, in whose table all find their blocks. The
    fields lie in device memory in this order; under a window the owner is the shortest row, which sees the most."""

    first: int
    size: int
    kv_head: int
    begin: int
    end: int
    chunk: int
    owner: int


NO_WORK = WorkItem(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The dealt-out work list. Program p runs `items[p]`, which may be NO_WORK, and then `items[ranges[p] : ranges[p +
    1]]`: where its first item is needs no look-up, and a step of few items is mostly look-ups. Row r of the batch has
    `splits[r]` chunks, whose partial results are in the slots from `first_slots[r]` when there are several. `load` is
    that of the busiest program, in tiles; `ideal` what each would have if work divided perfectly."""

    items: list[WorkItem]
    ranges: list[int]
    rows: list[int]
    splits: list[int]
    first_slots: list[int]
    slots: int
    load: int
    ideal: float


@dataclass(frozen=True, slots=True)
class _Segment:
    """A range of tokens, `begin ..< end`, that all of `rows` see in the same blocks."""

    rows: tuple[int, ...]
    begin: int
    end: int


_Piece = tuple[int, int, int, int, int]
"""An item of every KV head: first, size, begin, end, chunk."""


class _Cut(NamedTuple):
    """The step of one KV head, cut up and dealt out: `lanes` has the pieces of each lane, `loads` their tiles."""

    lanes: list[list[_Piece]]
    loads: list[int]
    rows: list[int]
    splits: list[int]
    slots: int
    ideal: float


def plan_decode(
    lengths: Sequence[int], geometry: DecodeGeometry, shared: Sequence[SharedPrefix] = ()
) -> DecodePlan:
    """Cut and deal out one step. `lengths[r]`: tokens that row r sees, the new one included; 0 = no row (padding).

    `shared`: outermost prefixes first, each row in nested prefixes only. Raises ValueError
    where prefixes are not nested or longer than their rows, or where the buffers cannot hold even an uncut step.
    """
    segments = (_windowed if geometry.window else _segments)(lengths, geometry, shared)
    lanes = max(1, geometry.programs // geometry.kv_heads)
    work = sum(_tiles(segment, geometry) * _bundles(segment, geometry) for segment in segments)
    common = max((_tiles(segment, geometry) for segment in segments if len(segment.rows) > 1), default=0)
    best: _Cut | None = None
    for share in (1, 2, 4, 8):
        limit = max(geometry.min_chunk_tiles, -(-work // (lanes * share)))
        if best is not None and limit >= common:
            continue  # as uncut as before
        cut = _cut(lengths, segments, limit, 1, lanes, geometry)
        coarser = 1
        while cut is None and limit < work:
            limit, coarser = limit * 2, coarser * 2
            cut = _cut(lengths, segments, limit, coarser, lanes, geometry)
        if cut is None:
            raise ValueError(
                f"{len(segments)} segments do not fit {geometry.max_items} items and {geometry.max_slots} slots"
            )
        if best is None or max(cut.loads) < max(best.loads):
            best = cut
        if max(best.loads) <= _GOOD_ENOUGH * best.ideal or limit == geometry.min_chunk_tiles:
            break
    assert best is not None
    return _deal(best, geometry)


def _segments(
    lengths: Sequence[int], geometry: DecodeGeometry, shared: Sequence[SharedPrefix]
) -> list[_Segment]:
    covered = [0] * len(lengths)
    segments = []
    for prefix in shared:
        starts = {covered[row] for row in prefix.rows}
        if len(starts) != 1 or prefix.tokens > min(lengths[row] for row in prefix.rows):
            raise ValueError(
                f"{prefix} is not nested in the prefixes before it, or longer than a row"
            )
        begin = starts.pop()
        if len(prefix.rows) > 1 and prefix.tokens > begin:
            segments.append(_Segment(prefix.rows, begin, prefix.tokens))
            for row in prefix.rows:
                covered[row] = prefix.tokens
    segments += [
        _Segment((row,), covered[row], length) for row, length in enumerate(lengths) if length > covered[row]
    ]
    return segments


def _windowed(
    lengths: Sequence[int], geometry: DecodeGeometry, shared: Sequence[SharedPrefix]
) -> list[_Segment]:
    """As `_segments`, but of what windows show. Nobody shares what is less than the shortest chunk."""
    tile = geometry.tile
    lows = [max(0, length - geometry.window) for length in lengths]
    begins = [low - low % tile for low in lows]
    segments, taken = [], set[int]()
    for prefix in reversed(shared):
        if prefix.tokens > min(lengths[row] for row in prefix.rows):
            raise ValueError(f"{prefix} is longer than a row")
        enough = prefix.tokens - geometry.min_chunk_tiles * tile
        rows = [row for row in prefix.rows if row not in taken and lows[row] <= enough]
        rows.sort(key=lambda row: lengths[row])
        for at in range(0, len(rows), geometry.rows_per_item):
            bundle = tuple(rows[at : at + geometry.rows_per_item])
            if len(bundle) > 1:
                segments.append(_Segment(bundle, begins[bundle[0]], prefix.tokens))
                taken.update(bundle)
                for row in bundle:
                    begins[row] = prefix.tokens
    segments += [
        _Segment((row,), begins[row], length) for row, length in enumerate(lengths) if length > begins[row]
    ]
    return segments


def _tiles(segment: _Segment, geometry: DecodeGeometry) -> int:
    return -(-(segment.end - segment.begin) // geometry.tile)


def _bundles(segment: _Segment, geometry: DecodeGeometry) -> int:
    """Count the items that hold the segment's rows for one chunk of one head."""
    return -(-len(segment.rows) // geometry.rows_per_item)


def _cut(
    lengths: Sequence[int],
    segments: list[_Segment],
    limit_tiles: int,
    coarser: int,
    lanes: int,
    geometry: DecodeGeometry,
) -> _Cut | None:
    """Cut the step into chunks and deal them out to the lanes of a head: common prefixes into chunks of at most
    `limit_tiles`, the rest where lanes are full that are filled `coarser` times as high as they would have to be. None
    where the buffers cannot hold it."""
    splits = [0] * len(lengths)
    rows: list[int] = []
    pieces: list[tuple[int, _Piece]] = []
    tape: list[tuple[int, _Segment]] = []
    for segment in segments:
        if len(segment.rows) == 1:
            tape.append((len(rows), segment))
            rows += segment.rows
            continue
        chunks = _chunks(segment, limit_tiles, geometry)
        before = splits[segment.rows[0]]
        for at in range(0, len(segment.rows), geometry.rows_per_item):
            bundle = segment.rows[at : at + geometry.rows_per_item]
            for number, (begin, end) in enumerate(chunks, before):
                cost = -(-(end - begin) // geometry.tile) + _OVERHEAD_TILES
                pieces.append((cost, (len(rows), len(bundle), begin, end, number)))
            rows += bundle
        for row in segment.rows:
            splits[row] += len(chunks)
    loads, dealt = [0] * lanes, [list[_Piece]() for _ in range(lanes)]
    if pieces:
        heap = list(range(lanes))  # load and lane in one number: integers compare faster than tuples
        for cost, piece in sorted(pieces, key=lambda one: one[0], reverse=True):
            lane = heap[0] % lanes
            dealt[lane].append(piece)
            loads[lane] += cost
            heapq.heapreplace(heap, heap[0] + cost * lanes)
    if tape:
        _fill(tape, loads, dealt, splits, coarser, geometry)
    count = sum(map(len, dealt))
    slots = sum(count for count in splits if count > 1)
    most_items = geometry.max_items - geometry.programs  # as many may be NO_WORK
    if count * geometry.kv_heads > most_items or slots > geometry.max_slots:
        return None
    ideal = geometry.kv_heads * sum(loads) / geometry.programs
    return _Cut(dealt, loads, rows, splits, slots, ideal)


def _fill(
    tape: list[tuple[int, _Segment]],
    loads: list[int],
    dealt: list[list[_Piece]],
    splits: list[int],
    coarser: int,
    geometry: DecodeGeometry,
) -> None:
    """Give each lane a stretch of the tape, as long as brings it to the level at which all is given away. No piece is
    shorter than `min_chunk_tiles`, but for rows that are."""
    tile, least = geometry.tile, geometry.min_chunk_tiles
    remaining = sum([_tiles(segment, geometry) + _OVERHEAD_TILES for _, segment in tape])
    level = _level(loads, remaining + _OVERHEAD_TILES * (len(loads) - 1))
    level = max(level, min(loads) + least + _OVERHEAD_TILES) * coarser
    entries = iter(tape)
    first, segment = next(entries)
    (row,), at, end = segment.rows, segment.begin, segment.end
    order = range(len(loads))
    while True:
        for lane in order:
            room = level - loads[lane] - _OVERHEAD_TILES
            while room > 0:
                tiles = -(-(end - at) // tile)
                take = tiles if tiles <= room + least - 1 else room
                if take < least and take < tiles:
                    break
                to = end if take == tiles else at + take * tile
                dealt[lane].append((first, 1, at, to, splits[row]))
                splits[row] += 1
                loads[lane] += take + _OVERHEAD_TILES
                room -= take + _OVERHEAD_TILES
                at = to
                if at == end:
                    if (entry := next(entries, None)) is None:
                        return
                    first, segment = entry
                    (row,), at, end = segment.rows, segment.begin, segment.end
        level += 1


def _level(loads: list[int], more: int) -> int:
    """Return the height to which lanes of these loads must be filled to hold so much more."""
    ordered = sorted(loads)
    below = 0
    for count, load in enumerate(ordered, 1):
        below += load
        level = -(-(more + below) // count)
        if count == len(ordered) or level <= ordered[count]:
            return level
    raise AssertionError("there are no lanes")


def _chunks(segment: _Segment, limit_tiles: int, geometry: DecodeGeometry) -> list[tuple[int, int]]:
    """Cut the segment into chunks of nearly equal length, whole tiles but for the last."""
    tiles = _tiles(segment, geometry)
    step = -(-tiles // -(-tiles // limit_tiles)) * geometry.tile
    return [
        (begin, min(begin + step, segment.end)) for begin in range(segment.begin, segment.end, step)
    ]


def _deal(cut: _Cut, geometry: DecodeGeometry) -> DecodePlan:
    """Give every head's lanes their programs, or every program its heads where there are more of them."""
    mine: list[list[WorkItem]] = [[] for _ in range(geometry.programs)]
    lanes, load = len(cut.lanes), 0
    for head in range(geometry.kv_heads):
        for lane, pieces in enumerate(cut.lanes):
            mine[(head * lanes + lane) % geometry.programs] += [
                WorkItem(first, size, head, begin, end, chunk, cut.rows[first])
                for first, size, begin, end, chunk in pieces
            ]
    load = max(cut.loads) * -(-geometry.kv_heads * lanes // geometry.programs)
    ranges, first_slots = [geometry.programs], [0]
    for items in mine:
        ranges.append(ranges[-1] + max(0, len(items) - 1))
    for count in cut.splits[:-1]:
        first_slots.append(first_slots[-1] + (count if count > 1 else 0))
    return DecodePlan(
        [
            *(items[0] if items else NO_WORK for items in mine),
            *(item for items in mine for item in items[1:]),
        ],
        ranges,
        cut.rows,
        cut.splits,
        first_slots,
        cut.slots,
        load,
        cut.ideal,
    )

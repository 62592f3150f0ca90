"""Which layers share a block table, and which blocks a window still needs."""

import msgspec
import pytest

from engine.identity import IDENTITY_BYTES, in_group
from engine.kv.groups import LayerGroup, group_names, index_and_group, layer_groups, migrated, place
from engine.kv.layout import KVLayout
from engine.kv.manager import KVCacheManager

GEMMA = [8, 8, 8, 8, 8, 0] * 3


def test_layers_of_one_kind_are_one_group_and_need_no_table_more() -> None:
    assert layer_groups([0] * 4) == layer_groups([16] * 4) == ()


def test_the_layers_of_a_window_fill_groups_as_large_as_the_first() -> None:
    first, *others = layer_groups(GEMMA)
    assert first == LayerGroup((5, 11, 17)) and len(others) == 5
    assert [group.layers for group in others[:2]] == [(0, 1, 2), (3, 4, 6)]
    assert all(group.window == 8 for group in others)
    uneven = layer_groups([8, 8, 8, 0, 0])
    assert [group.layers for group in uneven] == [(3, 4), (0, 1), (2,)]


def test_without_global_layers_those_of_the_largest_window_keep_everything() -> None:
    assert layer_groups([4, 64]) == (LayerGroup((1,)), LayerGroup((0,), 4))


@pytest.mark.parametrize("window", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_block_is_needed_exactly_while_a_query_sees_one_of_its_tokens(window: int, size: int) -> None:
    group = LayerGroup((0,), window)
    for position in range(80):
        seen = range(max(0, position - window + 1), position + 1)  # its own included
        assert group.first_needed(position, size) == seen[0] // size
        for tokens in (1, 7):
            blocks = (position + tokens - 1) // size - group.first_needed(position, size) + 1
            assert blocks <= group.tail_blocks(size, tokens)


def test_who_goes_on_elsewhere_may_compute_the_last_token_again() -> None:
    """Guards a migration without the window of the prompt's last token, which a search computes again."""
    group = LayerGroup((0,), 5)
    assert [group.first_migrated(tokens, 4) for tokens in (0, 8, 9, 12, 13)] == [0, 0, 1, 1, 2]
    assert LayerGroup((0,), 1).first_migrated(1, 1) == 0 and LayerGroup((0,), 1).first_migrated(2, 1) == 1
    assert LayerGroup((0,)).first_needed(50, 4) == LayerGroup((0,)).first_migrated(50, 4) == 0, "nothing is let go"


@pytest.mark.parametrize("window", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_sequence_keeps_what_two_ways_of_going_on_need(window: int, size: int) -> None:
    """Guards a window that goes before it is offered, or before its last whole block goes to a lower tier; and one that
    is kept too long."""
    group = LayerGroup((0,), window)
    for tokens in range(80):
        last, whole = max(0, tokens - 1), tokens - tokens % size
        needed = [block for block in range(80) if any(t >= min(last, whole) - window + 1 for t in _of(block, size))]
        assert group.first_kept(tokens, size) == needed[0]
    assert LayerGroup((0,)).first_kept(79, size) == 0


@pytest.mark.parametrize("window", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("ahead", [0, 1, 4, 7])
def test_a_charge_is_never_short_and_at_most_a_block_too_large(window: int, size: int, ahead: int) -> None:
    """Guards a promise that another's block is taken for, and a pool that holds fewer sequences than it could."""
    group = LayerGroup((0,), window)
    kept = [-(-(tokens + ahead) // size) - group.first_kept(tokens, size) for tokens in range(120)]
    behind = [(at + ahead) // size + 1 - group.first_needed(at, size) for at in range(120)]
    assert 0 <= group.most_blocks(size, ahead) - max(*kept, *behind) <= 1
    assert 0 <= group.tail_blocks(size, ahead + 1) - max(behind) <= 1
    assert group.tail_blocks(size) == group.tail_blocks(size, 1)


def _of(block: int, size: int) -> range:
    return range(block * size, (block + 1) * size)


def test_what_goes_over_is_all_of_the_first_group_and_the_tail_of_each_window() -> None:
    """Guards a tail that is one block short, blocks in another order than the receiver's, and a model of one group."""
    groups = (LayerGroup((0,)), LayerGroup((1,), 5), LayerGroup((2,), 9))
    assert migrated(groups, range(1, 5), 18, 4) == [
        (1, 0), (2, 0), (2, 2), (3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2)
    ]  # fmt: skip
    assert migrated((), range(2, 5), 18, 4) == [(2, 0), (3, 0), (4, 0)]


def test_places_and_identities_tell_groups_apart() -> None:
    assert [place(index, 0, 1) for index in range(5)] == list(range(5)), "the wire of one group is as ever"
    pairs = [(index, group) for index in range(4) for group in range(3)]
    assert [index_and_group(place(*pair, 3), 3) for pair in pairs] == pairs
    ident = bytes(IDENTITY_BYTES)
    assert in_group(ident, 0) == ident and len({in_group(ident, group) for group in range(4)}) == 4


def test_a_layout_says_where_each_layer_is() -> None:
    layout = KVLayout(kv_heads=1, layers=3, block_size=4, head_dim=8, groups=layer_groups(GEMMA))
    assert layout.group_count == 6 and len(layout.places) == 18
    assert layout.places[5] == (0, 0) and layout.places[0] == (1, 0) and layout.places[6] == (2, 2)
    assert msgspec.convert(layout.describe(), KVLayout) == layout
    plain = KVLayout(kv_heads=1, layers=3, block_size=4, head_dim=8)
    assert "groups" not in plain.describe() and plain.places == ((0, 0), (0, 1), (0, 2))


def test_a_layout_whose_groups_do_not_fit_its_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        KVLayout(
            kv_heads=1, layers=1, block_size=4, head_dim=8, groups=(LayerGroup((0,)), LayerGroup((1, 2), 8))
        )
    with pytest.raises(ValueError, match="do not fit"):
        KVLayout(kv_heads=1, layers=1, block_size=4, head_dim=8, groups=(LayerGroup((0,)), LayerGroup((), 8)))
    with pytest.raises(ValueError, match="does not fill"):
        KVLayout(kv_heads=1, layers=2, block_size=4, head_dim=8, groups=(LayerGroup((0,)), LayerGroup((1,), 8)))


@pytest.mark.parametrize("window", [2, 5, 9, 24])
@pytest.mark.parametrize("cached", [0, 4, 16, 28])
def test_an_idle_worker_takes_what_fits_its_pool(window: int, cached: int) -> None:
    """Guards a request that waits for ever: the windows of what is cached of its prompt, kept beside those to come,
    were more than there was, and nobody would give anything back."""
    groups, tokens, ahead = (LayerGroup((0,)), LayerGroup((1,), window)), list(range(40)), 2
    total = KVCacheManager(1000, 4, "m", groups=groups, ahead_tokens=ahead).pool_blocks_for(52)
    kv = KVCacheManager(total, 4, "m", groups=groups, ahead_tokens=ahead)
    first = kv.acquire(b"", tokens[:cached], match_limit=0, room_tokens=cached, grow_tokens=cached)
    assert first is not None
    for at in range(0, cached, 2):
        kv.reach(first, at, at + 2)
        kv.commit(first, tokens[: at + 2])
        kv.slide(first, at + 2)
    kv.release(first)
    assert kv.matched_tokens(b"", tokens, 39) == cached
    lease = kv.acquire(b"", tokens, match_limit=39, room_tokens=40, grow_tokens=52, migrating=True)
    assert lease is not None
    kv.check()


@pytest.mark.parametrize("window", [2, 5, 9])
@pytest.mark.parametrize("known", [2, 6, 7, 11, 14])
def test_what_would_copy_from_blocks_that_it_needs_copies_nothing(window: int, known: int) -> None:
    """Guards the window's half of a block that is found in part, which would be held for a copy that is not made."""
    groups, tokens, ahead = (LayerGroup((0,)), LayerGroup((1,), window)), list(range(16)), 4
    total = KVCacheManager(1000, 4, "m", groups=groups, ahead_tokens=ahead).pool_blocks_for(16)
    kv = KVCacheManager(total, 4, "m", groups=groups, ahead_tokens=ahead)
    first = kv.acquire(b"", tokens, match_limit=0, room_tokens=16)
    assert first is not None
    for end in range(4, 17, 4):
        kv.reach(first, end - 4, end)
        kv.commit(first, tokens[:end])
        kv.slide(first, end)
    kv.release(first)
    lease = kv.acquire(b"", [*range(known), *range(100, 116 - known)], match_limit=15, room_tokens=16)
    assert lease is not None and lease.cached_tokens % 4 == 0 and not lease.copies
    kv.check()
    kv.release(lease)
    kv.check()
    assert kv.available == total


@pytest.mark.parametrize("window", range(1, 14))
def test_a_charge_is_the_most_that_is_ever_held(window: int) -> None:
    """Guards a pool of which every request takes a block more than it can use, and one that a step runs out of."""
    group = LayerGroup((1,), window)
    for size, ahead in ((size, ahead) for size in (1, 2, 3, 4, 5) for ahead in range(12)):
        held = [-(-(tokens + ahead) // size) - group.first_kept(tokens, size) for tokens in range(60)]
        assert group.most_blocks(size, ahead) == max(*held, group.tail_blocks(size, ahead + 1)), (size, ahead)


def test_operators_are_told_which_group_sees_what() -> None:
    """Guards the names in metrics: a model without windows has one group, and that sees all."""
    assert group_names(()) == ["0 all"]
    assert group_names([LayerGroup((0,)), LayerGroup((1,), 6)]) == ["0 all", "1 window 6"]

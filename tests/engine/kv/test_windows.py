"""The block tables of window groups, figure by figure: what a lease is charged, what it holds where, what two share,
and that `check` sees each account that is wrong. Any order of calls is roamed in test_window_machine.py."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from engine.kv.block_pool import BlockState
from engine.kv.groups import GONE, LayerGroup
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.radix_cache import Match
from engine.kv.windows import WindowTables
from engine.types import BlockId

SIZE, AHEAD, BLOCKS = 4, 6, 64
WINDOWS = (5, 9)
GROUPS = (LayerGroup((0,)), *(LayerGroup((at,), window) for at, window in enumerate(WINDOWS, 1)))
MOST = (4, 5)
"""Blocks of each window that a sequence holds at once: 4 or 8 tokens before, 6 at once, one again, one block begun."""


def _manager(ahead: int = AHEAD) -> KVCacheManager:
    return KVCacheManager(BLOCKS, SIZE, "m", groups=GROUPS, ahead_tokens=ahead)


def _tables(kv: KVCacheManager) -> WindowTables:
    assert kv.windows is not None
    return kv.windows


def _lease(kv: KVCacheManager, tokens: list[int], *, cached: bool = True, grow: int = 0, **more: bool) -> Lease:
    limit = len(tokens) - 1 if cached else 0
    lease = kv.acquire(b"", tokens, match_limit=limit, room_tokens=len(tokens), grow_tokens=len(tokens) + grow, **more)
    assert lease is not None
    return lease


def _compute(kv: KVCacheManager, lease: Lease, tokens: list[int], start: int = 0) -> Lease:
    """Compute the rest of `tokens` as an engine does, chunk after chunk."""
    for first in range(start, len(tokens), AHEAD):
        end = min(first + AHEAD, len(tokens))
        kv.reach(lease, first, end)
        kv.commit(lease, tokens[:end])
        kv.slide(lease, end)
        kv.check()
    return lease


def _held(lease: Lease) -> list[list[int]]:
    """Return which blocks of each window group the lease has."""
    return [[at for at, block in enumerate(table) if block != GONE] for table in lease.windows]


def _seen(tokens: int, window: int) -> set[int]:
    """Return the blocks of the tokens that a query behind `tokens` tokens sees."""
    return {at // SIZE for at in range(max(0, tokens - window + 1), tokens)}


def test_a_sequence_is_charged_for_all_its_blocks_or_for_a_window_and_a_step() -> None:
    """Guards promises that are too small for the widest moment, and sequences that are refused for blocks that they
    can never hold."""
    kv = _manager()
    windows = _tables(kv)
    assert [windows.charges(blocks) for blocks in (0, 1, 4, 5, 6, 30)] == [
        [0, 0], [1, 1], [4, 4], [4, 5], [4, 5], [4, 5]
    ]  # fmt: skip
    assert windows.for_fork(2) == [3, 3] and windows.for_fork(30) == [5, 6], "its boundary block is beside its table"
    assert kv.pool_blocks_for(5) == 6 and kv.pool_blocks_for(80) == 29
    assert [_tables(_manager(ahead=ahead)).charges(30) for ahead in (7, 8, 11, 12)] == [[4, 5], [5, 6], [5, 6], [6, 7]]


def test_what_is_not_held_is_promised() -> None:
    """Guards the account that others' leases are refused by."""
    kv = _manager()
    lease = _lease(kv, list(range(21)))
    assert (lease.charges, lease.held, lease.starts) == ([4, 5], [0, 0], [0, 0])
    assert _tables(kv).promised == _tables(kv).charged == 9 and kv.available == BLOCKS - 6 - 9
    kv.reach(lease, 0, 5)
    assert _held(lease) == [[0, 1], [0, 1]] and (lease.held, lease.starts) == ([2, 2], [0, 0])
    assert _tables(kv).promised == 5 and kv.available == BLOCKS - 6 - 9, "what was promised is held now"
    kv.reach(lease, 3, 9)
    assert _held(lease) == [[0, 1, 2], [0, 1, 2]] and _tables(kv).promised == 3
    kv.release(lease)
    assert _tables(kv).charged == 0 and kv.available == kv.pool.free == BLOCKS


def test_no_lease_holds_more_than_it_is_charged() -> None:
    """Guards others' promises: the block beyond is one of theirs."""
    kv = _manager()
    lease = _lease(kv, list(range(40)))
    kv.reach(lease, 0, 16)
    with pytest.raises(ValueError, match="window group 1 of a lease goes beyond its 4 blocks"):
        kv.reach(lease, 0, 17)
    kv.release(lease)


@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_window_keeps_what_its_last_token_sees_and_no_more(step: int) -> None:
    """Guards a block that goes one token early, or stays one too long, at every position."""
    kv, tokens = _manager(), list(range(60))
    lease = _lease(kv, tokens)
    for start in range(0, len(tokens), step):
        end = start + step
        kv.reach(lease, start, end)
        kv.slide(lease, end)
        kv.check()
        # The last token may be computed again: what it sees, and its own block.
        expected = [sorted(_seen(end - 1, window) | {(end - 1) // SIZE}) for window in WINDOWS]
        # A block of which nothing was seen any more before it was written is not there to begin with.
        assert _held(lease) == expected and lease.held == [len(held) for held in expected]
    before = _held(lease)
    kv.slide(lease, 30)
    assert _held(lease) == before, "a window does not slide back"
    kv.release(lease)


def test_a_match_holds_the_windows_behind_it_alone() -> None:
    """Guards blocks that are held, and charged, though nobody sees them, and a first token that lacks one."""
    kv, tokens = _manager(), list(range(22))
    kv.release(_compute(kv, _lease(kv, tokens), tokens))
    first = _lease(kv, [*tokens[:20], 99])
    assert first.cached_tokens == 20 and _held(first) == [[4], [3, 4]]
    assert (first.held, first.starts, first.charges) == ([1, 2], [4, 3], [4, 5])
    assert _tables(kv).promised == 3 + 3 and _tables(kv).doubled == 0
    second = _lease(kv, [*tokens[:20], 98])
    assert second.windows[0][4] == first.windows[0][4] and second.windows[1][3:5] == first.windows[1][3:5]
    assert _tables(kv).doubled == 3 and _tables(kv).charged == 12 + 3, "either may be the first to let go"
    kv.check()
    kv.release(first)
    assert _tables(kv).doubled == 0 and _tables(kv).promised == 6
    assert all(kv.pool.state(block) is BlockState.ACTIVE for block in _tables(kv).holders(second))
    kv.release(second)
    assert kv.available == BLOCKS


@pytest.mark.parametrize("found", [17, 19])
def test_a_partial_match_copies_its_block_of_every_group(found: int) -> None:
    """Guards a boundary block of a window group that is left out, written in place, or held for good."""
    kv, tokens = _manager(), list(range(19))
    old = _compute(kv, _lease(kv, tokens), tokens)
    kv.commit(old, tokens, tail=True)
    sources = [old.blocks[4], *(table[4] for table in old.windows)]
    kv.release(old)
    lease = _lease(kv, [*tokens[:found], 99, 98])
    assert lease.cached_tokens == found and [source for source, _ in lease.copies] == sources
    assert [target for _, target in lease.copies] == [lease.blocks[4], *(table[4] for table in lease.windows)]
    assert _held(lease) == [[3, 4], [2, 3, 4]] and lease.held == [2, 3]
    assert all(kv.pool.state(source) is BlockState.ACTIVE for source in sources)
    kv.check()
    kv.copied(lease)
    assert all(kv.pool.state(source) is BlockState.CACHED for source in sources)
    kv.check()
    kv.release(lease)
    assert kv.available == BLOCKS


def test_a_fork_shares_the_windows_at_its_tokens_and_copies_the_boundary() -> None:
    """Guards a fork that lacks a block, writes into its parent's, or costs more or less than it was promised."""
    kv, tokens = _manager(), list(range(18))
    parent = _compute(kv, _lease(kv, tokens, grow=4), tokens)
    child = kv.promise(b"", 2, to_share=4)
    assert child is not None and (child.charges, child.held) == ([5, 6], [0, 0])
    promised = _tables(kv).promised
    kv.fork(parent, child, 18)
    assert _held(child) == [[3, 4], [2, 3, 4]] and (child.held, child.starts) == ([2, 3], [3, 2])
    assert child.charges == [4, 5] and _tables(kv).promised == promised - 2 - 5
    for group, first in enumerate((3, 2)):
        assert child.windows[group][first:4] == parent.windows[group][first:4]
        assert child.copies[1 + group] == (parent.windows[group][4], child.windows[group][4])
        assert child.windows[group][4] != parent.windows[group][4]
    assert _tables(kv).doubled == 1 + 2 + 2, "what both hold, and the sources of the copies"
    kv.check()
    kv.copied(child)
    assert _tables(kv).doubled == 3
    kv.check()
    kv.release(parent)
    assert _tables(kv).doubled == 0 and kv.pool.refs(child.windows[0][3]) == 1
    kv.release(child)
    assert kv.available == BLOCKS


def test_a_fork_of_whole_blocks_copies_nothing() -> None:
    """Guards a boundary block that is copied though nothing is in it."""
    kv, tokens = _manager(), list(range(16))
    parent = _compute(kv, _lease(kv, tokens), tokens)
    child = kv.promise(b"", 1, to_share=4)
    assert child is not None
    kv.fork(parent, child, 16)
    assert child.copies == [] and _held(child) == [[3], [2, 3]] and [len(table) for table in child.windows] == [4, 4]
    kv.check()


def test_a_fork_of_one_whose_copies_are_still_to_be_made_copies_from_the_same_blocks() -> None:
    """Guards a copy of a copy that has not been made: the child would begin with what the block held before."""
    kv, tokens = _manager(), list(range(18))
    old = _compute(kv, _lease(kv, tokens), tokens)
    kv.commit(old, tokens, tail=True)
    kv.release(old)
    parent = _lease(kv, [*tokens, 99])
    assert parent.cached_tokens == 18 and len(parent.copies) == 3
    child = kv.promise(b"", 1, to_share=4)
    assert child is not None
    kv.fork(parent, child, 18)
    assert [source for source, _ in child.copies] == [source for source, _ in parent.copies]


def test_what_can_be_forked_is_what_has_not_slid_away() -> None:
    """Guards a fork that is refused though all is there, and one that is begun without what its next token sees."""
    kv, tokens = _manager(), list(range(38))
    lease = _compute(kv, _lease(kv, tokens), tokens)
    held = [set(group) for group in _held(lease)]
    for at in range(1, len(tokens) + 1):
        needed = [_seen(at, window) | ({at // SIZE} if at % SIZE else set()) for window in WINDOWS]
        assert kv.can_fork(lease, at) == all(need <= have for need, have in zip(needed, held, strict=True)), at
    assert kv.can_fork(lease, 37) and kv.can_fork(lease, 38) and not kv.can_fork(lease, 35)


def test_a_migration_reserves_the_tail_of_each_window_and_is_charged_no_more_than_a_pool_must_have() -> None:
    """Guards blocks that are reserved and never come, and a request that an idle worker refuses for ever because more
    is charged for it than it may hold."""
    kv, tokens = _manager(), list(range(26))
    lease = _lease(kv, tokens, grow=24, migrating=True)
    assert _held(lease) == [[5, 6], [4, 5, 6]]
    assert lease.charges == list(MOST), "whatever tokens are named, a tail is no longer: what falls behind it is let go"
    reserved = list(_tables(kv).holders(lease))
    assert all(kv.pool.state(block) is BlockState.RESERVED for block in reserved)
    kv.landed(lease)
    assert all(kv.pool.state(block) is BlockState.ACTIVE for block in reserved)
    assert lease.charges == [4, 5] and _tables(kv).promised == 2 + 2
    kv.check()
    few = _lease(kv, [7] * 6, grow=5, migrating=True)
    assert few.promised == 1 and few.charges == [3, 3] and _held(few) == [[0, 1], [0, 1]]
    kv.landed(few)
    assert few.charges == [3, 3]


def test_a_token_that_is_named_moves_what_is_to_come() -> None:
    """Guards blocks that are reserved for a tail that nobody sends any more, and the match's windows, which stay."""
    kv, tokens = _manager(), list(range(41))
    kv.release(_compute(kv, _lease(kv, tokens[:17]), tokens[:17]))
    lease = _lease(kv, tokens[:22], grow=20, migrating=True)
    assert _held(lease) == [[3, 4, 5], [2, 3, 4, 5]]
    kv.extend(lease, 41, migrating=True)
    assert _held(lease) == [[3, 9, 10], [2, 3, 8, 9, 10]]
    kv.check()


def test_a_migration_keeps_the_windows_of_what_it_has_found() -> None:
    """Guards a prompt that is to be computed here after all, behind a match whose windows were let go."""
    kv, tokens = _manager(), list(range(30))
    kv.release(_compute(kv, _lease(kv, tokens[:17]), tokens[:17]))
    lease = _lease(kv, tokens, migrating=True)
    assert lease.cached_tokens == 16 and _held(lease) == [[3, 6, 7], [2, 3, 5, 6, 7]]
    assert lease.charges == [4, 5] and _tables(kv).wanted(4, 30) == [range(6, 8), range(5, 8)]
    assert _tables(kv).wanted(7, 30) == [range(7, 8), range(7, 8)]
    kv.landed(lease)
    kv.restart(lease, 16)
    assert _held(lease) == [[3], [2, 3]], "what did not come is not computed from"
    kv.check()


def test_a_promise_costs_what_each_window_may_hold_more() -> None:
    """Guards growth that is paid for twice, or not at all."""
    kv = _manager()
    lease = _lease(kv, list(range(4)))
    assert lease.charges == [1, 1] and kv.cost(lease, 2) == 2 + 2 + 2
    before = kv.available
    assert kv.grow(lease, 2) and kv.available == before - 6 and lease.charges == [3, 3]
    assert kv.cost(lease, 10) == 10 + 1 + 2, "a window grows to its most"
    kv.reach(lease, 0, 4)
    assert kv.cost(lease, 10) == 13, "what is held is not promised any more"
    kv.check()
    fork = kv.promise(b"", 2, to_share=3)
    assert fork is not None and fork.charges == [5, 6] and kv.cost(fork, 1) == 1
    short = kv.promise(b"", 1, to_share=1)
    assert short is not None and short.charges == [3, 3] and kv.cost(short, 1) == 1 + 1 + 1
    assert kv.grow(short, 1) and short.charges == [4, 4]
    kv.check()


def test_what_is_computed_again_takes_the_place_of_what_nobody_holds() -> None:
    """Guards two blocks of one content in the cache, of which one could never be found or evicted."""
    kv, tokens = _manager(), list(range(8))
    kv.release(_compute(kv, _lease(kv, tokens), tokens))
    used = BLOCKS - kv.pool.free
    again = _compute(kv, _lease(kv, tokens, cached=False), tokens)
    assert [node.windows for node in again.path] == [list(pair) for pair in zip(*again.windows, strict=True)]
    assert BLOCKS - kv.pool.free == used, "the older ones are free"
    third = _compute(kv, _lease(kv, tokens, cached=False), tokens)
    assert [node.windows for node in third.path] == [list(pair) for pair in zip(*again.windows, strict=True)]
    kv.check()
    kv.release(third)
    kv.release(again)
    assert kv.available == BLOCKS and kv.pool.free == BLOCKS - used


def test_a_tombstone_is_filled_by_who_computes_its_block_again() -> None:
    """Guards a prefix that stays unusable although its windows are there again."""
    kv, tokens = _manager(), list(range(40))
    kv.release(_compute(kv, _lease(kv, tokens), tokens))
    assert kv.matched_tokens(b"", tokens, 12) == 12
    # Of the idle ones the windows that slid away first are the first to go: twelve of them.
    taken = kv.acquire(b"", [], match_limit=0, room_tokens=SIZE * (kv.pool.free - sum(MOST) + 12))
    assert taken is not None
    kv.release(taken)
    assert (kv.matched_tokens(b"", tokens, 12), kv.matched_tokens(b"", tokens, 40)) == (0, 40)
    kv.release(_compute(kv, _lease(kv, tokens[:12], cached=False), tokens[:12]))
    assert kv.matched_tokens(b"", tokens, 12) == 12
    kv.check()


def test_adopted_blocks_bring_their_windows() -> None:
    """Guards a request that goes on behind another's blocks with windows of its own that nobody has written."""
    kv, tokens = _manager(), list(range(22))
    waits = _lease(kv, tokens, cached=False)
    kv.reach(waits, 0, 5)
    kv.reach(waits, 16, 22)
    other = _compute(kv, _lease(kv, tokens, cached=False), tokens)
    other_tables = [list(table) for table in other.windows]
    assert kv.adopt(waits, tokens[:-1]) == 20
    assert _held(waits) == [[4, 5], [3, 4, 5]] and (waits.held, waits.starts) == ([2, 3], [4, 3])
    assert waits.windows[0][4] == other_tables[0][4] and waits.windows[1][3:5] == other_tables[1][3:5]
    assert _tables(kv).doubled == 3
    kv.check()
    kv.release(waits)
    kv.release(other)
    assert kv.available == BLOCKS


def test_what_has_slid_away_before_it_is_indexed_leaves_a_tombstone() -> None:
    """Guards an index that names no block: whoever found it would read another's."""
    kv, tokens = _manager(), list(range(20))
    lease = _lease(kv, tokens)
    for first in range(0, 20, 5):
        kv.reach(lease, first, first + 5)
        kv.slide(lease, first + 5)
    kv.commit(lease, tokens)
    assert [node.windows and node.windows.count(GONE) for node in lease.path] == [2, 2, 1, 0, 0]
    kv.check()
    kv.release(lease)
    assert [kv.matched_tokens(b"", tokens, limit) for limit in (8, 12, 16, 20)] == [0, 0, 16, 20]
    kv.check()


def _more_promised(windows: WindowTables, lease: Lease) -> None:
    windows.promised += 1


def _more_doubled(windows: WindowTables, lease: Lease) -> None:
    windows.doubled += 1


def _another_holder(windows: WindowTables, lease: Lease) -> None:
    windows._holders[lease.windows[0][-1]] += 1


def _more_held(windows: WindowTables, lease: Lease) -> None:
    lease.held[1] += 1


def _longer(windows: WindowTables, lease: Lease) -> None:
    lease.windows[0].append(GONE)


def _behind_its_start(windows: WindowTables, lease: Lease) -> None:
    lease.starts[1] += 1


def _another_charge(windows: WindowTables, lease: Lease) -> None:
    lease.charges[0] += 1


def _another_block(windows: WindowTables, lease: Lease) -> None:
    lease.windows[1][-1] = BlockId(BLOCKS - 1)


WRONG = (
    *(_more_promised, _more_doubled, _another_holder, _more_held),
    *(_longer, _behind_its_start, _another_charge, _another_block),
)


@pytest.mark.parametrize("wrong", WRONG)
def test_check_sees_each_account_that_is_wrong(wrong: Callable[[WindowTables, Lease], None]) -> None:
    """Guards the auditor: an account that it does not recompute would be believed for ever."""
    kv, tokens = _manager(), list(range(22))
    lease = _compute(kv, _lease(kv, tokens), tokens)
    kv.check()
    wrong(_tables(kv), lease)
    with pytest.raises(AssertionError):
        kv.check()


@pytest.mark.parametrize("known", range(4, 29, 4))
def test_an_idle_pool_takes_what_fits_it_whatever_is_cached(known: int) -> None:
    """Guards a request that is refused for ever: to keep the window behind a match took room that no pool must have."""
    tokens = list(range(30))
    most = _manager(ahead=1).pool_blocks_for(len(tokens) + 6)
    kv = KVCacheManager(most, SIZE, "m", groups=GROUPS, ahead_tokens=1)
    first = _lease(kv, tokens[:known])
    for end in range(1, known + 1):
        kv.reach(first, end - 1, end)
        kv.commit(first, tokens[:end])
        kv.slide(first, end)
    kv.release(first)
    lease = _lease(kv, tokens, grow=6, migrating=True)
    kv.extend(lease, 36, migrating=True)
    kv.landed(lease)
    kv.slide(lease, 36)
    kv.check()


def test_adopting_less_than_is_committed_leaves_the_windows() -> None:
    """Guards blocks that were let go behind a window and come back to a lease that does not read them."""
    kv, tokens = _manager(), list(range(40))
    lease = _compute(kv, _lease(kv, tokens), tokens)
    before = [list(table) for table in lease.windows], list(lease.starts), list(lease.held), _tables(kv).charged
    for count in (8, 36, 40):
        assert kv.adopt(lease, tokens[:count]) == 40
        after = [list(table) for table in lease.windows], list(lease.starts), list(lease.held), _tables(kv).charged
        assert after == before
        kv.check()
    kv.release(lease)


@pytest.mark.parametrize("found", [0, 8, 16])
@pytest.mark.parametrize("windows", [WINDOWS, (6, 10), (2, 7)])
def test_whatever_tokens_are_named_no_more_blocks_come_than_were_charged(found: int, windows: tuple[int, ...]) -> None:
    """Guards the pool: tokens that a lost attempt names move the tail on, and the windows of what was found stay."""
    tokens = list(range(60))
    groups = (LayerGroup((0,)), *(LayerGroup((at,), window) for at, window in enumerate(windows, 1)))
    for length in range(found + 1, found + 14):
        for more in range(0, 20, 3):
            kv = KVCacheManager(BLOCKS, SIZE, "m", groups=groups, ahead_tokens=AHEAD)
            if found:
                kv.release(_compute(kv, _lease(kv, tokens[: found + 1]), tokens[: found + 1]))
            lease = _lease(kv, tokens[:length], grow=more, migrating=True)
            assert lease.cached_tokens == (found if length > found else 0)
            for _ in range(2):
                assert all(held <= charge for held, charge in zip(lease.held, lease.charges, strict=True))
                kv.extend(lease, length + more, migrating=True)
            kv.check()


def test_what_is_released_while_a_step_reads_it_does_not_slide() -> None:
    """Guards blocks that a step under way reads: those of a request that has ended are let go when it has."""
    kv, tokens = _manager(), list(range(24))
    lease = _compute(kv, _lease(kv, tokens), tokens)
    kv.launched([lease])
    before = _held(lease)
    kv.release(lease)
    kv.slide(lease, 60)
    assert _held(lease) == before and all(before)
    kv.ended([lease])
    kv.check()


def test_an_exchanged_lease_is_as_large_as_the_old_one() -> None:
    """Guards the last token's block, and the room to grow that was promised."""
    kv, tokens = _manager(), list(range(17))
    lease = _lease(kv, tokens, cached=False, grow=9, migrating=True)
    other = kv.exchange(lease, tokens, 16, Match([]))
    assert lease.released and not other.released
    assert (len(other.blocks), other.promised) == (len(lease.blocks), 2) and len(other.blocks) == 5
    kv.check()


def test_a_migration_that_takes_all_there_is_keeps_what_it_has_found() -> None:
    """Guards a prefix that is moved again in a pool which is just large enough for the rest."""
    kv, tokens = _manager(), list(range(24))
    kv.release(_compute(kv, _lease(kv, tokens, cached=False), tokens))
    probe = _lease(kv, tokens, migrating=True)
    found, left = probe.cached_tokens, kv.available
    kv.release(probe)
    again = kv.acquire(b"", tokens, match_limit=23, room_tokens=24, migrating=True, spare=left)
    assert again is not None and again.cached_tokens == found == 20


def test_where_a_tier_can_bring_nothing_for_want_of_room_the_exchanged_lease_is_like_the_old() -> None:
    """Guards a handoff that goes on with no lease at all: to keep a window behind what is loaded takes a block more."""
    kv, tokens = _manager(ahead=1), list(range(28))
    lease = _lease(kv, tokens, cached=False, migrating=True)
    others = kv.acquire(b"", (), match_limit=0, room_tokens=0, grow_tokens=SIZE * (kv.available - sum(MOST)))
    assert others is not None
    rest = kv.promise(b"", kv.available)
    assert rest is not None and kv.available == 0
    other = kv.exchange(lease, tokens, 27, Match([], loaded=4))
    assert lease.released and (len(other.blocks), other.cached_tokens) == (7, 0)
    kv.check()
    for one in (rest, others):
        kv.release(one)
    behind = kv.exchange(other, tokens, 27, Match([], loaded=4))
    assert behind.cached_tokens == 16, "there is room now"
    kv.check()


@pytest.mark.parametrize("to_share", [None, 3])
def test_a_lease_that_is_promised_nothing_yet_costs_nothing(to_share: int | None) -> None:
    """Guards room that is kept for a fork, or a request that waits, before it is known what it may hold."""
    kv = _manager()
    lease = kv.promise(b"", 0, to_share=to_share)
    assert lease is not None and kv.available == BLOCKS and lease.charges == [0, 0]
    kv.check()
    assert kv.promise(b"", 0, spare=BLOCKS, to_share=to_share) is not None
    assert kv.promise(b"", 0, spare=BLOCKS + 1, to_share=to_share) is None


def test_a_fork_that_shares_nothing_is_charged_for_its_own() -> None:
    """Guards room that nobody uses: its own blocks, and the one that it copies beside its table."""
    kv = _manager()
    for to_share, charges in ((0, [3, 3]), (1, [4, 4])):
        fork = kv.promise(b"", 2, to_share=to_share)
        assert fork is not None and fork.charges == charges


def test_a_block_takes_the_place_of_the_one_numbered_before_it() -> None:
    """Guards two blocks of one content, of which nobody would find the newer: they are told apart by all of their
    numbers, neighbours too."""
    kv = KVCacheManager(8, SIZE, "m", groups=(LayerGroup((0,)), LayerGroup((1,), 5)), ahead_tokens=SIZE)
    tokens = list(range(SIZE))
    one, other = (_lease(kv, tokens, cached=False) for _ in range(2))
    for lease in (one, other):
        kv.reach(lease, 0, SIZE)
    assert other.windows[0][0] == one.windows[0][0] + 1
    kv.commit(one, tokens)
    kv.release(one)
    kv.commit(other, tokens)
    assert other.path[0].windows == [other.windows[0][0]]
    kv.check()
    kv.release(other)
    assert kv.pool.counts()["cached"] == 2 and kv.pool.free == 6


@pytest.mark.parametrize("groups", [GROUPS, GROUPS[:1]], ids=["windows", "all tokens"])
def test_what_is_only_promised_has_nothing_cached(groups: tuple[LayerGroup, ...]) -> None:
    """Guards what lands in a fork whose parent is gone: it is reserved from its first block on, and computed from its
    first token."""
    kv = KVCacheManager(BLOCKS, SIZE, "m", groups=groups, ahead_tokens=AHEAD)
    lease = kv.promise(b"", 3, to_share=1)
    assert lease is not None and lease.cached_tokens == 0
    kv.extend(lease, 10, migrating=True)
    assert len(lease.blocks) == 3
    kv.check()
    kv.landed(lease)
    kv.release(lease)
    kv.check()


def test_a_fork_that_was_promised_nothing_is_promised_nothing() -> None:
    """Guards room that a stash would keep from others: of a window that ends with its blocks it shares none."""
    kv = KVCacheManager(BLOCKS, SIZE, "m", groups=(LayerGroup((0,)), LayerGroup((1,), 1)), ahead_tokens=AHEAD)
    parent = _lease(kv, list(range(8)))
    _compute(kv, parent, list(range(8)))
    stash = kv.promise(b"", 0)
    assert stash is not None
    before = kv.available
    kv.fork(parent, stash, 8)
    assert kv.available == before and stash.charges == [0]
    kv.check()


class Kept:
    """Which blocks a request should have of each window, and what it should be charged."""

    def __init__(self, kv: KVCacheManager, lease: Lease, tokens: list[int]) -> None:
        self.kv, self.lease, self.tokens = kv, lease, tokens
        self.computed, self.migrating = lease.cached_tokens, False
        self.at = [set[int](), set[int]()]
        self.charges = [0, 0]

    def has(self, group: int, start: int, stop: int) -> None:
        self.at[group] |= set(range(start, stop))

    def lacks(self, group: int, start: int, stop: int) -> None:
        self.at[group] -= set(range(start, stop))

    def charged(self, blocks: int) -> list[int]:
        return [min(blocks, most) for most in MOST]

    @property
    def room(self) -> int:
        return len(self.lease.blocks) + self.lease.promised


def _first(position: int, window: int) -> int:
    """Return the block of the first token that a query at `position` sees."""
    return max(0, position - window + 1) // SIZE


def _kept_from(tokens: int, window: int) -> int:
    """Return the first block that is kept: the last token may be computed again, or all behind the last whole block."""
    return min(_first(max(0, tokens - 1), window), _first(tokens // SIZE * SIZE, window))


class Windows:
    """A random run; what each step should do to tables and charges is written down beside it."""

    def __init__(self, seed: int) -> None:
        self.random, self.kv = Random(seed), _manager()
        self.live: list[Kept] = []

    def acquire(self) -> None:
        random, kv = self.random, self.kv
        tokens = [random.choice((0, 0, 0, 1)) for _ in range(random.randint(1, 30))]
        if self.live and random.random() < 0.6:
            other = random.choice(self.live)
            tokens = [*other.tokens[: random.randint(1, len(other.tokens))], *tokens][:40]
        grow, migrating = random.randint(0, 12), random.random() < 0.4
        limit, room = len(tokens) - 1, len(tokens) + grow
        lease = kv.acquire(
            b"", tokens, match_limit=limit, room_tokens=len(tokens), grow_tokens=room, migrating=migrating
        )
        if lease is None:
            return
        kept, here, last = Kept(kv, lease, tokens), len(lease.path), -(-len(tokens) // SIZE)
        kept.charges, kept.migrating = kept.charged(-(-room // SIZE)), migrating
        for group, window in enumerate(WINDOWS):
            first = min(here, _first(lease.cached_tokens, window))
            kept.has(group, first, here + bool(lease.copies))
            if migrating:
                kept.has(group, max(here, _first(len(tokens) - 1, window)), last)
                tail = min(-(-room // SIZE) - here, -(-(window - 1) // SIZE) + 1)
                kept.charges[group] = max(kept.charges[group], here - first + tail)
        self.live.append(kept)

    def compute(self, kept: Kept) -> None:
        kv, lease = self.kv, kept.lease
        if kept.migrating:
            kv.landed(lease)
            kept.migrating, kept.charges = False, kept.charged(kept.room)
            if self.random.random() < 0.5:
                kept.computed = end = len(kept.tokens)
                kv.commit(lease, kept.tokens)
                kv.slide(lease, end)
                for group, window in enumerate(WINDOWS):
                    kept.lacks(group, 0, _kept_from(end, window))
            else:
                kv.restart(lease, kept.computed)
                for group in (0, 1):
                    kept.lacks(group, -(-kept.computed // SIZE), len(lease.blocks))
            return
        kv.copied(lease)
        if kept.computed == len(kept.tokens):
            if len(kept.tokens) >= kept.room * SIZE:
                return
            kept.tokens.append(self.random.choice((0, 1)))
            kv.extend(lease, len(kept.tokens))
        start, end = kept.computed, min(len(kept.tokens), kept.computed + self.random.randint(1, AHEAD))
        kv.reach(lease, start, end)
        kept.computed = end
        for group in (0, 1):
            kept.has(group, start // SIZE, -(-end // SIZE))
        self.same()
        if self.random.random() < 0.8:
            kv.commit(lease, kept.tokens[:end])
        kv.slide(lease, end)
        for group, window in enumerate(WINDOWS):
            kept.lacks(group, 0, _kept_from(end, window))

    def grow(self, kept: Kept) -> None:
        blocks = self.random.randint(0, 3)
        if self.kv.grow(kept.lease, blocks) and blocks:
            more = kept.charged(kept.room)
            kept.charges = [max(pair) for pair in zip(kept.charges, more, strict=True)]

    def fork(self, parent: Kept) -> None:
        at = parent.computed - self.random.randint(0, 2)
        if parent.migrating or parent.lease.copies or at < 1 or at // SIZE > len(parent.lease.path):
            return
        seen = [set(range(_first(at, window), -(-at // SIZE))) for window in WINDOWS]
        can_fork = all(blocks <= has for blocks, has in zip(seen, parent.at, strict=True))
        assert self.kv.can_fork(parent.lease, at) == can_fork
        blocks = self.random.randint(1, 3)
        lease = self.kv.promise(b"", blocks, to_share=at // SIZE) if can_fork else None
        if lease is None:
            return
        charged = Kept(self.kv, lease, []).charged(blocks + at // SIZE)
        assert lease.charges == [charge + 1 for charge in charged], "and the boundary block that it copies"
        self.kv.fork(parent.lease, lease, at)
        kept = Kept(self.kv, lease, parent.tokens[:at])
        kept.charges, kept.at = charged, seen
        self.live.append(kept)

    def adopt(self, kept: Kept) -> None:
        lease = kept.lease
        if kept.migrating or lease.copies or kept.computed != len(lease.path) * SIZE:
            return
        before = len(lease.path)
        self.kv.adopt(lease, kept.tokens[:-1])
        if (here := len(lease.path)) > before:
            kept.computed = here * SIZE
            for group, window in enumerate(WINDOWS):
                kept.lacks(group, 0, here)
                kept.has(group, _first(kept.computed, window), here)

    def finish(self, kept: Kept) -> None:
        self.live.remove(kept)
        if not kept.migrating and not kept.lease.copies:
            self.kv.commit(kept.lease, kept.tokens[: kept.computed], tail=self.random.random() < 0.5)
        self.kv.release(kept.lease)

    def step(self) -> None:
        steps = [*6 * [self.compute], self.grow, self.fork, self.adopt, self.finish]
        if not self.live or self.random.random() < 0.2:
            self.acquire()
        else:
            self.random.choice(steps)(self.random.choice(self.live))

    def same(self) -> None:
        kv, holders = self.kv, Counter[BlockId]()
        owed = sum(kept.lease.promised for kept in self.live)
        for kept in self.live:
            assert [set(held) for held in _held(kept.lease)] == kept.at
            assert kept.lease.charges == kept.charges
            for charge, has, table in zip(kept.charges, kept.at, kept.lease.windows, strict=True):
                owed += max(0, charge - len(has))
                holders.update(table[at] for at in has)
            holders.update(source for source, _ in kept.lease.copies[1:])
        doubled = holders.total() - len(holders)
        counts = kv.pool.counts()
        assert kv.available == counts["free"] + counts["cached"] - owed - doubled
        kv.check()


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_steps_holds_and_charges_what_it_should(seed: int) -> None:
    """Guards every table and charge: a block that is kept too long or for too short, or promised and never had."""
    run = Windows(seed)
    for _ in range(150):
        run.step()
        run.same()
    for kept in run.live:
        run.kv.release(kept.lease)
    assert run.kv.available == BLOCKS


@pytest.mark.parametrize(("has", "found"), [(True, 10), (False, 8)])
def test_a_boundary_block_is_found_where_its_own_windows_are_there(has: bool, found: int) -> None:
    """Guards a copy of a block that is gone, and one that is not made although all is there: behind ten tokens a window
    of five sees two blocks, the boundary block among them."""
    kv = KVCacheManager(BLOCKS, SIZE, "m", groups=(LayerGroup((0,)), LayerGroup((1,), 5)), ahead_tokens=AHEAD)
    tokens = list(range(12))
    kv.release(_compute(kv, _lease(kv, tokens, cached=False), tokens))
    nodes = kv.cache.longest(b"", tokens, 12).nodes
    for node, keeps in zip(nodes, (False, True, has), strict=True):
        assert node.windows is not None
        if not keeps and node.windows[0] != GONE:
            block = node.windows[0]
            kv.cache.unbind(node, 0)
            assert kv.windows is not None
            kv.windows._worth.discard(block)
            kv._free(block)
    assert kv.matched_tokens(b"", [*tokens[:10], 77, 78], 11) == found
    kv.check()


def test_of_a_window_that_is_let_go_the_tail_goes_first() -> None:
    """Guards the order of eviction: without what is before it, the last block of a window is worth nothing."""
    kv, tokens = _manager(), list(range(16))
    lease = _compute(kv, _lease(kv, tokens, cached=False), tokens)
    tables = [[block for block in reversed(table) if block != GONE] for table in lease.windows]
    assert all(len(table) > 1 for table in tables)
    kv.release(lease)
    ((_, line),) = kv.cache.shares.lines()
    for table in tables:
        assert [block for block in line if block in table] == table


def test_a_tenant_beyond_its_share_gives_no_more_than_it_has() -> None:
    """Guards the engine against a KeyError: with a block that a tenant gives go those of its windows, so fewer are left
    to give than were counted before."""
    kv = KVCacheManager(64, 4, "m", groups=(LayerGroup((0, 1)), LayerGroup((2, 3), 9)), ahead_tokens=8)
    kv.entitle(b"tenant", 0.25)
    tokens = list(range(100, 120))
    first = kv.acquire(b"tenant", tokens, match_limit=0, room_tokens=20, grow_tokens=20)
    assert first is not None
    kv.reach(first, 0, 20)
    kv.copied(first)
    kv.commit(first, tokens)
    kv.slide(first, 20)
    kv.release(first)
    kv.check()
    idle = kv.cache.idle
    second = kv.acquire(b"tenant", [], match_limit=0, room_tokens=60, grow_tokens=60)
    kv.check()
    assert second is not None and kv.cache.idle < idle, "it had to give some"

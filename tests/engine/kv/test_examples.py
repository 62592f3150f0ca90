"""The worked examples of the literature on paged KV memory and prefix trees, each with the figures it was published
with: PagedAttention (Kwon et al. 2023), RadixAttention (Zheng et al. 2024). Each part alone is in test_block_pool.py,
test_radix_cache.py and test_manager.py."""

import pytest

from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.kv.block_pool import BlockState
from engine.kv.manager import KVCacheManager, Lease
from engine.types import BlockId


def _lease(kv: KVCacheManager, tokens: list[int]) -> Lease:
    lease = kv.acquire(b"", tokens, match_limit=len(tokens) - 1, room_tokens=len(tokens))
    assert lease is not None
    return lease


def _compute(kv: KVCacheManager, tokens: list[int]) -> Lease:
    lease = _lease(kv, tokens)
    kv.copied(lease)
    kv.commit(lease, tokens, tail=True)
    return lease


def _finish(kv: KVCacheManager, tokens: list[int]) -> int:
    """A request from start to end; returns how many of its tokens were computed."""
    lease = _compute(kv, tokens)
    kv.release(lease)
    if len(kv.cache) < 100:
        kv.check()
    return len(tokens) - lease.cached_tokens


def _slots(blocks: list[int], positions: list[int], block_size: int) -> list[tuple[int, int]]:
    """(block, offset) of positions, as a step resolves them."""
    slots = []
    for position in positions:
        piece = trial_row([0] * (position + 1), position, [BlockId(b) for b in blocks])
        (slot,) = ForwardBatch.build([piece], block_size).slots.tolist()
        slots.append(divmod(slot, block_size))
    return slots


def test_five_tokens_take_two_blocks_of_four_and_freeing_them_leaves_nineteen_of_twenty() -> None:
    kv = KVCacheManager(20, 4, "m")
    a, b = _lease(kv, [1, 2, 3, 4, 5]), _lease(kv, [6, 7, 8])
    assert (len(a.blocks), len(b.blocks)) == (2, 1)
    resolved = _slots(list(a.blocks), list(range(5)), 4)
    assert [offset for _, offset in resolved] == [0, 1, 2, 3, 0]
    assert [block for block, _ in resolved] == [a.blocks[0]] * 4 + [a.blocks[1]]
    kv.release(a)
    assert kv.pool.free == 19


def test_a_block_table_resolves_positions() -> None:
    resolved = _slots([19, 18, 5], [0, 3, 4, 8, 10], 4)
    assert resolved == [(19, 0), (19, 3), (18, 0), (5, 0), (5, 2)]


@pytest.mark.parametrize(("tokens", "slots"), [(505, 512), (1000, 1008), (4096, 4096)])
def test_lengths_are_rounded_up_to_whole_blocks(tokens: int, slots: int) -> None:
    assert KVCacheManager(1, 16, "m").blocks_for(tokens) * 16 == slots


def test_a_batch_holds_what_its_members_need_and_nothing_of_those_who_left() -> None:
    """{48, 5} hold four blocks of 16, and three once the 48 leaves and a 30 joins."""
    kv = KVCacheManager(8, 16, "m")
    long, _ = _lease(kv, list(range(48))), _lease(kv, list(range(100, 105)))
    assert kv.pool.counts()["active"] == 4
    kv.release(long)
    _lease(kv, list(range(200, 230)))
    assert kv.pool.counts()["active"] == 3


def test_a_hundred_requests_over_one_prefix_keep_63_blocks_instead_of_6300() -> None:
    """While they run: whoever has computed what is there already gives its own block up for that."""
    kv = KVCacheManager(200, 16, "m")
    prefix = list(range(1000))
    first = _compute(kv, prefix)
    leases = [_compute(kv, prefix) for _ in range(99)]
    assert sum(len(lease.blocks) for lease in [first, *leases]) == 6300
    assert kv.pool.counts()["active"] == 63
    for lease in [first, *leases]:
        kv.release(lease)
    assert kv.pool.counts() == dict(free=137, cached=63, active=0, reserved=0, quarantined=0)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_six_token_prompt_that_matches_four_computes_two(block_size: int) -> None:
    kv = KVCacheManager(16, block_size, "m")
    _finish(kv, [1, 2, 3, 4, 9, 9])
    assert _finish(kv, [1, 2, 3, 4, 5, 6]) == 2


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_full_match_still_computes_one(block_size: int) -> None:
    kv = KVCacheManager(16, block_size, "m")
    _finish(kv, [1, 2, 3, 4])
    assert _finish(kv, [1, 2, 3, 4]) == 1


def test_a_shared_prefix_outlives_its_fifty_branches() -> None:
    """Guards eviction by age alone: the prefix is as old as its oldest branch, and still goes last."""
    kv = KVCacheManager(54, 4, "m")
    prefix = list(range(16))
    for child in range(50):
        _finish(kv, [*prefix, 100 + child, 0, 0, 0])
    assert kv.pool.counts()["cached"] == 54
    for child in range(50):
        lease = kv.acquire(b"x", [child], match_limit=0, room_tokens=4 * (child + 1))
        assert lease is not None and kv.matched_tokens(b"", prefix, 16) == 16, child
        kv.release(lease)
    assert len(kv.cache) == 4
    assert kv.acquire(b"x", [0], match_limit=0, room_tokens=51 * 4) is not None
    assert kv.matched_tokens(b"", prefix, 16) == 12, "and then from its end"


def test_i_like_to_eat_shares_one_block_and_copies_three_tokens() -> None:
    i_like_to_eat, cheese_cake_and = [1, 2, 3, 4], [5, 6, 7]
    coffee, tea = 8, 9
    kv = KVCacheManager(16, 4, "m")
    _finish(kv, [*i_like_to_eat, *cheese_cake_and, coffee])
    lease = _lease(kv, [*i_like_to_eat, *cheese_cake_and, tea])
    assert lease.cached_tokens == 7 and len(lease.copies) == 1
    assert kv.pool.refs(lease.blocks[0]) == 1 and kv.cache.holds(lease.blocks[0])
    assert lease.copies[0][1] == lease.blocks[1] and not kv.cache.holds(lease.blocks[1])


def test_the_same_words_after_different_text_are_never_shared() -> None:
    """Guards a cache keyed by a block's tokens alone: KV depends on all that came before."""
    kv = KVCacheManager(16, 4, "m")
    _finish(kv, [1, 2, 3, 4, 7, 7, 7, 7])
    other = _lease(kv, [5, 2, 3, 4, 7, 7, 7, 7])
    assert other.cached_tokens == 0 and not other.copies
    kv.release(other)
    assert _finish(kv, [5, 2, 3, 4, 7, 7, 7, 7]) == 8


@pytest.mark.parametrize("shared", range(1, 36))
def test_shared_tokens_are_never_computed_again(shared: int) -> None:
    """Guards reuse rounded down to blocks: 17 shared tokens at block size 16 compute none of the 17 again."""
    kv = KVCacheManager(16, 16, "m")
    _finish(kv, list(range(40)))
    assert _finish(kv, [*range(shared), *range(100, 110)]) == 10
    assert _finish(kv, list(range(shared))) == 1, "but always the last prompt token"


def test_the_longest_of_many_siblings_is_found() -> None:
    """Guards a bounded search: of 4,000 children with the same first tokens, the one that shares most is not lost."""
    kv = KVCacheManager(4100, 16, "m")
    system = list(range(16))
    for child in range(4000):
        high, low = divmod(child, 64)
        _finish(kv, [*system, 50, 51, 52, 53, high, low, *[child] * 10])
    for child in (0, 1, 63, 64, 1999, 3999):
        high, low = divmod(child, 64)
        prompt = [*system, 50, 51, 52, 53, high, low, *[child] * 5, 9999, 9999]
        assert kv.matched_tokens(b"", prompt, len(prompt)) == 27
        assert kv.matched_tokens(b"", [*system, 50, 51, 52, 53, high, 9999], 22) == 21
    kv.cache.check()


def test_a_freed_block_is_rescued_by_a_hit_until_it_is_recycled() -> None:
    kv = KVCacheManager(4, 4, "m")
    _finish(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    (first,) = kv.cache.match(b"", [1, 2, 3, 4], 4).nodes
    assert kv.pool.state(first.block) is BlockState.CACHED
    generation = kv.pool.generation(first.block)
    rescued = _lease(kv, [1, 2, 3, 4, 9])
    assert rescued.blocks[0] == first.block and kv.pool.state(first.block) is BlockState.ACTIVE
    assert kv.pool.generation(first.block) == generation, "rescued, not handed out anew"
    others = kv.acquire(b"x", [0], match_limit=0, room_tokens=8)
    assert others is not None and first.block not in others.blocks, "recycled while it is held"
    kv.release(others)
    kv.release(rescued)
    everything = kv.acquire(b"x", [0], match_limit=0, room_tokens=16)
    assert everything is not None and first.block in everything.blocks
    assert kv.matched_tokens(b"", [1, 2, 3, 4], 4) == 0
    assert kv.pool.generation(first.block) == generation + 1


def test_a_shorter_tail_gives_way_to_a_longer_one_unless_it_is_used() -> None:
    kv = KVCacheManager(3, 4, "m")
    _finish(kv, [1, 2])
    _finish(kv, [9])
    _finish(kv, [1, 2, 3])
    assert kv.pool.counts()["cached"] == 3
    lease = kv.acquire(b"x", [0], match_limit=0, room_tokens=4)
    assert lease is not None
    assert kv.matched_tokens(b"", [9], 1) == 1, "the shorter tail went, although [9] is older than the longer"
    assert kv.matched_tokens(b"", [1, 2, 3], 3) == 3


def test_a_tail_that_a_longer_block_begins_with_takes_no_block() -> None:
    """Guards a cache that fills with beginnings of what it already has."""
    kv = KVCacheManager(8, 4, "m")
    _finish(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    assert _finish(kv, [1, 2, 3, 4, 5, 6]) == 1
    assert kv.pool.counts()["cached"] == 2


def test_namespaces_that_hold_nothing_leave_nothing() -> None:
    """Guards a table that grows with every tenant that ever asked."""
    kv = KVCacheManager(4, 4, "m")
    for tenant in range(100):
        name = tenant.to_bytes(2, "little")
        assert kv.matched_tokens(name, [1, 2, 3], 3) == 0
        lease = kv.acquire(name, [1, 2, 3], match_limit=2, room_tokens=3)
        assert lease is not None
        kv.commit(lease, [1, 2, 3], tail=True)
        kv.release(lease)
        kv.check()
    assert len(kv.cache._roots) == 4


def test_two_that_begin_in_an_empty_namespace_share_one_tree() -> None:
    """Guards a lease that keeps a root of its own: both were acquired before there was any."""
    kv = KVCacheManager(12, 4, "m")
    one, two = _lease(kv, [1, 2, 3, 4, 5]), _lease(kv, [1, 2, 3, 4, 6])
    kv.commit(one, [1, 2, 3, 4, 5], tail=True)
    kv.release(one)
    big = kv.acquire(b"x", [0], match_limit=0, room_tokens=40)
    assert big is not None and len(kv.cache) == 0, "the first one's tree is gone again"
    kv.commit(two, [1, 2, 3, 4, 6], tail=True)
    kv.check()
    assert kv.matched_tokens(b"", [1, 2, 3, 4, 6], 5) == 5

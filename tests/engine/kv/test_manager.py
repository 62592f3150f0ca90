"""Leases on blocks, by example. The parts that a lease is made of are in test_block_pool.py and test_radix_cache.py,
random requests over all of them in test_machine.py, what is admitted in test_admission.py."""

import pytest

from engine.identity import chain, extend
from engine.kv.block_pool import BlockState
from engine.kv.ledger import BlockLedger
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tiers.tiers import Tiers


def _run(kv: KVCacheManager, tokens: list[int], grow: int = 0, tail: bool = True) -> Lease:
    """A request that computes all its tokens and commits them."""
    lease = kv.acquire(b"", tokens, match_limit=len(tokens) - 1, room_tokens=len(tokens), grow_tokens=grow)
    assert lease is not None
    kv.commit(lease, tokens, tail=tail)
    kv.check()
    return lease


def test_reuse_is_exact_to_the_token() -> None:
    """Guards the boundary block: two prompts that share 17 tokens reuse 17, by copy, and never write a shared block."""
    kv = KVCacheManager(16, 16, "m")
    kv.release(_run(kv, list(range(40))))
    other = [*range(17), *range(100, 120)]
    lease = kv.acquire(b"", other, match_limit=len(other) - 1, room_tokens=len(other))
    assert lease is not None and lease.cached_tokens == 17
    ((source, target),) = lease.copies
    assert target == lease.blocks[1] != source
    assert kv.pool.refs(source) == 1 and kv.pool.refs(lease.blocks[0]) == 1
    kv.copied(lease)
    assert kv.pool.state(source) is BlockState.CACHED
    kv.release(lease)
    kv.check()


def test_a_copy_that_was_not_made_is_not_indexed() -> None:
    """Guards against a boundary block in the cache that nobody has written: its lease ended before its first step."""
    kv = KVCacheManager(16, 16, "m")
    kv.release(_run(kv, list(range(40))))
    other = [*range(17), *range(100, 120)]
    lease = kv.acquire(b"", other, match_limit=len(other) - 1, room_tokens=len(other))
    assert lease is not None and lease.copies
    kv.commit(lease, other[:17], tail=True)
    kv.commit(lease, other)
    assert kv.matched_tokens(b"", other, 37) == 17, "nor is what stands behind it"
    kv.release(lease)
    kv.check()
    assert kv.matched_tokens(b"", [*other[:17], 1, 2], 19) == 17, "the block it was to be copied from"
    assert kv.pool.counts()["cached"] == 3 and kv.pool.free == 13


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    kv = KVCacheManager(8, 16, "m")
    kv.release(_run(kv, list(range(32))))
    lease = kv.acquire(b"", list(range(32)), match_limit=31, room_tokens=32)
    assert lease is not None and lease.cached_tokens == 31 and len(lease.copies) == 1
    kv.release(lease)
    kv.check()


def test_a_migrating_lease_reuses_whole_blocks_and_reserves_the_rest() -> None:
    kv = KVCacheManager(8, 16, "m")
    kv.release(_run(kv, list(range(40))))
    lease = kv.acquire(b"", list(range(60)), match_limit=59, room_tokens=60, migrating=True)
    assert lease is not None and lease.cached_tokens == 32 and not lease.copies
    assert kv.pool.counts()["reserved"] == 2
    kv.landed(lease)
    assert kv.pool.counts()["reserved"] == 0
    kv.release(lease)
    kv.check()


def test_promised_room_cannot_be_taken_by_others() -> None:
    """Guards the deadlock of a batch that was admitted and then cannot grow."""
    kv = KVCacheManager(8, 16, "m")
    first = kv.acquire(b"", list(range(16)), match_limit=15, room_tokens=16, grow_tokens=16 * 6)
    assert first is not None and kv.available == 2
    assert kv.acquire(b"", list(range(50, 98)), match_limit=47, room_tokens=48) is None
    second = _run(kv, list(range(50, 80)))
    kv.release(second)
    kv.extend(first, 16 * 6)
    assert len(first.blocks) == 6
    with pytest.raises(ValueError, match="promised"):
        kv.extend(first, 16 * 7)
    kv.release(first)
    assert first.promised == 0
    kv.check()


def test_the_least_recently_used_tail_goes_first() -> None:
    kv = KVCacheManager(4, 4, "m")
    kv.release(_run(kv, [1, 2, 3, 4, 5, 6, 7, 8]))
    kv.release(_run(kv, [9, 9, 9, 9, 8, 8, 8, 8]))
    kv.release(_run(kv, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert len(kv.take_evicted()) == 1
    assert kv.matched_tokens(b"", [9] * 4 + [8] * 4, 8) == 4
    assert kv.matched_tokens(b"", [1, 2, 3, 4, 5, 6, 7, 8], 8) == 8


def test_namespaces_never_share() -> None:
    kv = KVCacheManager(8, 4, "m")
    kv.release(_run(kv, [1, 2, 3, 4, 5]))
    assert kv.matched_tokens(b"other", [1, 2, 3, 4, 5], 5) == 0
    assert kv.matched_tokens(b"", [1, 2, 3, 4, 5], 5) == 5


def test_two_that_compute_the_same_keep_the_tree_sound() -> None:
    """Guards an indexed child under a parent nobody holds: the second's own copy of block 0 is a duplicate."""
    kv = KVCacheManager(12, 4, "m")
    tokens = list(range(12))
    leases = [kv.acquire(b"", tokens, match_limit=11, room_tokens=12) for _ in range(2)]
    first, second = (lease for lease in leases if lease is not None)
    kv.commit(first, tokens[:4])
    kv.release(first)
    kv.commit(second, tokens)
    kv.check()
    kv.release(_run(kv, list(range(100, 132))))
    kv.check()
    kv.release(second)
    kv.check()


def _fork(kv: KVCacheManager, parent: Lease, tokens: int, total_blocks: int) -> Lease:
    fork = kv.promise(b"", total_blocks - tokens // kv.block_size)
    assert fork is not None
    kv.fork(parent, fork, tokens)
    kv.check()
    return fork


def test_forks_share_whole_blocks_and_copy_the_boundary() -> None:
    """Guards the sharing of parallel samples: a fork costs its boundary block, and its source lives until the copy."""
    kv = KVCacheManager(16, 4, "m")
    parent = _run(kv, list(range(10)), grow=14, tail=False)
    forks = [_fork(kv, parent, 9, 4) for _ in range(3)]
    assert kv.pool.counts()["active"] == 3 + 3
    assert all(kv.pool.refs(block) == 4 for block in parent.blocks[:2])
    assert all(fork.blocks[:2] == parent.blocks[:2] for fork in forks)
    boundary = parent.blocks[2]
    assert [fork.copies for fork in forks] == [[(boundary, fork.blocks[2])] for fork in forks]
    assert [fork.cached_tokens for fork in forks] == [9, 9, 9]
    kv.release(parent)
    assert kv.pool.state(boundary) is BlockState.ACTIVE, "the source of a copy to come was freed"
    for fork in forks:
        kv.copied(fork)
    assert kv.pool.state(boundary) is BlockState.FREE
    again = _fork(kv, forks[0], 8, 4)
    assert again.blocks == forks[0].blocks[:2] and not again.copies, "a fork of a fork shares too"
    for lease in (forks[1], again, forks[0], forks[2]):
        kv.release(lease)
        kv.check()
    assert kv.pool.counts()["active"] == 0 and kv.available == 16


def test_a_fork_of_a_fork_that_awaits_its_copy_copies_from_the_same_block() -> None:
    """Guards against a blank block: were the first fork's own the source, and it ended before its copy was made, the
    second would copy what was never written."""
    kv = KVCacheManager(16, 4, "m")
    parent = _run(kv, list(range(10)), grow=14, tail=False)
    first = _fork(kv, parent, 9, 4)
    second = _fork(kv, first, 9, 4)
    assert second.copies == [(parent.blocks[2], second.blocks[2])]
    boundary = parent.blocks[2]
    kv.release(parent)
    kv.release(first)
    assert kv.pool.state(boundary) is BlockState.ACTIVE, "the source of a copy to come was freed"
    kv.copied(second)
    kv.release(second)
    kv.check()
    assert kv.pool.counts()["active"] == 0


def test_only_committed_blocks_are_forked() -> None:
    """Guards the path of a shared block: indexed after the fork, under a node of another block that the parent alone
    holds, it would outlive its parent node in the line of eviction."""
    kv = KVCacheManager(16, 4, "m")
    tokens = list(range(10))
    lease = kv.acquire(b"", tokens, match_limit=9, room_tokens=10)
    fork = kv.promise(b"", 1)
    assert lease is not None and fork is not None
    with pytest.raises(ValueError, match="2 whole blocks to fork, 0 committed"):
        kv.fork(lease, fork, 9)
    kv.commit(lease, tokens)
    kv.fork(lease, fork, 9)
    kv.release(lease)
    kv.check()


def test_a_fork_needs_a_promise_and_an_empty_lease() -> None:
    kv = KVCacheManager(4, 4, "m")
    parent = _run(kv, list(range(10)), tail=False)
    assert kv.promise(b"", 2) is None, "more is promised than there is"
    fork = kv.promise(b"", 1)
    assert fork is not None and kv.available == 0
    with pytest.raises(ValueError, match="cannot be forked"):
        kv.fork(parent, fork, 13)
    kv.fork(parent, fork, 9)
    with pytest.raises(ValueError, match="only an empty lease"):
        kv.fork(parent, fork, 9)
    kv.release(fork)
    other = kv.promise(b"tenant", 1)
    assert other is not None
    with pytest.raises(ValueError, match="same namespace"):
        kv.fork(parent, other, 9)
    kv.release(other)
    kv.release(parent)
    kv.check()


def test_two_that_compute_the_same_keep_one_block_of_each() -> None:
    """Guards admission: whoever holds its own blocks and another one's of the same content holds more than was counted
    for it, and alone in the pool it may not be able to finish."""
    kv = KVCacheManager(8, 4, "m")
    tokens = list(range(10))
    leases = [kv.acquire(b"", tokens, match_limit=9, room_tokens=10) for _ in range(2)]
    for lease in leases:
        assert lease is not None
        kv.commit(lease, tokens)
    first, second = leases
    assert first is not None and second is not None
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]
    assert kv.pool.counts()["active"] == 4 and kv.available == 4
    kv.release(first)
    assert kv.pool.counts()["active"] == 3
    kv.check()
    kv.release(second)
    assert kv.available == 8
    kv.check()


def test_quarantine_shows_what_one_lease_alone_holds_and_keeps_it_held() -> None:
    """Guards blocks that a peer may still read: they are nobody's until the lease is let go, and those of others go
    on."""
    kv = KVCacheManager(8, 4, "m")
    prefix = [1, 1, 1, 1]
    first = _run(kv, [*prefix, 2, 2, 2, 2])
    second = _run(kv, [*prefix, 3, 3, 3, 3, 4])
    kv.quarantine(second)
    states = [kv.pool.state(block) for block in second.blocks]
    assert states == [BlockState.ACTIVE, BlockState.QUARANTINED, BlockState.QUARANTINED]
    assert kv.pool.state(first.blocks[1]) is BlockState.ACTIVE
    assert kv.acquire(b"", [5] * 24, match_limit=0, room_tokens=24) is None, "four are free"
    kv.release(second)
    assert kv.pool.counts()["quarantined"] == 0
    assert kv.acquire(b"", [5] * 24, match_limit=0, room_tokens=24) is not None
    kv.check()


def test_a_fork_without_room_for_its_boundary_block_changes_nothing() -> None:
    """Guards blocks that a child would hold although it was refused."""
    kv = KVCacheManager(16, 4, "m")
    parent, child = _run(kv, list(range(10)), tail=False), kv.promise(b"", 0)
    assert child is not None
    with pytest.raises(ValueError, match="9 tokens cannot be forked"):
        kv.fork(parent, child, 9)
    assert not child.blocks and kv.pool.refs(parent.blocks[0]) == 1
    kv.fork(parent, child, 8)
    assert child.blocks == parent.blocks[:2]
    kv.check()


def test_room_for_what_is_to_land_is_reserved() -> None:
    kv = KVCacheManager(8, 4, "m")
    lease = kv.acquire(b"", [1, 2, 3], match_limit=2, room_tokens=3, grow_tokens=12, migrating=True)
    assert lease is not None
    kv.extend(lease, 12, migrating=True)
    assert kv.pool.counts()["reserved"] == 3 and not lease.promised
    kv.landed(lease)
    assert kv.pool.counts()["active"] == 3


def test_no_more_is_promised_than_there_is() -> None:
    """Guards the deadlock of a batch that cannot grow: what one is promised, nobody else has."""
    kv = KVCacheManager(4, 4, "m")
    lease = kv.promise(b"", 1)
    assert lease is not None
    assert not kv.grow(lease, 4) and (lease.promised, kv.available) == (1, 3)
    assert kv.grow(lease, 3) and (lease.promised, kv.available) == (4, 0)
    assert not kv.grow(lease, 1)
    kv.check()


def test_leases_are_told_by_age_and_not_by_address() -> None:
    """Guards the simulator's promise that a seed is one run: what a worker tells a router that attaches follows this
    order, and was once that of addresses in memory."""
    kv = KVCacheManager(64, 4, "model")
    leases = [kv.acquire(b"", [number], match_limit=0, room_tokens=4) for number in range(60)]
    for lease in leases[::3]:
        assert lease is not None
        kv.release(lease)
    assert list(kv.leases()) == [lease for at, lease in enumerate(leases) if at % 3]


def test_what_comes_into_the_cache_is_told_once_below_what_was_there() -> None:
    """Guards what other routers learn of a request: the new whole blocks alone, each run below its parent; and the
    worker of one router against a list that nobody takes."""
    kv = KVCacheManager(16, 4, "m")
    kv.release(_run(kv, list(range(4))))
    assert kv.take_cached() == [], "nobody has asked"
    kv.tells_cached = True
    first = chain(kv.cache.root_identity(b""), list(range(12)), 4)
    kv.release(_run(kv, list(range(14))))
    assert kv.take_cached() == [(first[0], first[1:])], "it was there, or is no whole block"
    assert kv.take_cached() == []
    kv.release(_run(kv, list(range(14))))
    assert kv.take_cached() == [], "told again"
    kv.release(_run(kv, [50, 51, 52, 53]))
    assert kv.take_cached() == [(b"", chain(kv.cache.root_identity(b""), [50, 51, 52, 53], 4))]


def test_a_lease_whose_step_is_under_way_keeps_its_blocks() -> None:
    """Guards a block that is handed out while a device still writes it for a request that has ended."""
    kv = KVCacheManager(4, 4, "m")
    tokens = list(range(10))
    lease = kv.acquire(b"", tokens, match_limit=0, room_tokens=10, grow_tokens=16)
    assert lease is not None
    kv.launched([lease])
    kv.commit(lease, tokens, tail=True)
    kv.release(lease)
    with pytest.raises(ValueError, match="released once"):
        kv.release(lease)
    assert kv.available == 1, "what it was promised is given back at once"
    assert kv.matched_tokens(b"", tokens, 10) == 8, "its tail may still be written"
    assert list(kv.leases()) == [lease]
    BlockLedger(kv).check()
    kv.ended([lease])
    assert kv.available == 4 and kv.matched_tokens(b"", tokens, 10) == 10
    assert not list(kv.leases())
    BlockLedger(kv).check()
    kv.check()


def test_blocks_are_held_until_the_last_of_two_steps_has_ended() -> None:
    kv = KVCacheManager(4, 4, "m")
    lease = kv.acquire(b"", [1, 2], match_limit=0, room_tokens=2)
    assert lease is not None
    kv.launched([lease])
    kv.launched([lease])
    kv.release(lease)
    kv.ended([lease])
    assert kv.available == 3
    kv.ended([lease])
    assert kv.available == 4


def test_a_block_that_gives_way_is_held_while_a_step_reads_it() -> None:
    """Guards a device that reads, by the table it was given, a block which another of the same content has replaced."""
    kv = KVCacheManager(8, 4, "m")
    tokens = [1, 2, 3, 4, 5]
    first, second = (kv.acquire(b"", tokens, match_limit=0, room_tokens=5) for _ in range(2))
    assert first is not None and second is not None
    own = second.blocks[0]
    kv.commit(first, tokens)
    kv.launched([second])
    kv.commit(second, tokens)
    assert second.blocks[0] == first.blocks[0] != own
    assert kv.pool.state(own) is BlockState.ACTIVE and kv.available == 8 - 4
    BlockLedger(kv).check()
    kv.ended([second])
    assert kv.pool.state(own) is BlockState.FREE
    BlockLedger(kv).check()
    kv.check()


def test_what_another_has_computed_is_adopted_behind_what_is_committed() -> None:
    """Guards blocks that are held once too often, or not at all, where a prompt takes over what it shares."""
    kv = KVCacheManager(16, 4, "m")
    tokens = list(range(14))
    first, second = (kv.acquire(b"", tokens, match_limit=0, room_tokens=14) for _ in range(2))
    assert first is not None and second is not None
    kv.commit(first, tokens[:12])
    kv.commit(second, tokens[:4])
    own = list(second.blocks)
    assert kv.adopt(second, tokens[:9]) == 8, "whole blocks of what it may share"
    assert second.blocks == [*first.blocks[:2], *own[2:]] and len(second.path) == 2
    assert [kv.pool.refs(block) for block in second.blocks] == [2, 2, 1, 1]
    assert kv.pool.state(own[1]) is BlockState.FREE
    BlockLedger(kv).check()
    assert kv.adopt(second, tokens[:12]) == 12, "the last of them is whole too"
    assert second.blocks == [*first.blocks[:3], own[3]]
    kv.release(first)
    kv.release(second)
    assert kv.available == 16
    kv.check()


def test_what_another_has_indexed_meanwhile_is_not_told_again() -> None:
    """Guards a router that is told a block twice, or what is new below the wrong parent: two computed the same head."""
    kv = KVCacheManager(16, 4, "m")
    kv.tells_cached = True
    short, long = list(range(8)), list(range(14))
    leases = [kv.acquire(b"", tokens, match_limit=0, room_tokens=len(tokens)) for tokens in (short, long)]
    first, second = (lease for lease in leases if lease is not None)
    names = chain(kv.cache.root_identity(b""), long, 4)
    kv.commit(first, short)
    assert kv.take_cached() == [(b"", names[:2])]
    kv.commit(second, long, tail=True)
    assert kv.take_cached() == [(names[1], names[2:3])]
    kv.release(first)
    kv.release(second)
    # The same again, where nobody holds the head any more: the newcomer's blocks take its place in the index.
    third = kv.acquire(b"", long[:12], match_limit=0, room_tokens=12)
    assert third is not None
    own = list(third.blocks)
    kv.commit(third, long[:12])
    assert kv.take_cached() == []
    assert third.blocks == own
    kv.release(third)
    kv.check()


def test_adopting_less_than_is_committed_changes_nothing() -> None:
    """Guards blocks of a prompt that are swapped against themselves, and let go once too often."""
    kv = KVCacheManager(16, 4, "m")
    tokens = list(range(14))
    lease = _run(kv, tokens, tail=False)
    before = list(lease.blocks), len(lease.path), kv.available
    for count in (3, 4, 8, 12, 14):
        assert kv.adopt(lease, tokens[:count]) == 12
        assert (list(lease.blocks), len(lease.path), kv.available) == before
    kv.release(lease)
    kv.check()


def test_what_went_below_is_known_by_what_stands_above_it() -> None:
    """Guards what a router is told of lower tiers: the latest last, each behind its parent, and nothing that is
    gone."""
    tiers = Tiers(3, 4096)
    kv = KVCacheManager(3, 4, "m", tiers)
    tokens = list(range(12))
    one, two, three = chain(kv.cache.root_identity(b""), tokens, 4)
    kv.release(_run(kv, tokens))
    assert kv.lower() == [] and kv.above(one) is None, "it is on the device"
    kv.release(_run(kv, list(range(50, 62))))
    tiers.take_commands()
    assert kv.lower() == [three, two, one]
    assert [kv.above(ident) for ident in (one, two, three)] == [b"", one, two]
    other = chain(kv.cache.root_identity(b""), list(range(50, 62)), 4)
    kv.release(_run(kv, list(range(80, 84))))
    assert kv.lower()[-1] == other[2] and kv.above(other[2]) == other[1]
    assert kv.above(three) is None, "the host tier has forgotten it"
    assert three in kv.take_evicted() and three not in kv.lower(), "it would be kept as long as the process lives"
    assert KVCacheManager(3, 4, "m").above(one) is None, "there is no tier"


@pytest.mark.parametrize("known", range(17))
def test_an_idle_pool_takes_what_fits_it_whatever_is_cached_of_it(known: int) -> None:
    """Guards a request that fills the pool against being refused since it would copy from a block that it needs."""
    kv = KVCacheManager(4, 4, "m")
    kv.release(_run(kv, list(range(16))))
    lease = kv.acquire(b"", [*range(known), *range(100, 116 - known)], match_limit=15, room_tokens=16)
    assert lease is not None and len(lease.blocks) == 4
    kv.check()


def test_what_left_the_tiers_and_is_on_the_device_is_not_gone() -> None:
    """Guards what a router is told: a prefix that was computed again would be thought to be nowhere."""
    tiers = Tiers(2, 4096)
    kv = KVCacheManager(4, 4, "m", tiers)
    first, other = list(range(8)), list(range(50, 66))
    names = set(chain(kv.cache.root_identity(b""), first, 4))
    for tokens in (first, other):
        kv.release(_run(kv, tokens))
        tiers.take_commands()
    assert names <= set(kv.lower()) and not kv.take_evicted()
    kv.release(_run(kv, first))
    tiers.take_commands()
    assert not any(name in tiers for name in names), "what was evicted for them has taken their places"
    assert not names & set(kv.take_evicted())
    kv.check()


def test_what_is_handed_out_is_told_once() -> None:
    """Guards the generations of blocks: a reader of a block that has another owner by now must be able to tell."""
    kv = KVCacheManager(4, 4, "m")
    lease = kv.acquire(b"", [1] * 7, match_limit=0, room_tokens=7)
    assert lease is not None and kv.take_handed_out() == lease.blocks and kv.take_handed_out() == []
    kv.release(lease)
    assert kv.take_handed_out() == []


def test_a_share_is_one_of_the_host_tier_too() -> None:
    """Guards a tenant whose prefixes many others push out of host memory: half of eight slots are its own."""
    tiers = Tiers(8, 4096)
    kv = KVCacheManager(8, 4, "m", tiers)
    kv.entitle(b"t", 0.5)
    for number, namespace in enumerate([b"t"] * 4 + [b"%d" % other for other in range(8)]):
        tokens = [100 * number + at for at in range(4)]
        lease = kv.acquire(namespace, tokens, match_limit=0, room_tokens=4)
        assert lease is not None
        kv.commit(lease, tokens)
        kv.release(lease)
        kv._evict(namespace)
        tiers.take_commands()
    root = kv.cache.root_identity(b"t")
    assert all(tiers.can_load(extend(root, [100 * n + at for at in range(4)])) for n in range(4))


def test_a_lease_that_has_more_than_is_asked_for_is_short_of_nothing() -> None:
    """Guards a row against being left out for want of blocks that its lease has, windows or none."""
    kv = KVCacheManager(4, 4, "m")
    lease = kv.acquire(b"", [1] * 9, match_limit=0, room_tokens=9)
    assert lease is not None
    kv.reach(lease, 0, 4)
    assert [kv.shortage(lease, tokens) for tokens in (1, 4, 9, 12, 13, 17)] == [0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("known", range(17))
def test_what_would_copy_from_a_block_that_it_needs_leaves_others_what_it_is_told_to(known: int) -> None:
    """Guards the promises of others, where the last block of all is the one that would be copied from."""
    kv = KVCacheManager(4, 4, "m")
    kv.release(_run(kv, list(range(16))))
    tokens = [*range(known), *range(100, 116 - known)]
    assert kv.acquire(b"", tokens, match_limit=15, room_tokens=16, spare=1) is None
    kv.check()
    assert kv.available == 4 and kv.acquire(b"", tokens, match_limit=15, room_tokens=12, spare=1) is not None
    kv.check()


def test_what_is_written_on_is_not_indexed_in_part_when_its_step_ends() -> None:
    """Guards a partly filled block in the cache whose next rows are being written: a tail is of what has ended."""
    kv, tokens = KVCacheManager(8, 4, "m"), list(range(11))
    lease = kv.acquire(b"", tokens, match_limit=0, room_tokens=11)
    assert lease is not None
    kv.launched([lease])
    kv.commit(lease, tokens[:6])
    kv.ended([lease])
    assert kv.matched_tokens(b"", tokens, 11) == 4
    kv.launched([lease])
    kv.commit(lease, tokens, tail=True)
    assert kv.matched_tokens(b"", tokens, 11) == 8, "nor before its step has ended"
    kv.ended([lease])
    assert kv.matched_tokens(b"", tokens, 11) == 11
    kv.release(lease)
    kv.check()


def test_what_comes_behind_several_blocks_is_told_below_the_last_of_them() -> None:
    """Guards the index of other routers, where a run below a block further up would be a chain that there is not."""
    kv, tokens = KVCacheManager(16, 4, "m"), list(range(24))
    kv.tells_cached = True
    names = chain(kv.cache.root_identity(b""), tokens, 4)
    lease = kv.acquire(b"", tokens, match_limit=0, room_tokens=24)
    assert lease is not None
    for end in (12, 24):
        kv.commit(lease, tokens[:end])
    assert kv.take_cached() == [(b"", names[:3]), (names[2], names[3:])]


@pytest.mark.parametrize(("others", "cached"), [(3, 6), (4, 6), (5, 4)])
def test_a_copy_is_made_as_long_as_its_source_need_not_give_way(others: int, cached: int) -> None:
    """Guards the tokens of a boundary block: they are copied where all blocks are taken by then, but for its source."""
    kv = KVCacheManager(8, 4, "m")
    kv.release(_run(kv, list(range(8))))
    held = kv.acquire(b"", [500], match_limit=0, room_tokens=4 * others)
    assert held is not None
    lease = kv.acquire(b"", [*range(6), *range(100, 106)], match_limit=11, room_tokens=12)
    assert lease is not None and lease.cached_tokens == cached
    kv.check()


def test_without_tiers_nothing_is_remembered_of_what_was_cached() -> None:
    """Guards memory: nobody asks for it, and nothing would ever take it away."""
    kv = KVCacheManager(4, 4, "m")
    for number in range(50):
        kv.release(_run(kv, [number] * 9))
    assert not kv._identities and not kv._above and not kv._below


def test_what_a_step_writes_on_is_held_once() -> None:
    """Guards blocks of new content, indexed while the next step is under way: each had a second holder until that step
    ended, as if it had come in another's place."""
    kv = KVCacheManager(8, 4, "m")
    lease = kv.acquire(b"", range(8), match_limit=7, room_tokens=8)
    assert lease is not None
    kv.launched([lease])
    kv.commit(lease, list(range(8)))
    assert [kv.pool.refs(block) for block in lease.blocks] == [1, 1] and not lease.displaced
    kv.ended([lease])
    assert [kv.pool.refs(block) for block in lease.blocks] == [1, 1]
    kv.release(lease)
    kv.check()
    assert kv.pool.counts()["cached"] == 2


def test_a_fork_of_a_block_that_is_not_committed_is_refused() -> None:
    """Guards the border: of two whole blocks the first alone is indexed, so only that can be shared."""
    kv = KVCacheManager(8, 4, "m")
    parent = kv.acquire(b"", range(9), match_limit=8, room_tokens=9)
    assert parent is not None
    kv.commit(parent, list(range(4)))
    child = kv.promise(b"", 2)
    assert child is not None
    with pytest.raises(ValueError, match="2 whole blocks to fork, 1 committed"):
        kv.fork(parent, child, 8)
    assert not child.blocks
    kv.fork(parent, child, 4)
    kv.check()

"""Who owns each block, recounted where its owners are: a pool whose counts add up is no proof."""

import pytest

from engine.kv.block_pool import BlockState
from engine.kv.ledger import BlockLedger, LedgerError
from engine.kv.manager import KVCacheManager, Lease


def taken(kv: KVCacheManager, first: int, tokens: int = 40) -> Lease:
    prompt = list(range(first, first + tokens))
    lease = kv.acquire(b"", prompt, match_limit=tokens - 1, room_tokens=tokens, grow_tokens=2 * tokens)
    assert lease is not None
    kv.copied(lease)
    kv.commit(lease, prompt)
    return lease


def test_leases_caches_copies_and_forks_add_up() -> None:
    """Guards against a recount that cries wolf: shared prefixes, copies to be made, forks, cached and free blocks."""
    kv = KVCacheManager(32, 16, "m")
    ledger = BlockLedger(kv)
    ledger.check()
    first = taken(kv, 0)
    second = taken(kv, 0)
    third = kv.acquire(b"", [*range(20), 500, 501], match_limit=21, room_tokens=22)
    assert third is not None and third.copies
    ledger.check()
    child = kv.promise(b"", 6)
    assert child is not None
    kv.fork(first, child, 40)
    ledger.check()
    for lease in (first, second, third, child):
        kv.release(lease)
        ledger.check()
    kv.quarantine(fourth := taken(kv, 100))
    ledger.check()
    kv.release(fourth)
    ledger.check()


def test_a_block_that_two_requests_own_is_found() -> None:
    """Guards the answer of whoever is overwritten: the pool's own counts add up all the while."""
    kv = KVCacheManager(32, 16, "m")
    first, second = taken(kv, 0), taken(kv, 100)
    second.blocks[-1] = first.blocks[-1]
    kv.check()
    told = rf"^1 leaked \(block \d+\) and 1 with two owners \(block {first.blocks[-1]}\)$"
    with pytest.raises(LedgerError, match=told):
        BlockLedger(kv).check()


def test_a_block_that_is_free_and_held_is_found() -> None:
    """Guards against the next request being handed a block that another one writes."""
    kv = KVCacheManager(32, 16, "m")
    lease = taken(kv, 0)
    kv.pool._free.insert(0, lease.blocks[-1])
    assert BlockLedger(kv).recount().doubly_owned == (lease.blocks[-1],)


def test_blocks_whose_lease_was_dropped_are_found() -> None:
    """Guards against a pool that shrinks by every request that some path forgets to release."""
    kv = KVCacheManager(32, 16, "m")
    lease = kv.acquire(b"", [1, 2, 3], match_limit=2, room_tokens=40)
    assert lease is not None
    lost = tuple(sorted(lease.blocks))
    del lease
    kv.check()
    assert BlockLedger(kv).recount().leaked == lost


def test_a_block_without_any_place_is_found() -> None:
    """Guards against a block that is counted as cached and indexed nowhere: no eviction ever finds it."""
    kv = KVCacheManager(4, 16, "m")
    (block,) = kv.pool.allocate(1)
    kv.pool.release(block, keep=True)
    assert kv.pool.state(block) is BlockState.CACHED
    assert BlockLedger(kv).recount().leaked == (block,)


def test_a_block_that_would_be_handed_out_twice_is_found() -> None:
    kv = KVCacheManager(4, 16, "m")
    kv.pool._free.append(kv.pool._free[0])
    assert BlockLedger(kv).recount().doubly_owned == (kv.pool._free[0],)


def test_a_block_that_is_not_free_and_would_be_handed_out_is_found() -> None:
    """Guards whoever holds it without a lease: the next request would write to it."""
    kv = KVCacheManager(4, 16, "m")
    (block,) = kv.pool.allocate(1)
    kv.pool._free.append(block)
    found = BlockLedger(kv).recount()
    assert (found.doubly_owned, found.leaked) == ((block,), ())


def test_a_block_that_is_free_and_still_indexed_is_found() -> None:
    """Guards whoever finds it in the cache: the next request would be handed it, and write to it."""
    kv = KVCacheManager(4, 16, "m")
    lease = taken(kv, 0, 16)
    (block,) = lease.blocks
    kv.release(lease)
    assert BlockLedger(kv).recount() == BlockLedger(KVCacheManager(4, 16, "m")).recount(), "as it should be"
    kv.pool.recycle(block)
    found = BlockLedger(kv).recount()
    assert (found.doubly_owned, found.leaked) == ((block,), ())


@pytest.mark.parametrize("is_held", [False, True])
def test_a_block_that_counts_a_holder_too_many_is_found(is_held: bool) -> None:
    """Guards a pool against blocks that are in the cache, or somebody's, and will never be let go."""
    kv = KVCacheManager(4, 16, "m")
    lease = taken(kv, 0, 16)
    (block,) = lease.blocks
    if not is_held:
        kv.release(lease)
    kv.pool.retain(block)
    found = BlockLedger(kv).recount()
    assert (found.doubly_owned, found.leaked) == ((), (block,))

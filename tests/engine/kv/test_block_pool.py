"""Block pool: the states of a block, its references and its generation. Random requests over pool, tree and leases are
in test_machine.py, the leases of the manager in test_manager.py, every fault of a handoff in tests/sim."""

import pytest

from engine.kv.block_pool import BlockPool, BlockState


def test_a_block_is_reused_only_after_its_last_holder() -> None:
    """Guards a block that two requests share: the first to end must not free it."""
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.retain(block)
    assert not pool.release(block, keep=False) and pool.state(block) is BlockState.ACTIVE
    assert pool.release(block, keep=False) and pool.state(block) is BlockState.FREE and pool.free == 2
    pool.check()


def test_many_blocks_are_shared_and_given_back_as_one_is() -> None:
    """Guards what goes through a long prompt at once: it says which blocks nobody else holds, and changes nothing of
    those."""
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.share(blocks[:2])
    assert [pool.refs(block) for block in blocks] == [2, 2, 1]
    assert pool.unshare(reversed(blocks)) == [blocks[2]] and [pool.refs(block) for block in blocks] == [1, 1, 1]
    assert pool.unshare(blocks) == blocks and pool.free == 1
    pool.quarantine(blocks[0])
    pool.share(blocks[:1])
    assert pool.state(blocks[0]) is BlockState.QUARANTINED and pool.refs(blocks[0]) == 2
    pool.check()
    (landing,) = pool.allocate(1, BlockState.RESERVED)
    assert pool.release(blocks[1], keep=True)
    assert not pool.release(blocks[0], keep=False) and pool.release(blocks[0], keep=False)
    for block in (landing, blocks[1], blocks[0]):
        with pytest.raises(ValueError, match="no holder to share it with"):
            pool.share([block])
    pool.check()


def test_a_cached_block_comes_back_or_is_recycled() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    assert pool.release(block, keep=True) and pool.state(block) is BlockState.CACHED and pool.free == 1
    pool.retain(block)
    assert pool.state(block) is BlockState.ACTIVE and pool.refs(block) == 1
    pool.release(block, keep=True)
    pool.recycle(block)
    assert pool.free == 2
    pool.check()


def test_only_an_allocation_begins_a_generation() -> None:
    """Guards readers in other processes: a block handed out anew must look different to them, a shared one must not."""
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release(block, keep=True)
    pool.retain(block)
    assert pool.generation(block) == 1
    pool.release(block, keep=False)
    assert pool.allocate(1) == [block] and pool.generation(block) == 2
    assert list(pool.generations) == [2, 0]


def test_quarantine_ends_with_the_last_release() -> None:
    """Guards a block that a peer still reads, and that somebody finds in the cache meanwhile."""
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.quarantine(block)
    pool.retain(block)
    pool.release(block, keep=True)
    assert pool.state(block) is BlockState.QUARANTINED and pool.free == 0
    pool.release(block, keep=True)
    assert pool.state(block) is BlockState.CACHED
    with pytest.raises(ValueError, match="held by nobody"):
        pool.quarantine(block)
    pool.check()


def test_an_illegal_move_of_a_block_is_refused() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1, BlockState.RESERVED)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.retain(block)
    pool.landed(block)
    with pytest.raises(ValueError, match="is active, not reserved"):
        pool.landed(block)
    with pytest.raises(ValueError, match="is active, not cached"):
        pool.recycle(block)
    pool.release(block, keep=False)
    with pytest.raises(ValueError, match="more often than it was held"):
        pool.release(block, keep=False)
    with pytest.raises(IndexError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.free == 2, "nothing was taken"
    assert pool.counts() == {"free": 2, "cached": 0, "active": 0, "reserved": 0, "quarantined": 0}


def test_a_pool_has_a_block_at_least() -> None:
    assert BlockPool(1).free == 1
    with pytest.raises(ValueError, match="at least one block, not 0"):
        BlockPool(0)


def test_blocks_are_counted_by_the_layer_group_that_holds_them() -> None:
    """Guards gauges that do not add up: a block that goes from one group to another, one that is cached and held again,
    one that waits in quarantine."""
    pool = BlockPool(4, groups=2)
    (first,), (second, third) = pool.allocate(1), pool.allocate(2, BlockState.RESERVED, 1)
    assert pool.held() == [1, 2] and [pool.group(block) for block in (first, second, third)] == [0, 1, 1]
    pool.release(first, keep=True)
    pool.quarantine(second)
    assert pool.held() == [0, 2]
    pool.retain(first)
    pool.release(third, keep=False)
    assert pool.held() == [1, 1]
    (again,) = pool.allocate(1)
    assert again == third and pool.held() == [2, 1]
    pool.check()
    pool._held = [1, 2]
    with pytest.raises(AssertionError):
        pool.check()


@pytest.mark.parametrize(("broken", "off"), [("leaked", -1), ("on the list twice", 1), ("free and held", 1)])
def test_a_recount_is_of_the_blocks_and_not_of_their_counts(broken: str, off: int) -> None:
    """Guards a figure that adds up whatever happened: the counts move in pairs, and so did the gauge made of them."""
    pool = BlockPool(6)
    first, second = pool.allocate(2)
    pool.release(first, keep=True)
    assert pool.recount() == pool.counts() == dict(free=4, cached=1, active=1, reserved=0, quarantined=0)
    if broken == "leaked":
        pool._free.pop()
    else:
        pool._free.append(second if broken == "free and held" else pool._free[0])
    assert sum(pool.counts().values()) == pool.total
    assert sum(pool.recount().values()) == pool.total + off
    with pytest.raises(AssertionError):
        pool.check()


def test_a_recount_sees_a_state_that_nobody_counted() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool._states[block] = BlockState.QUARANTINED
    assert pool.counts()["active"] == 1
    assert (pool.recount()["active"], pool.recount()["quarantined"]) == (0, 1)
    with pytest.raises(AssertionError):
        pool.check()

"""Stashes one by one, where the machine over tiers (test_machine.py) seldom comes. Schedulers that swap by
them are in tests/decode_worker/scheduler/test_swapping.py and tests/integration/test_swap_fake.py."""

from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tiers.commands import Store, Stored
from engine.kv.tiers.stashes import Stashes
from engine.kv.tiers.tiers import Tiers

SIZE = 4


def _computed(kv: KVCacheManager, tokens: list[int]) -> Lease:
    lease = kv.acquire(b"", tokens, match_limit=len(tokens) - 1, room_tokens=len(tokens))
    assert lease is not None
    kv.copied(lease)
    kv.commit(lease, tokens)
    return lease


def test_host_memory_that_is_full_stays_as_it_was() -> None:
    """Guards pins of what is there already: they outlived the refusal, and the slot was nobody's for ever."""
    tiers = Tiers(2, 1000)
    kv = KVCacheManager(8, SIZE, "m", tiers)
    stashes = Stashes(kv, tiers)
    first = stashes.put(_computed(kv, [1, 1, 1, 1, 2, 2, 2, 2]), 2 * SIZE)
    assert first is not None
    (store,) = tiers.take_commands()
    assert isinstance(store, Store)
    stored = Stored(store.number, 2, 0.1)
    tiers.handle(stored)
    assert stashes.stored(stored) == [], "it has not failed"
    assert (stashes.stored_blocks, stashes.store_s) == (2, 0.1), "what operators are told"
    stashes.drop(first)
    longer = _computed(kv, [1, 1, 1, 1, 3, 3, 3, 3, 4, 4, 4, 4])
    before = kv.pool.counts()
    assert stashes.put(longer, 3 * SIZE) is None, "one of its blocks is there, and one slot for two"
    assert kv.pool.counts() == before and not tiers.take_commands()
    assert tiers.host.room == 2 and tiers.blocks["host"] == 2 and not stashes.kept
    assert stashes.put(longer, 2 * SIZE) is not None
    kv.check()
    stashes.check()


def test_less_than_a_block_is_no_stash() -> None:
    tiers = Tiers(4, 1000)
    kv = KVCacheManager(8, SIZE, "m", tiers)
    stashes = Stashes(kv, tiers)
    assert stashes.put(_computed(kv, [1, 2, 3, 4, 5]), SIZE - 1) is None and not stashes.kept


def test_a_stash_that_was_dropped_is_nobodys_failure() -> None:
    """Guards a request that has ended against being told that its copies have failed."""
    tiers = Tiers(4, 1000)
    kv = KVCacheManager(8, SIZE, "m", tiers)
    stashes = Stashes(kv, tiers)
    kept, dropped = (stashes.put(_computed(kv, [n] * 4), SIZE) for n in (1, 2))
    assert kept is not None and dropped is not None
    stores = [store for store in tiers.take_commands() if isinstance(store, Store)]
    stashes.drop(dropped)
    failed = []
    for store in stores:
        stored = Stored(store.number, 0, 0.1, "no memory")
        tiers.handle(stored)
        failed += stashes.stored(stored)
    assert len(stores) == 2 and failed == [kept]
    assert not stashes.kept


def test_a_stash_has_failed_when_its_last_copy_has_ended() -> None:
    """Guards a request against being told of its failure while a copy still reads its blocks, and twice."""
    tiers = Tiers(4, 1000)
    kv = KVCacheManager(8, SIZE, "m", tiers)
    stashes = Stashes(kv, tiers)
    short = stashes.put(_computed(kv, [1, 1, 1, 1]), SIZE)
    long = stashes.put(_computed(kv, [1, 1, 1, 1, 2, 2, 2, 2]), 2 * SIZE)
    assert short is not None and long is not None and len(long.stores) == 2, "the first block's copy is under way"
    failed = []
    for store in [one for one in tiers.take_commands() if isinstance(one, Store)]:
        stored = Stored(store.number, 0, 0.1, "no memory")
        tiers.handle(stored)
        failed.append(stashes.stored(stored))
    assert failed == [[short], [long]] and not stashes.kept
    kv.check()


def test_no_more_is_kept_than_is_asked_for() -> None:
    """Guards host memory: of a longer sequence a block beyond the last that was computed was copied too."""
    tiers = Tiers(4, 1000)
    kv = KVCacheManager(8, SIZE, "m", tiers)
    stashes = Stashes(kv, tiers)
    lease = _computed(kv, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    stash = stashes.put(lease, 2 * SIZE - 1)
    assert stash is not None and stash.identities == (lease.path[0].identity,)
    stashes.check()

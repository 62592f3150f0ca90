"""Fetches one by one: what is begun, shared, refused and left behind. Random requests over all tiers are in
test_machine.py, schedulers that wait for fetches in tests/integration/test_tiers_fake.py and tests/sim."""

from engine import identity
from engine.kv.block_pool import BlockState
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import DiskHung, Loaded, TierLoad
from engine.kv.tiers.fetches import MAX_FETCHES, Fetches
from engine.kv.tiers.tiers import Tiers
from engine.types import BlockId

SIZE, BLOCKS = 4, 12
FAST = 1e-6
"""Tokens per second of a worker that had better load whatever there is."""


class Rig:
    """A device cache over a host tier that holds the prompts it is made with."""

    def __init__(self, *prompts: list[int], blocks: int = BLOCKS) -> None:
        self.tiers = Tiers(16, 4096)
        self.kv = KVCacheManager(blocks, SIZE, "m", self.tiers)
        self.fetches = Fetches(self.kv, self.tiers)
        for prompt in prompts:
            parent = self.kv.cache.root_identity(b"")
            for at in range(0, len(prompt), SIZE):
                parent = identity.extend(parent, prompt[at : at + SIZE])
                self.tiers.demote(parent, BlockId(0))
        self.tiers.take_commands()

    def load(self) -> TierLoad:
        (load,) = self.tiers.take_commands()
        assert isinstance(load, TierLoad)
        return load

    def check(self) -> None:
        self.kv.check()
        self.fetches.check()


PROMPT = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]


def test_what_was_loaded_is_cached_like_anything_else() -> None:
    rig = Rig(PROMPT[:8])
    fetch = rig.fetches.wanted(b"", PROMPT, 9, FAST)
    assert fetch is not None and rig.kv.pool.counts()["reserved"] == 2
    load = rig.load()
    assert load.targets == tuple(fetch.lease.blocks)
    rig.check()
    rig.fetches.handle(Loaded(load.number, 2, 0.1, 0.0))
    assert fetch.is_over and len(rig.fetches) == 0
    assert rig.kv.matched_tokens(b"", PROMPT, 9) == 8
    assert rig.kv.pool.counts() == {"free": 10, "cached": 2, "active": 0, "reserved": 0, "quarantined": 0}
    assert rig.fetches.wanted(b"", PROMPT, 9, FAST) is None, "there is nothing more"
    rig.check()


def test_the_same_prefix_is_loaded_once() -> None:
    rig = Rig(PROMPT[:8])
    fetch = rig.fetches.wanted(b"", PROMPT, 9, FAST)
    assert fetch is not None and rig.fetches.wanted(b"", [*PROMPT[:8], 9, 9], 9, FAST) is fetch
    rig.load()
    rig.check()


def test_only_the_blocks_that_were_whole_are_cached() -> None:
    """Guards a match in a block that nobody has written: the load ended before it."""
    rig = Rig(PROMPT[:8])
    fetch = rig.fetches.wanted(b"", PROMPT, 9, FAST)
    rig.fetches.handle(Loaded(rig.load().number, 1, 0.1, 0.0))
    assert fetch is not None and fetch.is_over
    assert rig.kv.matched_tokens(b"", PROMPT, 9) == 4 and rig.kv.pool.free == BLOCKS - 1
    rig.check()


def test_a_fetch_goes_on_where_the_device_ends() -> None:
    rig = Rig(PROMPT[:4], PROMPT[:8])
    rig.fetches.wanted(b"", PROMPT[:4], 4, FAST)
    rig.fetches.handle(Loaded(rig.load().number, 1, 0.1, 0.0))
    fetch = rig.fetches.wanted(b"", PROMPT, 9, FAST)
    load = rig.load()
    assert fetch is not None and fetch.cached_tokens == 4 and len(load.targets) == 1
    assert load.targets == (fetch.lease.blocks[1],)
    assert rig.kv.pool.state(fetch.lease.blocks[0]) is BlockState.ACTIVE, "what it goes on from is held"
    rig.check()


def test_what_is_computed_sooner_is_not_loaded() -> None:
    rig = Rig(PROMPT[:8])
    rig.tiers.cost.measured(1, 1.0, 0, 0.0)
    assert rig.fetches.wanted(b"", PROMPT, 9, tokens_per_s=2 * SIZE) is None
    assert rig.tiers.counts.refused == 1 and not rig.tiers.take_commands()


def test_what_is_to_come_is_told_and_neither_begun_nor_refused() -> None:
    """Guards a look at the line that would load for whoever stands in it, or make a slow tier cheaper at every look."""
    rig = Rig(PROMPT[:8])
    assert rig.fetches.coming(b"", PROMPT, 9, FAST) == 8 and not rig.fetches
    assert rig.fetches.coming(b"", PROMPT, 7, FAST) == 4, "whole blocks"
    assert rig.fetches.coming(b"", [7, *PROMPT], 9, FAST) == 0
    rig.tiers.cost.measured(1, 1.0, 0, 0.0)
    assert rig.fetches.coming(b"", PROMPT, 9, tokens_per_s=2 * SIZE) == 0
    assert rig.fetches.coming(b"", PROMPT, 9, tokens_per_s=0.9 * SIZE) == 8
    assert rig.tiers.cost.host_s == 1.0 and not rig.tiers.counts.refused and not rig.tiers.take_commands()


def test_what_is_on_its_way_comes_whatever_it_costs_by_now() -> None:
    """Guards a prompt that shares only the beginning of what is loaded, and one whose load turned out to be slow."""
    rig = Rig(PROMPT[:8])
    rig.fetches.wanted(b"", PROMPT, 9, FAST)
    rig.tiers.cost.measured(1, 1.0, 0, 0.0)
    assert rig.fetches.coming(b"", PROMPT, 9, tokens_per_s=2 * SIZE) == 8
    assert rig.fetches.coming(b"", [*PROMPT[:4], 9, 9, 9, 9, 9], 8, tokens_per_s=2 * SIZE) == 4
    rig.fetches.handle(Loaded(rig.load().number, 1, 0.1, 0.0))
    assert rig.fetches.coming(b"", PROMPT, 9, FAST) == 0, "the second block was torn, and is gone"


def test_so_many_at_once() -> None:
    prompts = [[n] * SIZE for n in range(1, MAX_FETCHES + 2)]
    rig = Rig(*prompts)
    fetches = [rig.fetches.wanted(b"", prompt, SIZE, FAST) for prompt in prompts]
    assert [fetch is None for fetch in fetches] == [False] * MAX_FETCHES + [True]
    rig.check()


def test_without_room_nothing_is_held() -> None:
    """Guards pins of a load that was not begun: its slots would be nobody's for ever."""
    rig = Rig(PROMPT[:8], blocks=2)
    busy = rig.kv.acquire(b"", [7], match_limit=0, room_tokens=1)
    before = rig.kv.pool.counts()
    assert busy is not None and rig.fetches.wanted(b"", PROMPT, 9, FAST) is None
    assert rig.tiers.host.room == 16 and rig.kv.pool.counts() == before and not rig.tiers.take_commands()
    rig.check()


def test_a_fetch_goes_on_behind_the_last_block_that_is_there() -> None:
    """Guards identities, which chain: the third block is found by the name of the second."""
    prompt = [*PROMPT[:8], 3, 3, 3, 3, 4]
    rig = Rig(prompt[:12])
    lease = rig.kv.acquire(b"", prompt[:8], match_limit=0, room_tokens=8)
    assert lease is not None
    rig.kv.commit(lease, prompt[:8])
    fetch = rig.fetches.wanted(b"", prompt, 12, FAST)
    assert fetch is not None and fetch.cached_tokens == 8 and len(rig.load().targets) == 1
    rig.check()


def test_a_block_costs_what_its_tokens_cost() -> None:
    rig = Rig(PROMPT[:8])
    rig.tiers.cost.measured(1, 1.1, 0, 0.0)
    assert rig.fetches.wanted(b"", PROMPT, 9, tokens_per_s=SIZE) is None, "a block is computed in a second"


def test_what_the_tiers_hear_else_ends_no_fetch() -> None:
    """Guards a load whose blocks would be let go while it writes to them, and a worker that dies of a hanging disk."""
    rig = Rig(PROMPT[:8])
    fetch = rig.fetches.wanted(b"", PROMPT, 9, FAST)
    load = rig.load()
    rig.fetches.handle(DiskHung("it hangs"))
    assert fetch is not None and not fetch.is_over and len(rig.fetches) == 1
    rig.fetches.handle(Loaded(load.number, 2, 0.1, 0.0))
    assert fetch.is_over
    rig.check()


def test_a_fetch_behind_what_the_device_has_is_cached_with_it() -> None:
    """Guards a fetch whose lease begins with blocks of its own cache: they have no windows to be indexed."""
    rig = Rig(PROMPT[:8])
    lease = rig.kv.acquire(b"", PROMPT[:4], match_limit=0, room_tokens=4)
    assert lease is not None
    rig.kv.commit(lease, PROMPT[:4])
    fetch = rig.fetches.wanted(b"", PROMPT, 9, FAST)
    assert fetch is not None and len(fetch.lease.path) == 1
    rig.fetches.handle(Loaded(rig.load().number, 1, 0.1, 0.0))
    assert rig.kv.matched_tokens(b"", PROMPT, 9) == 8
    rig.check()


def test_of_blocks_of_one_token_as_many_are_cached_as_were_whole() -> None:
    """Guards a token more than was loaded: where it fills a block, nobody has written that."""
    tiers = Tiers(16, 4096)
    kv = KVCacheManager(BLOCKS, 1, "m", tiers)
    for ident in identity.chain(kv.cache.root_identity(b""), [1, 2, 3], 1):
        tiers.demote(ident, BlockId(0))
    tiers.take_commands()
    fetches = Fetches(kv, tiers)
    assert fetches.wanted(b"", [1, 2, 3, 4], 3, FAST) is not None
    (load,) = tiers.take_commands()
    assert isinstance(load, TierLoad) and len(load.targets) == len(load.places) == 3
    fetches.handle(Loaded(load.number, 2, 0.1, 0.0))
    assert kv.matched_tokens(b"", [1, 2, 3, 4], 3) == 2
    kv.check()

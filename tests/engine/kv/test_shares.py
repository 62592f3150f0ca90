"""Whose block goes: a flood takes the flood's own, and a share's content depends on its owner's requests alone."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.manager import KVCacheManager
from engine.kv.shares import CacheShares
from engine.kv.tiers.host_index import HostIndex

SIZE = 4
A, V = b"attacker", b"victim"


class Tenants:
    """A pool of blocks, and requests that come one at a time: each computes its tokens and lets go."""

    def __init__(self, blocks: int = 16, **shares: float) -> None:
        self.kv = KVCacheManager(blocks, SIZE, "m")
        for name, share in shares.items():
            self.kv.entitle(name.encode(), share)

    def ask(self, name: bytes, tokens: list[int]) -> int:
        """Return how many tokens the request found cached."""
        lease = self.kv.acquire(name, tokens, match_limit=len(tokens) - 1, room_tokens=len(tokens))
        assert lease is not None, "an idle worker refuses what fits its pool"
        cached = lease.cached_tokens
        self.kv.copied(lease)
        self.kv.commit(lease, tokens)
        self.kv.release(lease)
        self.kv.check()
        return cached


def prompt(number: int, blocks: int = 2) -> list[int]:
    return [number] * (SIZE * blocks) + [0]


def test_a_flood_takes_the_floods_own_blocks() -> None:
    """Guards against a tenant that flushes everybody's cache by asking for more than the cache holds."""
    tenants = Tenants()
    assert [tenants.ask(V, prompt(number)) for number in (1, 2)] == [0, 0]
    for number in range(100, 150):
        tenants.ask(A, prompt(number))
    assert [tenants.ask(V, prompt(number)) for number in (1, 2)] == [8, 8]


def test_those_without_a_share_end_with_equal_parts() -> None:
    tenants = Tenants(blocks=18)
    for number in range(60):
        for name in (A, V, b"third"):
            tenants.ask(name, prompt(number))
    owners = Counter(tenants.kv._owners.values())
    assert max(owners.values()) - min(owners.values()) <= 1, owners


def test_one_tenant_alone_has_the_whole_cache() -> None:
    """Guards against shares that cost those who have no tenants anything: the order is plain least recently used."""
    tenants = Tenants(blocks=12)
    for number in range(4):
        tenants.ask(b"", prompt(number))
    assert [tenants.ask(b"", prompt(number)) for number in range(4)] == [8, 8, 8, 8]
    for number in range(4, 8):
        tenants.ask(b"", prompt(number))
    assert [tenants.ask(b"", prompt(number)) for number in (7, 1)] == [8, 0]


def test_a_tenant_with_a_share_takes_nothing_beyond_it() -> None:
    """Guards against a tenant that learns what others use by what it may borrow while they do not."""
    tenants = Tenants(attacker=0.25)
    for number in range(6):
        tenants.ask(A, prompt(number, blocks=1))
        assert tenants.kv.pool.free >= 12, "it has borrowed"
    assert Counter(tenants.kv._owners.values())[A] > 2


asked = st.lists(
    st.tuples(st.sampled_from([A, V]), st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=40
)


@settings(max_examples=200)
@given(asked)
def test_what_a_tenant_with_a_share_finds_cached_depends_on_its_own_requests_alone(
    requests: list[tuple[bytes, int, int]],
) -> None:
    """Guards against gauging: by its own hits and misses, a tenant would see how much another one does."""
    both, alone = Tenants(attacker=0.5, victim=0.5), Tenants(attacker=0.5, victim=0.5)
    for name, number, blocks in requests:
        found = both.ask(name, prompt(number, blocks))
        if name == A:
            assert found == alone.ask(name, prompt(number, blocks))


@settings(max_examples=100)
@given(asked)
def test_the_requests_of_those_without_a_share_never_cost_one_that_has_it_anything(
    requests: list[tuple[bytes, int, int]],
) -> None:
    both, alone = Tenants(victim=0.5), Tenants(victim=0.5)
    for name, number, blocks in requests:
        found = both.ask(name, prompt(number, blocks))
        if name == V:
            assert found == alone.ask(name, prompt(number, blocks))


def test_a_share_bounds_host_memory_too() -> None:
    """Guards against the tier below as the way around a share."""
    index = HostIndex(4)
    index.shares.entitle(A, 0.5)
    for number in range(4):
        index.put(b"%d" % number, A)
        index.check()
    assert len(index) == 2 and index.free == 2
    for number in range(4, 8):
        index.put(b"%d" % number, V)
        index.check()
    assert {identity for identity in (b"2", b"3", b"6", b"7") if identity in index} == {b"2", b"3", b"6", b"7"}


def test_running_requests_are_served_before_anything_is_kept() -> None:
    """Guards against shares that refuse work while memory holds nothing but a cache."""
    tenants = Tenants(victim=0.5)
    for number in range(4):
        tenants.ask(V, prompt(number))
    whole = tenants.kv.acquire(A, [7] * (SIZE * 16), match_limit=0, room_tokens=SIZE * 16)
    assert whole is not None
    tenants.kv.check()


class Machine(RuleBasedStateMachine):
    """The lines against a plain account: every block is somebody's, and idle or not."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: CacheShares[int] = CacheShares(16)
        self.own: dict[bytes, int] = {}
        self.blocks: dict[int, tuple[bytes, bool]] = {}
        self.number = 0

    names = st.sampled_from([b"", b"a", b"b", b"c"])

    @rule(name=names, share=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]))
    def entitle(self, name: bytes, share: float) -> None:
        self.shares.entitle(name, share)
        self.own[name] = int(share * 16)

    @rule(name=names, count=st.integers(0, 4))
    def take(self, name: bytes, count: int) -> None:
        self.shares.took(name, count)
        for _ in range(count):
            self.number += 1
            self.blocks[self.number] = (name, False)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), first=st.booleans())
    def turn(self, data: st.DataObject, first: bool) -> None:
        """Somebody lets a block go, or takes it up again."""
        block = data.draw(st.sampled_from(sorted(self.blocks)))
        name, is_idle = self.blocks[block]
        if is_idle:
            assert self.shares.occupy(name, block)
        else:
            self.shares.let_go(name, block, first=first)
        self.blocks[block] = (name, not is_idle)

    @rule(name=names)
    def evict(self, name: bytes) -> None:
        idle = {owner for owner, is_idle in self.blocks.values() if is_idle}
        if not idle:
            with pytest.raises(KeyError):
                self.shares.loser(name)
            return
        used = Counter(owner for owner, _ in self.blocks.values())
        beyond = {owner: used[owner] - self.own.get(owner, 0) for owner in idle}
        loser = self.shares.loser(name)
        assert beyond[loser] == max(beyond.values())
        assert loser == name or beyond.get(name, -100) < beyond[loser]
        block = self.shares.pop(loser)
        assert self.blocks.pop(block) == (loser, True)
        self.shares.gave(loser)

    @invariant()
    def holds(self) -> None:
        self.shares.check(dict(Counter(owner for owner, _ in self.blocks.values())))
        assert self.shares.idle == sum(is_idle for _, is_idle in self.blocks.values())


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=40)


def test_no_more_is_given_for_a_share_than_is_idle() -> None:
    """Guards a request whose blocks are held: what it has beyond its share is not evicted, and nobody else's is."""
    shares: CacheShares[int] = CacheShares(16)
    shares.entitle(A, 0.25)
    shares.took(A, 6)
    assert shares.excess(A) == 0, "all of them are held"
    shares.let_go(A, 1)
    assert shares.excess(A) == 1
    for block in (2, 3, 4):
        shares.let_go(A, block)
    assert shares.excess(A) == 2, "six, of which four are its own"


def test_what_was_entered_is_tidied_when_it_is_four_times_what_there_is() -> None:
    """Guards memory and the time of each new block: neither grows with the blocks that were ever taken, and the order
    is not made anew with each of them."""
    shares: CacheShares[int] = CacheShares(100)
    shares.took(b"a", 1)
    shares.let_go(b"a", 1)
    lengths = [len(shares._order)]
    for _ in range(200):
        shares.took(b"a", 1)
        shares.gave(b"a")
        lengths.append(len(shares._order))
    assert lengths[:69] == [*range(1, 69), 1] and max(lengths) == 4 + 64
    assert shares.loser(b"b") == b"a"


def test_what_stands_in_no_line_leaves_none() -> None:
    shares: CacheShares[int] = CacheShares(16)
    shares.took(A, 2)
    shares.let_go(A, 1)
    assert not shares.occupy(A, 2) and not shares.occupy(V, 1) and shares.idle == 1
    assert shares.occupy(A, 1) and not shares.occupy(A, 1) and shares.idle == 0


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_share_of_no_block_is_none(share: float) -> None:
    """Guards tenants without a share, whose every prompt says so, and one whose share comes to less than a block."""
    shares: CacheShares[int] = CacheShares(16)
    for _ in range(2):
        shares.entitle(A, share)
        shares.took(A, 2)
        assert shares.excess(A) == 0 and "0 with shares" in repr(shares)
    shares.entitle(A, 0.25)
    shares.entitle(A, share)
    shares.let_go(A, 1)
    assert shares.excess(A) == 0 and "0 with shares" in repr(shares), "it is taken away again"
    shares.check({A: 4})


def test_who_takes_nothing_is_not_remembered() -> None:
    """Guards memory against the names of all tenants whose prompts were cached to the end."""
    shares: CacheShares[int] = CacheShares(16)
    for _ in range(3):
        shares.took(A, 0)
    shares.check({})
    assert not shares._order


def test_of_two_that_are_as_far_beyond_their_shares_whoever_asks_gives_way() -> None:
    """Guards a tenant against another one that has no more right to a block than it."""
    shares: CacheShares[int] = CacheShares(16)
    for number, namespace in enumerate((b"a", b"b", b"c")):
        shares.took(namespace, 2)
        shares.let_go(namespace, number)
    assert [shares.loser(namespace) for namespace in (b"a", b"b", b"c")] == [b"a", b"b", b"c"]
    shares.took(b"b", 1)
    assert [shares.loser(namespace) for namespace in (b"a", b"b", b"c")] == [b"b"] * 3

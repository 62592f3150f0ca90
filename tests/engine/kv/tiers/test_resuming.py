"""What layer groups with windows put into lower tiers, and what is taken from there; random requests are in
test_grouped_machine.py."""

import pytest

from engine import identity
from engine.identity import in_group
from engine.kv.groups import GONE, LayerGroup
from engine.kv.manager import KVCacheManager
from engine.kv.radix_cache import Node
from engine.kv.tiers.commands import Loaded, Store, Stored, TierLoad
from engine.kv.tiers.fetches import MAX_FETCHES, Fetches
from engine.kv.tiers.resuming import _lacking, resuming
from engine.kv.tiers.stashes import Stashes
from engine.kv.tiers.tiers import Tiers
from engine.types import BlockId

SIZE, CHUNK, BLOCKS = 4, 8, 40
FAST = 1e-6
"""Tokens per second of a worker that had better load whatever there is."""
GROUPS = (LayerGroup((0,)), LayerGroup((1,), 6), LayerGroup((2,), 3))
PROMPT = list(range(41))
NAMES = identity.chain(identity.root(b"", "m"), PROMPT, SIZE)


class Rig:
    def __init__(self, host_blocks: int = 40) -> None:
        self.tiers = Tiers(host_blocks, 4096)
        self.kv = KVCacheManager(BLOCKS, SIZE, "m", self.tiers, GROUPS, CHUNK)
        self.fetches = Fetches(self.kv, self.tiers)

    def serve(self, tokens: list[int]) -> int:
        """Compute a prompt in chunks, and return how many of its tokens were cached."""
        lease = self.kv.acquire(b"", tokens, match_limit=len(tokens) - 1, room_tokens=len(tokens))
        assert lease is not None
        self.kv.copied(lease)
        for end in (*range(lease.cached_tokens + CHUNK, len(tokens), CHUNK), len(tokens)):
            self.kv.reach(lease, max(lease.cached_tokens, end - CHUNK), end)
            self.kv.commit(lease, tokens[:end])
            self.kv.slide(lease, end)
        self.kv.commit(lease, tokens, tail=True)
        self.kv.release(lease)
        self.kv.check()
        return lease.cached_tokens

    def push_down(self, blocks: int = BLOCKS) -> None:
        """Evict so many blocks, or all."""
        for _ in range(blocks):
            if self.kv.cache.idle:
                self.kv._evict(b"")
        self.kv.check()
        self.tiers.take_commands()

    def load(self) -> TierLoad:
        (load,) = self.tiers.take_commands()
        assert isinstance(load, TierLoad)
        return load


def test_of_windows_only_tails_go_down() -> None:
    """Guards host memory against blocks that slid away: nobody goes on behind them, and they would take most of it."""
    rig = Rig()
    rig.serve(PROMPT)
    rig.push_down()
    assert all(name in rig.tiers for name in NAMES)
    for number, group in enumerate(GROUPS[1:], 1):
        first = group.first_kept(len(PROMPT), SIZE)
        held = [in_group(name, number) in rig.tiers for name in NAMES]
        assert held == [at >= first for at in range(len(NAMES))]
    assert rig.tiers.counts.saved_blocks == len(NAMES) + 2 + 1


def test_a_prefix_comes_back_with_its_tails() -> None:
    rig = Rig()
    rig.serve(PROMPT)
    rig.push_down()
    assert rig.fetches.coming(b"", PROMPT, 40, FAST) == 40
    fetch = rig.fetches.wanted(b"", PROMPT, 40, FAST)
    assert fetch is not None and len(fetch.tokens) == 40
    assert rig.fetches.coming(b"", PROMPT, 40, tokens_per_s=1e9) == 40, "it is on its way"
    load = rig.load()
    assert len(load.targets) == len(set(load.targets)) == 13
    assert rig.kv.pool.counts()["reserved"] == 13
    rig.fetches.handle(Loaded(load.number, 13, 0.1, 0.0))
    rig.kv.check()
    assert rig.kv.matched_tokens(b"", PROMPT, 40) == 40
    assert rig.kv.pool.counts()["cached"] == 13
    assert rig.fetches.wanted(b"", PROMPT, 40, FAST) is None, "there is nothing more"
    assert rig.fetches.coming(b"", PROMPT, 40, FAST) == 0


def test_a_prefix_does_not_wait_for_the_load_of_another() -> None:
    """Guards a prompt that is held back for blocks which are none of its own."""
    rig, other = Rig(), list(range(100, 117))
    rig.serve(PROMPT)
    rig.serve(other)
    rig.push_down()
    fetch = rig.fetches.wanted(b"", PROMPT, 40, FAST)
    beside = rig.fetches.wanted(b"", other, 16, FAST)
    assert fetch is not None and beside is not None and beside is not fetch
    assert list(fetch.tokens) == PROMPT[:40] and list(beside.tokens) == other[:16]
    assert rig.fetches.wanted(b"", [*other[:16], 7], 16, FAST) is beside, "and for one that has them it waits"
    rig.fetches.check()


def test_a_tail_behind_the_last_token_that_may_be_found_is_none() -> None:
    """Guards a prompt that is asked again: behind all sixteen tokens the device has the tails, but behind twelve, which
    is as far as whole blocks go before the last token, they are below."""
    rig, prompt = Rig(), PROMPT[:16]
    rig.serve(prompt[:13])
    rig.push_down()
    rig.serve(prompt)
    while rig.kv.cache.match(b"", prompt, 12, whole=True).nodes:
        rig.push_down(1)
    assert rig.kv.matched_tokens(b"", prompt, 16) == 16 and rig.kv.matched_tokens(b"", prompt, 15) == 0
    found = resuming(rig.kv.cache, rig.tiers, GROUPS, b"", prompt, 15)
    assert found is not None and (found.blocks, found.saved_blocks) == (3, 3)
    assert all(group for _, group in found.wanted), "the first group is on the device"
    assert rig.fetches.wanted(b"", prompt, 15, FAST) is not None


def test_what_the_device_has_is_not_loaded() -> None:
    """Guards the blocks of a prefix that still lies on the device although its windows' tails are below: to load it all
    would need room for what is there."""
    rig = Rig()
    rig.serve(PROMPT)
    while rig.kv.cache.longest(b"", PROMPT, 40).nodes[7:]:
        rig.push_down(1)
    found = resuming(rig.kv.cache, rig.tiers, GROUPS, b"", PROMPT, 40)
    assert found is not None and found.blocks == 10 and found.match.nodes
    here = len(found.match.nodes)
    assert [at for at, group in found.wanted if not group] == list(range(here, 10))
    assert rig.kv.matched_tokens(b"", PROMPT, 40) < here * SIZE, "the windows' tails are not there"
    before = rig.kv.pool.counts()
    fetch = rig.fetches.wanted(b"", PROMPT, 40, FAST)
    assert fetch is not None and rig.kv.pool.counts()["reserved"] == len(found.wanted)
    assert rig.kv.pool.counts()["active"] == here and before["cached"] >= here
    load = rig.load()
    rig.fetches.handle(Loaded(load.number, len(load.targets), 0.1, 0.0))
    rig.kv.check()
    assert rig.kv.matched_tokens(b"", PROMPT, 40) == 40


def test_without_one_tail_nothing_is_of_use() -> None:
    """Guards going on behind a prefix of which one window has a gap."""
    rig = Rig()
    rig.serve(PROMPT)
    rig.push_down()
    missing = in_group(NAMES[-1], 2)
    rig.tiers.host.pin(missing)
    rig.tiers.host.spoil(missing)
    rig.tiers.unkeep([missing])
    assert missing not in rig.tiers
    assert rig.fetches.wanted(b"", PROMPT, 40, FAST) is None


def test_a_load_that_is_not_whole_leaves_nothing() -> None:
    """Guards against a part of a load that is taken for a prefix: its windows' tails come last."""
    rig = Rig()
    rig.serve(PROMPT)
    rig.push_down()
    assert rig.fetches.wanted(b"", PROMPT, 40, FAST) is not None
    load = rig.load()
    rig.fetches.handle(Loaded(load.number, 12, 0.1, 0.0))
    rig.kv.check()
    counts = rig.kv.pool.counts()
    assert counts["free"] == BLOCKS and rig.kv.matched_tokens(b"", PROMPT, 40) == 0
    assert in_group(NAMES[-1], 2) not in rig.tiers or rig.tiers.counts.broken_blocks == 1


def test_a_prefix_that_others_went_on_behind_is_kept() -> None:
    """Guards a system prompt: its tail slides away in every request, and is worth a place below all the same."""
    rig = Rig()
    stem = list(range(100, 116))
    rig.serve([*stem, 1, 2, 3])
    assert rig.serve([*stem, *range(200, 222)]) == 16
    rig.push_down()
    fetch = rig.fetches.wanted(b"", [*stem, *range(300, 320)], 35, FAST)
    assert fetch is not None and len(fetch.tokens) == 16


def test_a_prefix_that_was_adopted_is_kept() -> None:
    """Guards the same where who went on had begun to compute the prefix itself, when another one was done with it."""
    rig, stem = Rig(), list(range(100, 116))
    waits, tokens = rig.kv.acquire(b"", (), match_limit=0, room_tokens=38), [*stem, *range(200, 222)]
    rig.serve([*stem, *range(50, 72)])
    assert waits is not None and rig.kv.adopt(waits, tokens[:-1]) == 16
    for end in (24, 32, 38):
        rig.kv.reach(waits, max(16, end - CHUNK), end)
        rig.kv.commit(waits, tokens[:end])
        rig.kv.slide(waits, end)
    rig.kv.release(waits)
    rig.push_down()
    fetch = rig.fetches.wanted(b"", [*stem, *range(300, 320)], 35, FAST)
    assert fetch is not None and len(fetch.tokens) == 16


def test_a_router_is_told_of_the_first_group_alone() -> None:
    """Guards reports against names that no router knows, several for each block."""
    rig = Rig(host_blocks=6)
    rig.serve(PROMPT)
    rig.push_down()
    gone = rig.kv.take_evicted()
    known = identity.blocks(identity.root(b"", "m"), PROMPT, SIZE)  # with the one that is partly filled
    assert gone and set(gone) <= set(known)


def test_a_prefix_is_worth_what_its_blocks_would_take_to_compute() -> None:
    """Guards both sides of the price: all that is loaded, tails too, against the tokens that are saved."""
    for faster, is_loaded in ((-0.5, True), (0.5, False)):
        rig = Rig()
        rig.serve(PROMPT)
        rig.push_down()
        found = resuming(rig.kv.cache, rig.tiers, GROUPS, b"", PROMPT, 40)
        assert found is not None and found.saved_blocks == 10
        rig.tiers.cost.measured(1, 1.0, 0, 0.0)
        tokens_per_s = 40 / (len(found.identities) - faster)
        assert rig.fetches.coming(b"", PROMPT, 40, tokens_per_s) == (40 if is_loaded else 0)
        assert not rig.tiers.counts.refused and not rig.fetches
        assert (rig.fetches.wanted(b"", PROMPT, 40, tokens_per_s) is not None) == is_loaded


@pytest.mark.parametrize("tokens", [5, 9, 13, 17, 20, 21, 24, 33])
def test_a_stash_has_the_tails_that_going_on_from_its_end_takes(tokens: int) -> None:
    """Guards a swap that comes back without a block that its next token sees, and host memory for those that none
    does."""
    rig = Rig()
    lease = rig.kv.acquire(b"", PROMPT[:tokens], match_limit=0, room_tokens=tokens)
    assert lease is not None
    for end in range(1, tokens + 1):
        rig.kv.reach(lease, end - 1, end)
        rig.kv.commit(lease, PROMPT[:end])
        rig.kv.slide(lease, end)
    whole = tokens // SIZE
    expected = list(NAMES[:whole])
    for number, group in enumerate(GROUPS[1:], 1):
        seen = range(max(0, whole * SIZE - group.window + 1), whole * SIZE)
        expected += [in_group(NAMES[at], number) for at in sorted({token // SIZE for token in seen})]
    stashes = Stashes(rig.kv, rig.tiers)
    assert stashes.missing(lease, tokens) == len(expected)
    stash = stashes.put(lease, tokens)
    assert stash is not None and list(stash.identities) == expected and stash.stores
    (store,) = rig.tiers.take_commands()
    assert isinstance(store, Store) and len(store.blocks) == len(expected)
    stashes.check()
    stored = Stored(store.number, len(expected), 0.1)
    rig.tiers.handle(stored)
    stashes.stored(stored)
    assert stash.lease.released and stashes.missing(lease, tokens) == 0
    # All of it is there now: nothing is copied, and nothing is held for it.
    again = stashes.put(lease, tokens)
    assert again is not None and not again.stores and again.lease.released and not rig.tiers.take_commands()
    stashes.check()
    rig.kv.release(lease)
    rig.kv.check()
    assert rig.kv.available == BLOCKS


def test_tails_that_come_back_to_blocks_on_the_device_are_found_there() -> None:
    """Guards a load that was for nothing: the blocks of the first group never left, and get their windows back."""
    rig, prompt = Rig(), PROMPT[:16]
    rig.serve(prompt[:13])
    rig.push_down()
    rig.serve(prompt)
    while rig.kv.cache.match(b"", prompt, 12, whole=True).nodes:
        rig.push_down(1)
    fetch = rig.fetches.wanted(b"", prompt, 15, FAST)
    assert fetch is not None
    load = rig.load()
    rig.fetches.handle(Loaded(load.number, len(load.targets), 0.1, 0.0))
    rig.kv.check()
    assert fetch.is_over and rig.kv.matched_tokens(b"", prompt, 15) >= 12
    assert rig.fetches.wanted(b"", prompt, 15, FAST) is None


def test_without_room_for_a_prefix_and_its_tails_nothing_is_pinned() -> None:
    """Guards host memory: what was pinned for a load that never begins would stay there for good."""
    rig = Rig()
    rig.serve(PROMPT)
    rig.push_down()
    held = rig.kv.acquire(b"x", [], match_limit=0, room_tokens=4, grow_tokens=SIZE * (BLOCKS - 12))
    assert held is not None
    before = rig.tiers.host.room
    assert rig.fetches.wanted(b"", PROMPT, 40, FAST) is None and not rig.fetches
    assert rig.tiers.host.room == before and not rig.tiers.take_commands()
    rig.kv.release(held)
    assert rig.fetches.wanted(b"", PROMPT, 40, FAST) is not None


def test_of_prefixes_with_tails_so_many_at_once() -> None:
    """Guards the pool: every prompt that waits would hold the blocks that it loads."""
    rig, prompts = Rig(host_blocks=80), [list(range(100 * n, 100 * n + 17)) for n in range(1, MAX_FETCHES + 2)]
    for prompt in prompts:
        rig.serve(prompt)
    rig.push_down()
    fetches = [rig.fetches.wanted(b"", prompt, 16, FAST) for prompt in prompts]
    assert [fetch is None for fetch in fetches] == [False] * MAX_FETCHES + [True]
    rig.fetches.check()


def test_a_router_is_told_of_no_windows_tail_that_was_forgotten() -> None:
    """Guards what a router hears where host memory is small: names that it was never given, each a lookup."""
    rig, prompts = Rig(host_blocks=12), [list(range(100 * n, 100 * n + 16)) for n in range(4)]
    for prompt in prompts:
        rig.serve(prompt)
        rig.push_down()
    known = {name for prompt in prompts for name in identity.chain(identity.root(b"", "m"), prompt, SIZE)}
    told = rig.kv.take_evicted()
    assert told and set(told) <= known


def test_a_tail_on_the_device_is_asked_of_no_tier() -> None:
    """Guards a prefix whose tails are here alone: it would be taken for one that is nowhere."""
    rig, asked = Rig(), list[bytes]()
    rig.tiers.can_load = lambda name: bool(asked.append(name))  # type: ignore[method-assign, func-returns-value]
    here = Node(None, b"", BlockId(1), NAMES[0], [BlockId(2), BlockId(3)])
    partly = Node(here, b"", BlockId(4), NAMES[1], [BlockId(5), GONE])
    assert _lacking(rig.tiers, GROUPS, [here, partly], NAMES, 1, SIZE) == [] == asked
    assert _lacking(rig.tiers, GROUPS, [here, partly], NAMES, 2, SIZE) == 1
    assert asked == [in_group(NAMES[1], 2)]

"""No block that was computed under one adapter, or under none, is found under another: on the device, in a tier, or by
the name that a block has between workers."""

import itertools

from engine import identity
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.disk_index import DiskIndex
from engine.kv.tiers.fetches import Fetches
from engine.kv.tiers.tiers import Tiers
from engine.types import RequestId, RequestRecord

SIZE = 4
TOKENS = list(range(12))
SPACES = [
    RequestRecord(
        request=RequestId("a"), tokens=[1], prompt_tokens=1, max_tokens=1, seed=1, namespace=namespace, adapter=adapter
    ).space
    for namespace in (b"", b"t" * 16, b"t" * 16 + b"s" * 16)
    for adapter in ("", "5ad0", "5ad1")
]


def _run(kv: KVCacheManager, space: bytes) -> None:
    lease = kv.acquire(space, TOKENS, match_limit=len(TOKENS) - 1, room_tokens=len(TOKENS))
    assert lease is not None and lease.cached_tokens == 0, "found under another adapter"
    kv.commit(lease, TOKENS, tail=True)
    kv.release(lease)


def test_the_device_finds_each_its_own() -> None:
    kv = KVCacheManager(64, SIZE, "m")
    for space in SPACES:
        assert kv.matched_tokens(space, TOKENS, 11) == 0
        _run(kv, space)
        assert kv.matched_tokens(space, TOKENS, 11) == 11
        kv.check()
    names = [node.identity for node in kv.cache.nodes()]
    assert len(names) == len(set(names)) == 3 * len(SPACES)


def test_so_do_the_host_tier_and_the_disk() -> None:
    """Guards tiers whose keys would be of tokens and tenant alone: another adapter would load what one wrote."""
    tiers = Tiers(64, 4096)
    kv = KVCacheManager(3, SIZE, "m", tiers)  # room for one sequence: each evicts the last one
    fetches = Fetches(kv, tiers)
    for space in SPACES:
        assert fetches.wanted(space, TOKENS, 12, 1e-6) is None, "found under another adapter"
        _run(kv, space)
    tiers.take_commands()
    assert fetches.wanted(SPACES[1], TOKENS, 12, 1e-6) is not None, "its own is there"

    disk = DiskIndex(1 << 20)
    for space in SPACES:
        chain = identity.chain(identity.root(space, "m"), TOKENS, SIZE)
        assert not set(chain) & disk.places.keys()
        segment, _, _ = disk.reserve(4096)
        assert segment is not None
        disk.written(segment, chain)
    assert len(disk.places) == 3 * len(SPACES)


def test_blocks_of_two_adapters_have_no_name_in_common() -> None:
    """What a migration verifies by, and a router's trees look up by: the short beginnings too."""
    chains = [set(identity.blocks(identity.root(space, "m"), TOKENS, SIZE)) for space in SPACES]
    assert not any(one & other for one, other in itertools.combinations(chains, 2))
    short = {name[: identity.SHORT_BYTES] for chain in chains for name in chain}
    assert len(short) == 3 * len(SPACES)


def test_without_an_adapter_the_names_are_what_they_were() -> None:
    """Guards disks that were written before there were adapters."""
    assert SPACES[0] == b"" and SPACES[3] == b"t" * 16
    found = identity.chain(identity.root(identity.space(b"tenant"), "model"), range(4), 4)[0]
    assert found.hex() == "eb3fac6bb1accd44dbbd7c045307899c"

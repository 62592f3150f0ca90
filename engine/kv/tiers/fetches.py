"""Prefixes on their way back from a lower tier into the device cache. Pure.

A fetch holds a lease of its own: the cached blocks before those that it loads, and RESERVED blocks for them. When
they are in place they are committed and let go: from then on they are cached like any other, and whoever waited for
them finds them by a match. So a fetch belongs to nobody: a request that ends meanwhile leaves no trace, and one that
wants the same prefix waits for the same fetch. Its blocks are given back only when the load has ended: until then it
may write.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine.kv.manager import KVCacheManager, Lease
from engine.kv.radix_cache import Match
from engine.kv.tiers.commands import Loaded, TierEvent
from engine.kv.tiers.resuming import resuming
from engine.kv.tiers.tiers import Tiers

MAX_FETCHES = 2
"""Under way at once: enough to keep the copying thread busy, few enough to push little else out of the cache."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A load under way, until `is_over`. Mutable; owned by `Fetches`."""

    lease: Lease
    tokens: Sequence[int]
    """The sequence up to the end of the last block that is loaded."""
    cached_tokens: int
    identities: frozenset[bytes]
    is_over: bool = False


class Fetches:
    """`match`, where it is asked for: what the device has of the same tokens now, if that is known; a long one takes
    long to find.

    Mutable state: `_under_way`, by the number of its load. Owner: the scheduler."""

    def __init__(self, kv: KVCacheManager, tiers: Tiers) -> None:
        self._kv = kv
        self._tiers = tiers
        self._under_way: dict[int, Fetch] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def wanted(
        self, namespace: bytes, tokens: Sequence[int], limit: int, tokens_per_s: float, match: Match | None = None
    ) -> Fetch | None:
        """Return what a sequence should wait for before it is computed, begun if it was not: its next blocks, where a
        tier has them and gives them back sooner than they are computed. None: nothing, or there is no room now."""
        kv, tiers = self._kv, self._tiers
        if kv.groups:
            return self._all_or_nothing(namespace, tokens, limit, tokens_per_s, match)
        start, found = self._next(namespace, tokens, limit, match)
        if not found:
            return None
        fetch = self._bringing(found[:1])
        if fetch is not None:
            return fetch
        count = tiers.worthwhile(found, kv.block_size, tokens_per_s)
        if not count or len(self) == MAX_FETCHES:
            return None
        tokens, found = tokens[: start + count * kv.block_size], found[:count]
        places = tiers.pin(found)  # what is evicted to make room must not push them out
        lease = kv.acquire(namespace, tokens, match_limit=start, room_tokens=len(tokens), migrating=True)
        if lease is None:
            tiers.unpin(places, found)
            return None
        number = tiers.load(places, found, lease.blocks[start // kv.block_size :])
        fetch = Fetch(lease, tokens, start, frozenset(found))
        self._under_way[number] = fetch
        return fetch

    def _all_or_nothing(
        self, namespace: bytes, tokens: Sequence[int], limit: int, tokens_per_s: float, match: Match | None
    ) -> Fetch | None:
        """Do the same where layers are kept in groups."""
        kv, tiers = self._kv, self._tiers
        found = resuming(kv.cache, tiers, kv.groups, namespace, tokens, limit, match)
        if found is None:
            return None
        fetch = self._bringing(found.identities)
        if fetch is not None:
            return fetch
        if not tiers.is_worthwhile(found.identities, found.saved_blocks, kv.block_size, tokens_per_s):
            return None
        if len(self) == MAX_FETCHES:
            return None
        tokens = tokens[: found.blocks * kv.block_size]
        places = tiers.pin(found.identities)
        lease = kv.acquire(
            namespace, tokens, match_limit=0, room_tokens=len(tokens), migrating=True, behind=found.match
        )
        if lease is None:
            tiers.unpin(places, found.identities)
            return None
        number = tiers.load(places, found.identities, found.targets(lease))
        fetch = Fetch(lease, tokens, len(tokens), frozenset(found.identities))
        self._under_way[number] = fetch
        return fetch

    def coming(
        self, namespace: bytes, tokens: Sequence[int], limit: int, tokens_per_s: float, match: Match | None = None
    ) -> int:
        """Return how many of the first tokens of a sequence are there once its next blocks have come that are on their
        way, or would be loaded sooner than computed. 0: no more than are there now."""
        kv, tiers, size = self._kv, self._tiers, self._kv.block_size
        if kv.groups:
            whole = resuming(kv.cache, tiers, kv.groups, namespace, tokens, limit, match)
            if whole is None:
                return 0
            wanted, saved = whole.identities, whole.saved_blocks
            comes = self._bringing(wanted) is not None or tiers.are_quicker(wanted, saved, size, tokens_per_s)
            return whole.blocks * size if comes else 0
        start, found = self._next(namespace, tokens, limit, match)
        fetch = self._bringing(found[:1])
        if fetch is None:
            count = tiers.quicker(found, size, tokens_per_s)
        else:
            count = sum(1 for _ in takewhile(fetch.identities.__contains__, found))
        return start + count * size if count else 0

    def _next(
        self, namespace: bytes, tokens: Sequence[int], limit: int, match: Match | None
    ) -> tuple[int, list[bytes]]:
        """Return how many leading tokens the device has in whole blocks, and the identities of the next blocks, as far
        as they are in a tier."""
        cache, size = self._kv.cache, self._kv.block_size
        nodes = (match or cache.match(namespace, tokens, limit)).nodes
        parent = nodes[-1].identity if nodes else cache.root_identity(namespace)
        start = len(nodes) * size
        return start, self._tiers.find(parent, tokens, start, limit, size)

    def _bringing(self, identities: Sequence[bytes]) -> Fetch | None:
        """Return the fetch under way that brings any of these."""
        fetches = self._under_way.values()
        return next((fetch for fetch in fetches if not fetch.identities.isdisjoint(identities)), None)

    def handle(self, event: TierEvent) -> None:
        """A load or a spill has ended."""
        self._tiers.handle(event)
        if isinstance(event, Loaded):
            fetch = self._under_way.pop(event.number)
            whole = fetch.cached_tokens + event.blocks * self._kv.block_size
            if not self._kv.groups:
                self._kv.commit_loaded(fetch.lease, fetch.tokens[:whole])
            elif event.blocks == len(fetch.identities):
                self._kv.commit_loaded(fetch.lease, fetch.tokens)
            self._kv.release(fetch.lease)
            fetch.is_over = True

    def check(self) -> None:
        """Recompute that nothing is loaded twice at once."""
        loading = [ident for fetch in self._under_way.values() for ident in fetch.identities]
        assert len(loading) == len(set(loading)), "a block is loaded twice at once"
        assert not any(fetch.is_over or fetch.lease.released for fetch in self._under_way.values())

"""Whole blocks of a sequence, kept in host memory for whoever computed them. Pure.

    put: a lease of its own holds the device blocks --every copy of them has ended--> the lease is let go: they are
         cached, evictable, and in host memory, where they stay --drop--> the tier's, like any others

So a stash belongs to nobody until it is asked for, and a device block is not reused while a copy reads it, whatever
becomes of the request meanwhile. Sequences that share a prefix share its copies, and wait for them together.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tiers.commands import Stored
from engine.kv.tiers.tiers import Tiers


@dataclass(slots=True, eq=False)
class Stash:
    """Mutable; owned by `Stashes`."""

    lease: Lease
    identities: tuple[bytes, ...]
    stores: set[int]
    """Copies under way that it waits for."""
    failed: bool = False
    dropped: bool = False


class Stashes:
    """Mutable state: `kept`, all that there are, and what is counted. Owner: the scheduler."""

    def __init__(self, kv: KVCacheManager, tiers: Tiers) -> None:
        self._kv = kv
        self._tiers = tiers
        self.kept: set[Stash] = set()
        self.stored_blocks = 0
        self.store_s = 0.0

    @property
    def under_way(self) -> int:
        """Stashes whose copies have not ended."""
        return sum(bool(stash.stores) for stash in self.kept)

    @property
    def freeing(self) -> int:
        """Device blocks that nobody but stashes holds: evictable as soon as copies have ended."""
        held = Counter(block for stash in self.kept if stash.stores for block in stash.lease.blocks)
        return sum(self._kv.pool.refs(block) == count for block, count in held.items())

    def missing(self, lease: Lease, tokens: int) -> int:
        """Return how many of the whole blocks of the lease's first `tokens` tokens would have to be copied."""
        path = lease.path[: tokens // self._kv.block_size]
        return sum(node.identity not in self._tiers.host for node in path)

    def put(self, lease: Lease, tokens: int) -> Stash | None:
        """Keep the whole blocks of the lease's first `tokens` tokens, which are committed. None: there are none, or
        host memory has no room for them."""
        size = self._kv.block_size
        path = lease.path[: tokens // size]
        identities = tuple(node.identity for node in path)
        if not path:
            return None
        stores = self._tiers.keep(identities, [node.block for node in path], lease.namespace)
        if stores is None:
            return None
        held = self._kv.promise(lease.namespace, 0)
        assert held is not None
        self._kv.fork(lease, held, len(path) * size)
        stash = Stash(held, identities, stores)
        self.kept.add(stash)
        if not stores:
            self._kv.release(held)
        return stash

    def drop(self, stash: Stash) -> None:
        """Let a stash go that nobody wants any more."""
        stash.dropped = True
        self._settle([stash])

    def stored(self, event: Stored) -> list[Stash]:
        """Copies have ended; returns the stashes that have failed by it. To be called after `Tiers.handle`."""
        self.stored_blocks += event.blocks
        self.store_s += event.seconds
        waited = [stash for stash in self.kept if event.number in stash.stores]
        for stash in waited:
            stash.stores.remove(event.number)
            stash.failed |= bool(event.error)
            if not stash.stores:
                self._kv.release(stash.lease)
        self._settle(waited)
        return [stash for stash in waited if stash.failed and not stash.stores and not stash.dropped]

    def _settle(self, stashes: Iterable[Stash]) -> None:
        for stash in stashes:
            if not stash.stores and (stash.dropped or stash.failed) and stash in self.kept:
                self.kept.remove(stash)
                self._tiers.unkeep(stash.identities)

    def check(self) -> None:
        """Recompute that what is copied is held, and what is kept is there."""
        for stash in self.kept:
            assert stash.lease.released == (not stash.stores), "a lease ends with its copies"
            assert all(ident in self._tiers.host for ident in stash.identities)
            if stash.stores:
                held = [(node.block, node.identity) for node in stash.lease.path]
                assert held == list(zip(stash.lease.blocks, stash.identities, strict=True))
                assert all(self._kv.pool.refs(block) for block in stash.lease.blocks)
